-- Compaction: of the events of a key only the latest stays in segments that are no longer written.

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
