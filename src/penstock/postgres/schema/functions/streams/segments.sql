-- Segments: a stream is written to one segment after another. A new one is begun in one partition after another, under the lock of
-- the partition's row.

create or replace function penstock.move_to_segment(p_stream integer, p_name text, p_segment bigint, p_partitions integer[])
returns integer
language plpgsql
as $$
declare
    moved integer;
begin
    insert into penstock.segment_starts (stream, partition, segment, first_offset)
    select p_stream, place.partition, p_segment, bounds.next_offset
    from penstock.stream_partitions as place
    join penstock.stream_bounds(p_name) as bounds using (partition)
    where place.stream = p_stream
        and place.segment < p_segment
        and (p_partitions is null or place.partition = any (p_partitions));
    get diagnostics moved = row_count;
    update penstock.stream_partitions
    set segment = p_segment
    where stream_partitions.stream = p_stream
        and segment < p_segment
        and (p_partitions is null or partition = any (p_partitions));
    update penstock.segments
    set closed_at = penstock.clock()
    where segments.stream = p_stream
        and id < p_segment
        and closed_at is null
        and not exists (
            select from penstock.stream_partitions as place where place.stream = p_stream and place.segment = segments.id
        );
    return moved;
end
$$;
comment on function penstock.move_to_segment(integer, text, bigint, integer[]) is
    'Part of roll_segment, maintain_stream, end_load and commit_staged_events: what is appended to these partitions (null: to all), which the caller has locked, goes to this segment from now on. A segment that no partition is in any more is closed. Returns how many moved.';

create or replace function penstock.roll_segment(p_stream text)
returns bigint
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    begun bigint;
    next_segment bigint;
begin
    -- One at a time, so that the segment with the higher number is the later one.
    perform from penstock.streams where id = stream.id for no key update;
    select max(id) into begun from penstock.segments where segments.stream = stream.id;
    next_segment := penstock.open_segment(stream.id);
    -- From here on appends wait, for as long as this takes to commit.
    perform from penstock.stream_partitions where stream_partitions.stream = stream.id order by partition for no key update;
    -- One that was begun and in which not all partitions are yet comes first: each goes through all of them.
    perform penstock.move_to_segment(stream.id, p_stream, begun, null);
    perform penstock.move_to_segment(stream.id, p_stream, next_segment, null);
    return next_segment;
end
$$;
comment on function penstock.roll_segment(text) is
    'Begins a new segment of a stream in all partitions at once, and waits for appends that are under way while it holds up others; workers begin it in one partition after another, see maintain_stream. Returns its number.';

create or replace function penstock.try_to_roll(p_stream text)
returns boolean
language plpgsql
set lock_timeout = '1s'
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    newest bigint;
    free integer[];
begin
    -- A new segment is begun in one partition after another, as their locks come free: an append in a transaction that stays open
    -- must not make appends to other partitions wait.
    perform from penstock.streams where id = stream.id for no key update;
    select max(id) into newest from penstock.segments where segments.stream = stream.id;
    if not exists (select from penstock.stream_partitions where stream_partitions.stream = stream.id and segment < newest) then
        newest := penstock.open_segment(stream.id);
    end if;
    begin
        -- Where there is always an append a lock is never free: wait for one of them, at a time when nothing else is locked.
        perform
        from penstock.stream_partitions
        where stream_partitions.stream = stream.id and segment < newest
        order by random()
        limit 1
        for no key update;
    exception
        when lock_not_available then
            null;
    end;
    free := array(
        select partition
        from penstock.stream_partitions
        where stream_partitions.stream = stream.id and segment < newest
        for no key update skip locked
    );
    return penstock.move_to_segment(stream.id, p_stream, newest, free) > 0;
exception
    when lock_not_available then
        -- Another transaction changes the stream; the next call tries again.
        return false;
end
$$;
comment on function penstock.try_to_roll(text) is
    'Part of maintain_stream: begins a new segment, or goes on with the one that is begun, in the partitions that have no append at this moment and in one more; it waits for that for a second at most, and holds up no other append. Returns whether some partition moved.';

create or replace function penstock.stream_segments(p_stream text)
returns table (segment bigint, table_name text, opened_at timestamptz, closed_at timestamptz, events bigint, size bigint)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    with bounds as (
        select * from penstock.stream_bounds(p_stream)
    )
    select
        segment.id, segment.table_name, segment.opened_at, segment.closed_at,
        (
            select sum(
                coalesce(
                    (
                        select later.first_offset
                        from penstock.segment_starts as later
                        where later.stream = start.stream and later.partition = start.partition and later.segment > start.segment
                        order by later.segment
                        limit 1
                    ),
                    bounds.next_offset
                ) - start.first_offset
            )::bigint
            from penstock.segment_starts as start
            join bounds using (partition)
            where start.stream = segment.stream and start.segment = segment.id
        ),
        pg_total_relation_size(to_regclass(format('penstock.%I', segment.table_name)))
    from penstock.segments as segment
    where segment.stream = (penstock.require_stream(p_stream)).id
    order by segment.id
$$;
comment on function penstock.stream_segments(text) is
    'The segments of a stream, oldest first, with their numbers of events (offsets, when compacted) and sizes in bytes.';
