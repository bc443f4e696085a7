-- Scans: the text of a query that reads many events of streams (as scan in history/archive.sql), and what a reader has to know before.

create or replace function penstock.growths()
returns table (stream text, width integer, ends bigint[])
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select stream.name, growth.width, growth.ends
    from penstock.stream_growths as growth
    join penstock.streams as stream on stream.id = growth.stream
    order by stream.name, growth.width
$$;
comment on function penstock.growths() is 'Each time that a stream got more partitions: how many from then on, and where the old ones ended.';

create or replace function penstock.identity_of(p_stream penstock.streams)
returns text
language sql
stable
as $$
    -- A restored or another database may give the same number again, but not at the same time.
    select p_stream.id || '-' || floor(extract(epoch from p_stream.created_at) * 1000000)
        || coalesce((select '+' || max(ends.restore) from penstock.restored_ends as ends where ends.stream = p_stream.id), '')
$$;
comment on function penstock.identity_of(penstock.streams) is
    'What tells a stream from one of the same name that was made after it was dropped; after "+" the number of its last restore.';

create or replace function penstock.bounds_of_streams(p_streams text[])
returns table (
    stream text, format text, compression text, partition integer, first_offset bigint, next_offset bigint, identity text, growths jsonb,
    restored jsonb
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(cardinality(p_streams), 10000, 'streams');
    select
        wanted.name, stream.format, stream.compression, bounds.partition, bounds.first_offset, bounds.next_offset,
        penstock.identity_of(stream),
        case when bounds.partition = 0 then (
            select jsonb_agg(jsonb_build_object('width', growth.width, 'ends', growth.ends) order by growth.width)
            from penstock.stream_growths as growth
            where growth.stream = stream.id
        ) end,
        (
            select jsonb_object_agg(ends.restore, ends.next_offset)
            from penstock.restored_ends as ends
            where ends.stream = stream.id and ends.partition = bounds.partition
        )
    from unnest(p_streams) as wanted (name)
    cross join lateral penstock.stream_bounds(wanted.name) as bounds
    left join penstock.streams as stream on stream.name = wanted.name
    order by wanted.name, bounds.partition
$$;
comment on function penstock.bounds_of_streams(text[]) is
    'The bounds of all partitions of some streams, as one snapshot sees them: of a transaction that appended to several, all or nothing is before the ends. With them which stream the name stands for, at partition 0 each time that it got more partitions, and where the partition ended at each restore of the database. PS404 for a stream that is not there.';

create or replace function penstock.wait_for_events_of(p_streams text[], p_channel text)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_size(cardinality(p_streams), 10000, 'streams');
    perform penstock.listen_for_events(array(select stream.id::text from penstock.streams as stream where stream.name = any (p_streams)), p_channel);
end
$$;
comment on function penstock.wait_for_events_of(text[], text) is 'As wait_for_events, for several streams; those that are not there are left out.';

-- Long, since it makes the text of one query and checks all that goes into it, so that nothing of the caller's is unquoted.
create or replace function penstock.scan_events(
    p_stream text,
    p_identity text,
    p_partitions integer[],
    p_from bigint[],
    p_until bigint[],
    p_columns text[],
    p_filters jsonb default '[]',
    p_lenient boolean default false
)
returns text
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    meant constant boolean := coalesce(p_identity = penstock.identity_of(stream), true);
    kinds constant jsonb := '{"key": "text", "value": "text", "topic": "text", "partition": "integer", "offset": "bigint",
        "timestamp": "timestamp with time zone", "happened_at": "timestamp with time zone", "header_keys": "text[]", "header_values": "text[]"}';
    columns text[] := '{}';
    conditions text[] := '{}';
    parts text[];
    wanted text;
    filter jsonb;
    gone record;
begin
    perform penstock.check_size(
        greatest(cardinality(p_partitions), cardinality(p_from), cardinality(p_until)),
        10000, 'partitions'
    );
    perform penstock.check_size(cardinality(p_columns), 1600, 'columns');
    if cardinality(p_partitions) <> cardinality(p_from) or cardinality(p_partitions) <> cardinality(p_until) then
        raise exception 'there are not two offsets for each partition'
            using errcode = 'PS400', hint = 'Give as many elements in p_from and p_until as in p_partitions.';
    end if;
    if not meant and not p_lenient then
        raise exception 'stream % is not the one that was meant', p_stream
            using errcode = 'PS410', hint = 'It was dropped and created again.';
    end if;
    select given.*, start.earliest
    into gone
    from unnest(p_partitions, p_from) as given (partition, low)
    left join (
        select partition, min(first_offset) as earliest from penstock.segment_starts where segment_starts.stream = stream.id group by partition
    ) as start using (partition)
    where start.earliest is null or (given.low < start.earliest and not p_lenient)
    limit 1;
    if found then
        raise exception 'offset % of partition % of stream % is gone', gone.low, gone.partition, p_stream
            using errcode = 'PS410', hint = format('The first that is there is %s.', coalesce(gone.earliest::text, 'none'));
    end if;
    foreach wanted in array coalesce(p_columns, '{}') loop
        if not kinds ? wanted then
            raise exception 'no such column: %', left(wanted, 100)
                using errcode = 'PS400', hint = 'Columns are key, value, topic, partition, offset, timestamp, happened_at, header_keys and header_values.';
        end if;
        columns := columns || format('event.%I', wanted);
    end loop;
    for filter in select jsonb_array_elements(coalesce(p_filters, '[]')) loop
        wanted := penstock.scan_filter(filter ->> 'column', kinds ->> (filter ->> 'column'), filter);
        if wanted is null then
            raise exception 'cannot filter by %', left(filter::text, 200)
                using errcode = 'PS400', hint = 'A filter has a column, an op and a value.';
        end if;
        conditions := conditions || wanted;
    end loop;
    -- Of each segment the ranges that it may have. The chunk that holds the first offset begins at or before it.
    select array_agg(
        format(
            $segment$
            select stored.*, asked.low, asked.high
            from unnest(%2$L::integer[], %3$L::bigint[], %4$L::bigint[]) as asked (partition, low, high)
            cross join lateral (
                select chunk.*
                from penstock.%1$I as chunk
                where chunk.partition = asked.partition
                    and chunk.first_offset < asked.high
                    and chunk.first_offset >= coalesce(
                        (
                            select before.first_offset
                            from penstock.%1$I as before
                            where before.partition = asked.partition and before.first_offset <= asked.low
                            order by before.first_offset desc
                            limit 1
                        ),
                        0
                    )
                order by chunk.first_offset
            ) as stored
            $segment$,
            within.table_name, within.partitions, within.lows, within.highs
        )
        order by within.segment
    )
    into parts
    from (
        select
            start.segment,
            segment.table_name,
            array_agg(given.partition order by given.partition) as partitions,
            array_agg(given.low order by given.partition) as lows,
            array_agg(given.high order by given.partition) as highs
        from unnest(p_partitions, p_from, p_until) as given (partition, low, high)
        join (
            select
                starts.partition,
                starts.segment,
                starts.first_offset,
                lead(starts.first_offset) over (partition by starts.partition order by starts.segment) as next_start
            from penstock.segment_starts as starts
            where starts.stream = stream.id and starts.partition = any (p_partitions)
        ) as start on start.partition = given.partition
        join penstock.segments as segment on segment.id = start.segment
        where start.first_offset < given.high
            and coalesce(start.next_start > given.low, true)
            and meant
        group by start.segment, segment.table_name
    ) as within;
    return format(
        $scan$
        select %1$s
        from (
            select
                event.key,
                %2$s as value,
                %3$L::text as topic,
                chunk.partition,
                coalesce(event.own_offset, chunk.first_offset + event.place - 1) as "offset",
                chunk.appended_at as "timestamp",
                event.happened_at,
                case when event.headers is not null then array(select header.key from json_each_text(event.headers) as header) end as header_keys,
                case when event.headers is not null then array(select header.value from json_each_text(event.headers) as header) end as header_values,
                chunk.low,
                chunk.high
            from (select * from (%4$s) as stored order by partition, first_offset) as chunk
            cross join lateral rows from (
                generate_series(1, chunk.events), unnest(chunk.keys), unnest(chunk.times), unnest(chunk.headers), unnest(chunk.%5$I),
                unnest(chunk.offsets)
            ) as event (place, key, happened_at, headers, value, own_offset)
        ) as event
        where "offset" >= low and "offset" < high%6$s
        $scan$,
        case when cardinality(columns) = 0 then '1 as one' else array_to_string(columns, ', ') end,
        case stream.format when 'json' then 'event.value::text' else 'event.value' end,
        p_stream,
        coalesce(array_to_string(parts, ' union all '), 'select *, 0::bigint as low, 0::bigint as high from penstock.event_segment where false'),
        case stream.format when 'json' then 'data' else 'bytes' end,
        case when cardinality(conditions) > 0 then ' and ' || array_to_string(conditions, ' and ') else '' end
    );
end
$$;
comment on function penstock.scan_events(text, text, integer[], bigint[], bigint[], text[], jsonb, boolean) is
    'The text of a query over the events of some partitions, each from p_from to before p_until, in order within a partition, with columns and filters. PS410 when the first of them are gone, or when the stream is not the one of p_identity (null: whichever it is), unless p_lenient.';
