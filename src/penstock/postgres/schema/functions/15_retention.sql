-- What becomes of streams with time: new segments, retention, compaction, more partitions. Any worker does the first three
-- for all, again and again; everything here may run in many processes at once.
--
-- Each step for each stream is a transaction of its own: appends wait only while a new segment is begun, never while old ones
-- are compacted, and what cannot be done for one stream is no matter to the others.

create or replace function penstock.roll_segment(p_stream text)
returns bigint
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    next_segment bigint;
begin
    -- One at a time, so that the segment with the higher number is the later one.
    perform from penstock.streams where id = stream.id for no key update;
    next_segment := penstock.open_segment(stream.id);
    -- From here on appends wait, for as long as this takes to commit.
    perform from penstock.stream_partitions where stream_partitions.stream = stream.id order by partition for no key update;
    insert into penstock.segment_starts (stream, partition, segment, first_offset)
    select stream.id, bounds.partition, next_segment, bounds.next_offset
    from penstock.stream_bounds(p_stream) as bounds;
    update penstock.stream_partitions set segment = next_segment where stream_partitions.stream = stream.id;
    update penstock.segments
    set closed_at = penstock.clock()
    where segments.stream = stream.id and id < next_segment and closed_at is null;
    return next_segment;
end
$$;
comment on function penstock.roll_segment(text) is 'Begins a new segment of a stream. Returns its number.';

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
-- A drop waits for whoever still reads the table. Nobody new comes, so it can as well be tried again later.
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
comment on function penstock.drop_retired() is 'Drops retired segments that nobody reads any more. Returns how many.';

create or replace function penstock.compact_stream(p_stream text)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    moment constant timestamptz := penstock.clock();
    segment record;
    -- A table of the schema, since the caller could have made one of its own of any name.
    latest constant text := 'latest_' || nextval('penstock.segment_number');
    rewritten text;
    compacted integer := 0;
begin
    if not penstock.try_to_tend(stream.id) then
        return 0;
    end if;
    execute format('create unlogged table penstock.%I (key text primary key, partition integer, event_offset bigint)', latest);
    -- Keys only ever move to partitions with a higher number, so of two events of a key the later has the higher pair.
    for segment in select id, table_name from penstock.segments where segments.stream = stream.id order by id loop
        execute format(
            $insert$
                insert into penstock.%I as latest (key, partition, event_offset)
                select distinct on (keys.key)
                    keys.key, chunk.partition, coalesce(chunk.offsets[keys.place], chunk.first_offset + keys.place - 1)
                from penstock.%I as chunk
                cross join unnest(chunk.keys) with ordinality as keys (key, place)
                where keys.key is not null
                order by keys.key, chunk.partition desc, 3 desc
                on conflict (key) do update set partition = excluded.partition, event_offset = excluded.event_offset
                where (excluded.partition, excluded.event_offset) > (latest.partition, latest.event_offset)
            $insert$,
            latest, segment.table_name
        );
    end loop;
    execute format('analyze penstock.%I', latest);
    for segment in
        select id, table_name
        from penstock.segments
        where segments.stream = stream.id and closed_at is not null
        order by id
    loop
        rewritten := format('events_%s_%s', segment.id, nextval('penstock.segment_number'));
        execute format('create table penstock.%I (like penstock.event_segment including all)', rewritten);
        execute format(
            $insert$
                insert into penstock.%1$I (
                    partition, first_offset, events, appended_at, keys, times, headers, data, bytes, offsets
                )
                select
                    kept.partition, min(kept.event_offset), count(*), max(kept.appended_at),
                    array_agg(kept.key order by kept.event_offset),
                    array_agg(kept.time order by kept.event_offset),
                    array_agg(kept.header order by kept.event_offset),
                    case when $1 = 'json' then array_agg(kept.data order by kept.event_offset) end,
                    case when $1 = 'bytes' then array_agg(kept.bytes order by kept.event_offset) end,
                    array_agg(kept.event_offset order by kept.event_offset)
                from (
                    select
                        every.*,
                        (row_number() over walked - 1) / 1000 as bundle,
                        sum(coalesce(pg_column_size(every.data), pg_column_size(every.bytes))) over walked / 8388608 as bulk
                    from (
                        select
                            chunk.partition,
                            coalesce(chunk.offsets[place], chunk.first_offset + place - 1) as event_offset,
                            chunk.appended_at,
                            chunk.keys[place] as key,
                            chunk.times[place] as time,
                            chunk.headers[place] as header,
                            chunk.data[place] as data,
                            chunk.bytes[place] as bytes,
                            chunk.first_offset = max(chunk.first_offset) over (partition by chunk.partition)
                                and place = chunk.events as is_last
                        from penstock.%2$I as chunk
                        cross join generate_series(1, chunk.events) as place
                    ) as every
                    left join penstock.%3$I as latest
                        on latest.key = every.key
                        and latest.partition = every.partition
                        and latest.event_offset = every.event_offset
                    -- The last of each partition stays, so that whoever reads on finds the way to the next segment.
                    where every.is_last
                        or every.key is null
                        or (
                            latest.key is not null
                            and (num_nonnulls(every.data, every.bytes) > 0 or every.appended_at > $2)
                        )
                    window walked as (partition by every.partition order by every.event_offset)
                ) as kept
                group by kept.partition, kept.bundle, kept.bulk
            $insert$,
            rewritten, segment.table_name, latest
        )
        using stream.format, moment - stream.tombstone_age;
        update penstock.segments set table_name = rewritten, compacted_at = moment where id = segment.id;
        insert into penstock.retired_segments values (segment.table_name, moment);
        compacted := compacted + 1;
    end loop;
    execute format('drop table penstock.%I', latest);
    return compacted;
end
$$;
comment on function penstock.compact_stream(text) is
    'Rewrites the segments that are no longer written so that of each key only the latest event stays; events without a key stay. Offsets do not change, and nobody waits for it. Returns how many segments; none while another does it.';

create or replace function penstock.sweep_streams()
returns setof text
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    delete from penstock.idle_readers where since < clock_timestamp() - interval '10 minutes';
    delete from penstock.stream_producers where seen_at < penstock.clock() - interval '30 days';
    return query select name from penstock.streams order by id;
end
$$;
comment on function penstock.sweep_streams() is
    'Forgets readers and producers that were not seen for long. Returns the streams, each to be given to tend_stream, and to compact_stream when that says so; drop_retired comes last.';

create or replace function penstock.try_to_roll(p_stream text)
returns boolean
language plpgsql
set lock_timeout = '2s'
as $$
begin
    perform penstock.roll_segment(p_stream);
    return true;
exception
    when lock_not_available then
        -- Somebody appends in a long transaction; the next one tries again.
        return false;
end
$$;
comment on function penstock.try_to_roll(text) is 'Part of tend_stream: roll_segment, unless somebody holds it up for 2 seconds.';

create or replace function penstock.tend_stream(p_stream text, out rolled boolean, out retired integer, out compact boolean)
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
    if not penstock.try_to_tend(stream.id) then
        return;
    end if;
    retired := penstock.retire_segments(p_stream);
    compact := stream.compact and exists (
        select from penstock.segments where segments.stream = stream.id and closed_at is not null and compacted_at is null
    );
    select * into active from penstock.stream_segments(p_stream) where closed_at is null order by segment desc limit 1;
    rolled := coalesce(
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
comment on function penstock.tend_stream(text) is
    'Applies the retention of a stream, and begins a new segment when the active one is old or large. Returns what was done, and whether there is something to compact. Does nothing while another does it.';

create or replace function penstock.try_to_tend(p_stream integer)
returns boolean
language sql
as $$
    select pg_try_advisory_xact_lock(hashtext('penstock.tend_stream'), p_stream)
$$;
comment on function penstock.try_to_tend(integer) is 'Until the transaction ends nobody else tends or compacts this stream; false: somebody does.';

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
    'Part of grow_stream: appends that are under way finish first, and new ones wait. 55P03 when somebody holds it up for 3 seconds. Returns the active segment.';

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
