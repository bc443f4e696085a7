-- What becomes of streams with time: new segments, retention, compaction, more partitions. Any worker does the first three
-- for all, again and again; everything here may run in many processes at once.
--
-- Each step for each stream is a transaction of its own: appends wait only while a new segment is begun, never while old ones
-- are compacted, and what cannot be done for one stream is no matter to the others.

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
    'Part of roll_segment: what is appended to these partitions (null: to all), which the caller has locked, goes to this segment from now on. A segment that no partition is in any more is closed. Returns how many moved.';

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

create or replace function penstock.retire_segments(p_stream text)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    moment constant timestamptz := penstock.clock();
    segment record;
    bytes_left bigint;
    events_left bigint;
    retired integer := 0;
begin
    if num_nonnulls(stream.keep_age, stream.keep_bytes, stream.keep_events) = 0 then
        return 0;
    end if;
    select sum(size), sum(events) into bytes_left, events_left from penstock.stream_segments(p_stream);
    for segment in select * from penstock.stream_segments(p_stream) where closed_at is not null order by segment loop
        bytes_left := bytes_left - segment.size;
        events_left := events_left - segment.events;
        exit when not coalesce(segment.closed_at <= moment - stream.keep_age, false)
            and not coalesce(bytes_left >= stream.keep_bytes, false)
            and not coalesce(events_left >= stream.keep_events, false);
        exit when stream.keep_unread and exists (
            select
            from penstock.group_offsets as reached
            join penstock.segment_starts as following
                on following.stream = reached.stream and following.partition = reached.partition
            where reached.stream = stream.id
                and following.segment = (select min(id) from penstock.segments where segments.stream = stream.id and id > segment.segment)
                and reached.next_offset < following.first_offset
        );
        delete from penstock.segment_starts where segment_starts.segment = segment.segment;
        delete from penstock.segments where id = segment.segment;
        insert into penstock.retired_segments values (segment.table_name, moment);
        retired := retired + 1;
    end loop;
    return retired;
end
$$;
comment on function penstock.retire_segments(text) is
    'Takes the segments that the retention of a stream does not keep out of sight, oldest first, never the active one; drop_retired drops them. Returns how many.';

create or replace function penstock.drop_retired()
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
-- A drop waits for those that still read the table. No new reader comes, so it can as well be tried again later.
set lock_timeout = '50ms'
as $$
declare
    retired text;
    dropped integer := 0;
begin
    for retired in
        select table_name from penstock.retired_segments order by retired_at limit 100 for update skip locked
    loop
        begin
            execute format('drop table if exists penstock.%I', retired);
            delete from penstock.retired_segments where table_name = retired;
            dropped := dropped + 1;
        exception
            when lock_not_available then
                null;
        end;
    end loop;
    return dropped;
end
$$;
comment on function penstock.drop_retired() is 'Drops retired segments that no transaction reads any more. Returns how many.';

create or replace function penstock.compact_stream(p_stream text, p_bytes bigint default 268435456)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    moment constant timestamptz := penstock.clock();
    -- A table of the schema, since the caller could have made one of its own of any other name.
    latest constant text := 'latest_' || nextval('penstock.segment_number');
    segment record;
    rewritten text;
    superseded bigint;
    bytes_left bigint := p_bytes;
    compacted integer := 0;
begin
    perform penstock.check_limit(p_bytes, 1099511627776, 'number of bytes');
    -- What compaction may drop. An event of a key that is not the key's latest is superseded. A tombstone that is the latest
    -- of its key is dropped when it is old enough and nothing superseded of its key remains before it: without it, a reader
    -- from the beginning would take what remains for the key's value. Superseded events remain in segments that are not
    -- worth rewriting, and at the end of each partition of a segment, where a reader finds the way to the next segment.
    if not penstock.try_to_maintain(stream.id) then
        return 0;
    end if;
    perform penstock.note_latest(stream.id, latest);
    for segment in
        select
            id, table_name, compacted_at, dirty_since,
            coalesce(compacted_at <= max(closed_at) over (), true) or compacted_at < moment - interval '1 day' as is_due
        from penstock.segments
        where segments.stream = stream.id and closed_at is not null
        order by id
    loop
        if not segment.is_due or bytes_left <= 0 then
            perform penstock.note_superseded(segment.table_name, latest, false);
            continue;
        end if;
        perform penstock.note_superseded(segment.table_name, latest, true);
        superseded := penstock.count_superseded(segment.table_name, latest, moment - stream.tombstone_age);
        if superseded = 0
            or segment.compacted_at is not null
                and superseded * 10 < penstock.count_events(segment.table_name)
                and coalesce(segment.dirty_since > moment - interval '1 day', true)
        then
            perform penstock.note_superseded(segment.table_name, latest, false);
            update penstock.segments
            set compacted_at = moment,
                dirty_since = case when superseded > 0 then coalesce(segment.dirty_since, moment) end
            where id = segment.id;
            continue;
        end if;
        rewritten := format('events_%s_%s', segment.id, nextval('penstock.segment_number'));
        execute format('create table penstock.%I (like penstock.event_segment including all)', rewritten);
        perform penstock.copy_compacted(segment.table_name, rewritten, latest, moment - stream.tombstone_age);
        update penstock.segments
        set table_name = rewritten, compacted_at = moment, dirty_since = null
        where id = segment.id;
        insert into penstock.retired_segments values (segment.table_name, moment);
        bytes_left := bytes_left - pg_total_relation_size(format('penstock.%I', segment.table_name)::regclass);
        compacted := compacted + 1;
    end loop;
    execute format('drop table penstock.%I', latest);
    return compacted;
end
$$;
comment on function penstock.compact_stream(text, bigint) is
    'Rewrites segments that are no longer written so that of each key only the latest event stays; events without a key stay, offsets and times do not change, and appends and readers go on. A segment that was compacted before is rewritten when a tenth of its events is superseded, or some for a day. Stops after about p_bytes; returns how many segments it rewrote: call it again until that is 0. None while another call does it.';

create or replace function penstock.note_latest(p_stream integer, p_latest text)
returns void
language plpgsql
as $$
declare
    segment record;
begin
    execute format(
        $create$
            create unlogged table penstock.%I (
                key text primary key,
                partition integer,
                event_offset bigint,
                remains boolean not null default false
            )
        $create$,
        p_latest
    );
    -- Keys only ever move to partitions with a higher number, so of two events of a key the later has the higher pair.
    for segment in select table_name from penstock.segments where segments.stream = p_stream order by id loop
        execute format(
            $insert$
                insert into penstock.%1$I as latest (key, partition, event_offset)
                select distinct on (event.key)
                    event.key, chunk.partition, coalesce(event.event_offset, chunk.first_offset + event.place - 1)
                from penstock.%2$I as chunk
                cross join unnest(chunk.keys, chunk.offsets) with ordinality as event (key, event_offset, place)
                where event.key is not null
                order by event.key, chunk.partition desc, 3 desc
                on conflict (key) do update set partition = excluded.partition, event_offset = excluded.event_offset
                where (excluded.partition, excluded.event_offset) > (latest.partition, latest.event_offset)
            $insert$,
            p_latest, segment.table_name
        );
    end loop;
    execute format('analyze penstock.%I', p_latest);
end
$$;
comment on function penstock.note_latest(integer, text) is
    'Part of compact_stream: creates a table with the place of the latest event of each key of a stream.';

create or replace function penstock.note_superseded(p_table text, p_latest text, p_ends boolean)
returns void
language plpgsql
as $$
begin
    execute format(
        $update$
            update penstock.%2$I as latest
            set remains = true
            from penstock.%1$I as chunk
            cross join unnest(chunk.keys, chunk.offsets) with ordinality as event (key, event_offset, place)
            where latest.key = event.key
                and not latest.remains
                and (latest.partition, latest.event_offset)
                    <> (chunk.partition, coalesce(event.event_offset, chunk.first_offset + event.place - 1))
                and (
                    not $1
                    or event.place = chunk.events
                        and chunk.first_offset = (
                            select max(last.first_offset) from penstock.%1$I as last where last.partition = chunk.partition
                        )
                )
        $update$,
        p_table, p_latest
    )
    using p_ends;
end
$$;
comment on function penstock.note_superseded(text, text, boolean) is
    'Part of compact_stream: notes the keys of which superseded events remain in a segment; p_ends: those at the ends of its partitions alone, which remain in a rewritten segment too.';

create or replace function penstock.count_events(p_table text)
returns bigint
language plpgsql
stable
as $$
declare
    counted bigint;
begin
    execute format('select sum(events) from penstock.%I', p_table) into counted;
    return counted;
end
$$;
comment on function penstock.count_events(text) is 'Part of compact_stream: the events in the table of a segment.';

create or replace function penstock.count_superseded(p_table text, p_latest text, p_older_than timestamptz)
returns bigint
language plpgsql
stable
as $$
declare
    counted bigint;
begin
    execute format(
        $select$
            select count(*)
            from penstock.%1$I as chunk
            cross join unnest(chunk.keys, chunk.offsets, chunk.data, chunk.bytes) with ordinality
                as event (key, event_offset, data, bytes, place)
            join penstock.%2$I as latest on latest.key = event.key
            where penstock.may_go(
                    (latest.partition, latest.event_offset)
                        = (chunk.partition, coalesce(event.event_offset, chunk.first_offset + event.place - 1)),
                    num_nonnulls(event.data, event.bytes) = 0 and chunk.appended_at <= $1 and not latest.remains
                )
                and not (
                    event.place = chunk.events
                    and chunk.first_offset = (
                        select max(last.first_offset) from penstock.%1$I as last where last.partition = chunk.partition
                    )
                )
        $select$,
        p_table, p_latest
    )
    into counted
    using p_older_than;
    return counted;
end
$$;
comment on function penstock.count_superseded(text, text, timestamptz) is
    'Part of compact_stream: how many events of a segment compaction would drop.';

create or replace function penstock.may_go(p_is_latest boolean, p_is_done boolean)
returns boolean
language sql
immutable
as $$ select not coalesce(p_is_latest, true) or coalesce(p_is_latest and p_is_done, false) $$;
comment on function penstock.may_go(boolean, boolean) is
    'Part of compact_stream: whether compaction drops an event: it is superseded, or it is the latest of its key and a tombstone that is done with. Null for events without a key, which stay.';

create or replace function penstock.copy_compacted(p_table text, p_to text, p_latest text, p_older_than timestamptz)
returns void
language plpgsql
as $$
begin
    -- Chunk by chunk, since the events of a chunk share the time of their append.
    execute format(
        $insert$
            insert into penstock.%2$I (partition, first_offset, events, appended_at, keys, times, headers, data, bytes, offsets)
            select
                chunk.partition, kept.first_offset, kept.events, chunk.appended_at,
                kept.keys, kept.times, kept.headers, kept.data, kept.bytes, kept.offsets
            from penstock.%1$I as chunk
            cross join lateral (
                select
                    min(walked.at) as first_offset,
                    count(*) as events,
                    case when count(walked.key) > 0 then array_agg(walked.key order by walked.place) end as keys,
                    case when count(walked.time) > 0 then array_agg(walked.time order by walked.place) end as times,
                    case when count(walked.header) > 0 then array_agg(walked.header order by walked.place) end as headers,
                    case when chunk.data is not null then array_agg(walked.data order by walked.place) end as data,
                    case when chunk.bytes is not null then array_agg(walked.bytes order by walked.place) end as bytes,
                    case
                        when max(walked.at) - min(walked.at) + 1 > count(*) then array_agg(walked.at order by walked.place)
                    end as offsets
                from (
                    select event.*, coalesce(event.event_offset, chunk.first_offset + event.place - 1) as at
                    from unnest(
                        chunk.keys, chunk.times, chunk.headers, chunk.data, chunk.bytes, chunk.offsets,
                        array_fill(null::integer, array[chunk.events])
                    ) with ordinality as event (key, time, header, data, bytes, event_offset, filler, place)
                ) as walked
                left join penstock.%3$I as latest on latest.key = walked.key
                where latest.key is null
                    or not penstock.may_go(
                        (latest.partition, latest.event_offset) = (chunk.partition, walked.at),
                        num_nonnulls(walked.data, walked.bytes) = 0 and chunk.appended_at <= $1 and not latest.remains
                    )
                    -- The last of each partition stays, so that a reader that reads on finds the way to the next segment.
                    or walked.place = chunk.events
                        and chunk.first_offset = (
                            select max(last.first_offset) from penstock.%1$I as last where last.partition = chunk.partition
                        )
            ) as kept
            where kept.events > 0
        $insert$,
        p_table, p_to, p_latest
    )
    using p_older_than;
end
$$;
comment on function penstock.copy_compacted(text, text, text, timestamptz) is
    'Part of compact_stream: copies what compaction keeps of the table of a segment to a new one.';

create or replace function penstock.streams_to_maintain()
returns setof text
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.forget_listeners();
    delete from penstock.stream_producers where seen_at < penstock.clock() - interval '30 days';
    return query select name from penstock.streams order by id;
end
$$;
comment on function penstock.streams_to_maintain() is
    'Forgets readers and producers that were not seen for long. Returns the streams, each to be given to maintain_stream, and to compact_stream when maintain_stream asks for it; drop_retired comes last.';

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

create or replace function penstock.maintain_stream(p_stream text, out rolled boolean, out retired integer, out compact boolean)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    active record;
    moment constant timestamptz := penstock.clock();
begin
    rolled := false;
    retired := 0;
    compact := false;
    -- One at a time is enough, and the others have better things to do than to wait.
    if not penstock.try_to_maintain(stream.id) then
        return;
    end if;
    retired := penstock.retire_segments(p_stream);
    compact := stream.compact and exists (
        select
        from penstock.segments
        where segments.stream = stream.id
            and closed_at is not null
            and (
                compacted_at is null
                -- Tombstones grow old, and what was left in a segment that was not worth rewriting is dropped after a day.
                or compacted_at < moment - interval '1 day'
            )
    );
    select * into active from penstock.stream_segments(p_stream) where closed_at is null order by segment desc limit 1;
    rolled := exists (
        select from penstock.segments where segments.stream = stream.id and closed_at is null and id < active.segment
    ) or coalesce(
        active.events > 0 and (
            active.size >= least(stream.segment_bytes, stream.keep_bytes / 10)
            or active.events >= least(stream.segment_events, stream.keep_events / 10)
            or active.opened_at <= moment - coalesce(stream.segment_age, least(stream.keep_age / 10, interval '1 day'))
        ),
        false
    );
    if not rolled then
        return;
    end if;
    rolled := penstock.try_to_roll(p_stream);
    compact := compact or (rolled and stream.compact);
end
$$;
comment on function penstock.maintain_stream(text) is
    'Applies the retention of a stream, and begins a new segment when the active one is old or large, in those partitions that have no append in a long transaction: call it again while it says rolled. Returns what was done, and whether there is something to compact. Does nothing while another does it.';

create or replace function penstock.try_to_maintain(p_stream integer)
returns boolean
language sql
as $$
    select pg_try_advisory_xact_lock(hashtext('penstock.maintain_stream'), p_stream)
$$;
comment on function penstock.try_to_maintain(integer) is 'Until the transaction ends no other transaction maintains or compacts this stream; false: another one does.';

create or replace function penstock.lock_partitions(p_stream integer)
returns bigint
language sql
set lock_timeout = '3s'
as $$
    select max(locked.segment)
    from (
        select segment
        from penstock.stream_partitions
        where stream_partitions.stream = p_stream
        order by partition
        for no key update
    ) as locked
$$;
comment on function penstock.lock_partitions(integer) is
    'Part of grow_stream: appends that are under way finish first, and new ones wait. 55P03 when another transaction holds it up for 3 seconds. Returns the active segment.';

create or replace function penstock.grow_stream(p_stream text, p_partitions integer)
returns penstock.streams
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream penstock.streams;
    consuming penstock.stream_groups;
    active bigint;
    grown penstock.streams;
    member text;
begin
    stream := penstock.lock_stream(p_stream);
    if p_partitions is null or p_partitions < stream.partitions or p_partitions > 1024 then
        raise exception 'stream % cannot have % partitions', p_stream, coalesce(p_partitions::text, 'null')
            using errcode = 'PS400', hint = format('It has %s, which can only grow, up to 1,024.', stream.partitions);
    end if;
    if p_partitions = stream.partitions then
        return stream;
    end if;
    active := penstock.lock_partitions(stream.id);
    insert into penstock.stream_growths (stream, width, ends, grown_at)
    select stream.id, p_partitions, array_agg(bounds.next_offset order by bounds.partition), penstock.clock()
    from penstock.stream_bounds(p_stream) as bounds;
    update penstock.stream_partitions set width = p_partitions where stream_partitions.stream = stream.id;
    insert into penstock.stream_partitions (stream, partition, width, segment)
    select stream.id, number, p_partitions, active from generate_series(stream.partitions, p_partitions - 1) as number;
    insert into penstock.segment_starts (stream, partition, segment, first_offset)
    select stream.id, number, active, 0 from generate_series(stream.partitions, p_partitions - 1) as number;
    update penstock.streams
    set partitions = p_partitions,
        routes = penstock.routes_of(p_partitions),
        updated_at = penstock.clock()
    where id = stream.id
    returning * into grown;
    for consuming in select * from penstock.stream_groups where stream_groups.stream = stream.id order by name loop
        perform penstock.lock_group(consuming.group_name);
        insert into penstock.group_offsets (stream, group_id, partition, next_offset)
        select stream.id, consuming.name, number, 0 from generate_series(stream.partitions, p_partitions - 1) as number;
        insert into penstock.slots (group_name, slot, changed_at)
        select consuming.group_name, number, penstock.clock() from generate_series(stream.partitions, p_partitions - 1) as number;
        update penstock.groups
        set slots = p_partitions,
            generation = generation + 1
        where name = consuming.group_name;
        for member in select id from penstock.members where group_name = consuming.group_name order by age limit 2 loop
            perform penstock.tell_member(consuming.group_name, member);
        end loop;
    end loop;
    return grown;
end
$$;
comment on function penstock.grow_stream(text, integer) is
    'Gives a live stream more partitions. The order of each key is kept: a group begins with a new partition when it has finished what the old ones held at this moment.';
