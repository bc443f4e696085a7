-- Reading streams, and what becomes of their segments: retention, compaction, growth.

create or replace function penstock.stream_bounds(p_stream text)
returns table (partition integer, first_offset bigint, next_offset bigint)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    active bigint;
begin
    for active in
        select distinct segment from penstock.stream_partitions where stream_partitions.stream = stream.id
    loop
        return query execute format(
            $select$
                select
                    place.partition,
                    (
                        select start.first_offset
                        from penstock.segment_starts as start
                        where start.stream = place.stream and start.partition = place.partition
                        order by start.segment
                        limit 1
                    ),
                    coalesce(
                        (
                            select tail.first_offset + tail.events
                            from penstock.%1$I as tail
                            where tail.partition = place.partition
                            order by tail.first_offset desc
                            limit 1
                        ),
                        penstock.start_of(place.stream, place.partition, place.segment)
                    )
                from penstock.stream_partitions as place
                where place.stream = $1 and place.segment = $2
                order by place.partition
            $select$,
            'events_' || active
        )
        using stream.id, active;
    end loop;
end
$$;
comment on function penstock.stream_bounds(text) is
    'Of each partition the first offset that is still there and the offset that the next event will get.';

-- Long, since its query is one text: its tables are segments, which come and go, and the chunks of several partitions are cut by one
-- count of events and bytes.
create or replace function penstock.read_chunks(
    p_stream text,
    p_partitions integer[],
    p_offsets bigint[],
    p_limit integer default 1000,
    p_bytes bigint default 8388608,
    p_id integer default null
)
returns table (
    partition integer, first_offset bigint, events integer, appended_at timestamptz, keys text[], times timestamptz[],
    headers json[], data json[], bytes bytea[], offsets bigint[]
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    gone record;
    place record;
begin
    if stream.id <> p_id then
        raise exception 'no such stream: %, it was dropped and created again', p_stream
            using errcode = 'PS404', hint = 'Offsets of the stream that was there before mean nothing in this one: start again.';
    end if;
    -- Each of these calls costs as much as a lookup, and a consumer asks often: they are made when one of them has something to refuse.
    if greatest(cardinality(p_partitions), cardinality(p_offsets)) > 10000
        or (p_limit between 1 and 1000000 and p_bytes between 1 and 1073741824) is not true
    then
        perform penstock.check_size(greatest(cardinality(p_partitions), cardinality(p_offsets)), 10000, 'partitions');
        perform penstock.check_limit(p_limit, 1000000);
        perform penstock.check_limit(p_bytes, 1073741824, 'number of bytes');
    end if;
    if coalesce(cardinality(p_partitions), 0) <> coalesce(cardinality(p_offsets), 0) then
        raise exception 'give an offset for each partition' using errcode = 'PS400',
            hint = 'For example: select * from penstock.read_chunks(''orders'', ''{0, 1}'', ''{0, 0}'', 100);';
    end if;
    for place in
        select found.table_name, array_agg(wanted.partition) as partitions, array_agg(wanted.from_offset) as offsets
        from unnest(p_partitions, p_offsets) as wanted (partition, from_offset)
        left join lateral (
            select segment.table_name
            from penstock.segment_starts as start
            join penstock.segments as segment on segment.id = start.segment
            where start.stream = stream.id and start.partition = wanted.partition and start.first_offset <= wanted.from_offset
            order by start.segment desc
            limit 1
        ) as found on true
        group by found.table_name
    loop
        if place.table_name is null then
            select bounds.*, wanted.from_offset
            into gone
            from unnest(place.partitions, place.offsets) as wanted (partition, from_offset)
            left join penstock.stream_bounds(p_stream) as bounds using (partition)
            limit 1;
            if gone.first_offset is null then
                raise exception 'stream % has no partition %', p_stream, place.partitions[1]
                    using errcode = 'PS404', hint = format('Its partitions are 0 to %s.', stream.partitions - 1);
            end if;
            raise exception 'offset % of partition % of stream % is gone', gone.from_offset, gone.partition, p_stream
                using errcode = 'PS410',
                      hint = format('Retention dropped it; the first that is there is %s, the next to come %s.', gone.first_offset, gone.next_offset);
        end if;
        return query execute format(
            $select$
                select
                    chunk.partition, chunk.first_offset, chunk.events, chunk.appended_at, chunk.keys, chunk.times,
                    chunk.headers, chunk.data, chunk.bytes, chunk.offsets
                from unnest($1, $2) as wanted (partition, from_offset)
                cross join lateral (
                    -- It is planned with each call, so it has as few parts as possible.
                    select
                        stored.*,
                        sum(stored.events) over earlier as events_before,
                        sum(coalesce(pg_column_size(stored.data), pg_column_size(stored.bytes), 0)) over earlier as bytes_before
                    from penstock.%1$I as stored
                    where stored.partition = wanted.partition
                        -- From the chunk that holds the offset, or the next one: not one that ends before it, since there are gaps
                        -- between compacted ones, and a reader in a gap would get the chunk before it for ever.
                        and stored.first_offset >= coalesce(
                            (
                                select before.first_offset
                                from penstock.%1$I as before
                                where before.partition = wanted.partition and before.first_offset <= wanted.from_offset
                                order by before.first_offset desc
                                limit 1
                            ),
                            0
                        )
                        and (
                            stored.first_offset > wanted.from_offset
                            or coalesce(stored.offsets[stored.events] + 1, stored.first_offset + stored.events) > wanted.from_offset
                        )
                        -- Offsets are dense, so these have p_limit events and not many more; fewer where compaction left gaps.
                        and stored.first_offset < coalesce(
                            (
                                select following.first_offset + $3
                                from penstock.%1$I as following
                                where following.partition = wanted.partition and following.first_offset > wanted.from_offset
                                order by following.first_offset
                                limit 1
                            ),
                            9223372036854775807
                        )
                    window earlier as (order by stored.first_offset rows between unbounded preceding and 1 preceding)
                ) as chunk
                where coalesce(chunk.events_before, 0) < $3 and coalesce(chunk.bytes_before, 0) < $4
            $select$,
            place.table_name
        )
        using place.partitions, place.offsets, p_limit, p_bytes;
    end loop;
exception
    when undefined_table then
        -- The caller's snapshot is older than the retirement of a segment, and so old that its table has been dropped.
        raise exception 'offsets of stream % are gone', p_stream
            using errcode = 'PS410', hint = 'Retention dropped them while this transaction was open: read in a new one.';
end
$$;
comment on function penstock.read_chunks(text, integer[], bigint[], integer, bigint, integer) is
    'Reads from several partitions, each from its offset on: whole chunks, in order within a partition, until about p_limit events or p_bytes for each partition. The first chunk may begin below the offset. PS410 when an offset is gone, PS404 for an unknown partition, and when the stream is not the one of p_id (null: whichever it is), since it was dropped and created again.';

create or replace function penstock.read_events(p_stream text, p_partition integer, p_offset bigint default 0, p_limit integer default 100)
returns table (
    event_offset bigint, key text, appended_at timestamptz, happened_at timestamptz, headers json, data json, bytes bytea
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    from_offset bigint := p_offset;
    wanted integer := p_limit;
    found bigint;
begin
    perform penstock.check_limit(p_limit, 100000);
    -- A read of chunks ends at the end of a segment, and at a number of bytes.
    loop
        found := null;
        for event_offset, key, appended_at, happened_at, headers, data, bytes in
            select
                coalesce(chunk.offsets[place], chunk.first_offset + place - 1) as position,
                chunk.keys[place],
                chunk.appended_at,
                chunk.times[place],
                chunk.headers[place],
                chunk.data[place],
                chunk.bytes[place]
            from penstock.read_chunks(p_stream, array[p_partition], array[from_offset], wanted) as chunk
            cross join generate_series(1, chunk.events) as place
            where coalesce(chunk.offsets[place], chunk.first_offset + place - 1) >= from_offset
            order by position
            limit wanted
        loop
            return next;
            found := event_offset;
            wanted := wanted - 1;
        end loop;
        exit when found is null or wanted = 0;
        from_offset := found + 1;
    end loop;
end
$$;
comment on function penstock.read_events(text, integer, bigint, integer) is
    'The next p_limit events of a partition from an offset on, one row each; fewer only at its end. PS410 when the offset is gone.';

create or replace function penstock.offsets_at(p_stream text, p_time timestamptz)
returns table (partition integer, event_offset bigint)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    place record;
    found_offset bigint;
    found_table text;
begin
    for place in select * from penstock.stream_bounds(p_stream) loop
        partition := place.partition;
        event_offset := place.next_offset;
        for found_table in
            select segment.table_name
            from penstock.segments as segment
            where segment.stream = stream.id and (segment.closed_at is null or segment.closed_at >= p_time)
            order by segment.id
        loop
            execute format(
                $select$
                    select first_offset from penstock.%I
                    where partition = $1 and appended_at >= $2
                    order by first_offset
                    limit 1
                $select$,
                found_table
            )
            into found_offset
            using place.partition, p_time;
            if found_offset is not null then
                event_offset := found_offset;
                exit;
            end if;
        end loop;
        return next;
    end loop;
end
$$;
comment on function penstock.offsets_at(text, timestamptz) is
    'Of each partition the offset of the first event that was appended at or after a time; the end, when there is none.';
