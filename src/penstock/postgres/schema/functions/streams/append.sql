-- Append: events go behind the last ones of their partitions, under the locks of the partitions' rows. All ways end in append_chunks.

create or replace function penstock.start_of(p_stream integer, p_partition integer, p_segment bigint)
returns bigint
language sql
stable
as $$
    select first_offset from penstock.segment_starts where stream = p_stream and partition = p_partition and segment = p_segment
$$;
comment on function penstock.start_of(integer, integer, bigint) is 'Where a segment begins in a partition.';

-- Long for the short time after a segment has been begun: then the partitions of one append are written to different tables.
create or replace function penstock.append_chunks(
    p_stream penstock.streams,
    p_width integer,
    p_partitions integer[],
    p_counts integer[],
    p_data json[],
    p_bytes bytea[],
    p_keys text[],
    p_headers json[],
    p_times timestamptz[]
)
returns table (partition integer, first_offset bigint, events integer)
language plpgsql
as $$
#variable_conflict use_column
declare
    found_width integer;
    active bigint;
    oldest bigint;
    elsewhere record;
    firsts integer[];
    lasts integer[];
    befores bigint[];
    -- It is planned with each call, since segments come and go, so it is as simple as possible.
    statement constant text := $insert$
        insert into penstock.%1$I (partition, first_offset, events, appended_at, keys, times, headers, data, bytes)
        select
            chunk.partition,
            chunk.before + coalesce(
                (
                    select tail.first_offset + tail.events
                    from penstock.%1$I as tail
                    where tail.partition = chunk.partition
                    order by tail.first_offset desc
                    limit 1
                ),
                penstock.start_of($10, chunk.partition, $11)
            ),
            chunk.last - chunk.first + 1,
            $5,
            ($6)[chunk.first : chunk.last],
            ($7)[chunk.first : chunk.last],
            ($8)[chunk.first : chunk.last],
            ($9)[chunk.first : chunk.last],
            ($12)[chunk.first : chunk.last]
        from unnest($1, $2, $3, $4) as chunk (partition, first, last, before)
        returning partition, first_offset, events
    $insert$;
begin
    select min(locked.width), max(locked.segment), min(locked.segment)
    into found_width, active, oldest
    from (
        select width, segment
        from penstock.stream_partitions
        where stream = p_stream.id and stream_partitions.partition = any (p_partitions)
        order by stream_partitions.partition
        for no key update
    ) as locked;
    if found_width is distinct from p_width then
        -- Taken before the stream was dropped or grown. Then the client that routed the keys has to do it again.
        perform penstock.require_stream(p_stream.name);
        raise exception 'stream % does not have % partitions', p_stream.name, p_width
            using errcode = 'PS412', hint = format('It has %s.', (select partitions from penstock.streams where id = p_stream.id));
    end if;
    select
        array_agg(chunk.last - chunk.events + 1 order by chunk.place),
        array_agg(chunk.last order by chunk.place),
        array_agg(chunk.before order by chunk.place)
    into firsts, lasts, befores
    from (
        select
            given.place,
            given.events,
            (sum(given.events) over (order by given.place))::integer as last,
            sum(given.events) over (partition by given.partition order by given.place) - given.events as before
        from unnest(p_partitions, p_counts) with ordinality as given (partition, events, place)
    ) as chunk;
    if oldest < active then
        -- A segment has just been begun, and some of the partitions are not in it yet.
        for elsewhere in
            select place.segment, array_agg(place.partition) as partitions
            from penstock.stream_partitions as place
            where place.stream = p_stream.id and place.partition = any (p_partitions) and place.segment < active
            group by place.segment
        loop
            return query execute format(statement, 'events_' || elsewhere.segment)
            using
                array(select given.partition from unnest(p_partitions) with ordinality as given (partition, place)
                      where given.partition = any (elsewhere.partitions) order by given.place),
                array(select firsts[given.place] from unnest(p_partitions) with ordinality as given (partition, place)
                      where given.partition = any (elsewhere.partitions) order by given.place),
                array(select lasts[given.place] from unnest(p_partitions) with ordinality as given (partition, place)
                      where given.partition = any (elsewhere.partitions) order by given.place),
                array(select befores[given.place] from unnest(p_partitions) with ordinality as given (partition, place)
                      where given.partition = any (elsewhere.partitions) order by given.place),
                penstock.clock(), p_keys, p_times, p_headers, p_data, p_stream.id, elsewhere.segment, p_bytes;
        end loop;
        select
            array_agg(given.partition order by given.place),
            array_agg(firsts[given.place] order by given.place),
            array_agg(lasts[given.place] order by given.place),
            array_agg(befores[given.place] order by given.place)
        into p_partitions, firsts, lasts, befores
        from unnest(p_partitions) with ordinality as given (partition, place)
        join penstock.stream_partitions as place
            on place.stream = p_stream.id and place.partition = given.partition and place.segment = active;
    end if;
    return query execute format(statement, 'events_' || active)
    using p_partitions, firsts, lasts, befores, penstock.clock(), p_keys, p_times, p_headers, p_data, p_stream.id, active, p_bytes;
    -- Under load there is no listener.
    if exists (select from penstock.listeners where kind = 'events' and subject = p_stream.id::text) then
        perform penstock.wake(penstock.listening('events', p_stream.id::text), 'events ' || p_stream.id);
    end if;
end
$$;
comment on function penstock.append_chunks(penstock.streams, integer, integer[], integer[], json[], bytea[], text[], json[], timestamptz[]) is
    'Part of append: locks the partitions and writes events that are sorted by partition, p_counts[i] of them into p_partitions[i]. PS412 when the keys were routed for another number of partitions.';

create or replace function penstock.append_routed(
    p_stream text,
    p_width integer,
    p_partitions integer[],
    p_counts integer[],
    p_data json[] default null,
    p_bytes bytea[] default null,
    p_keys text[] default null,
    p_headers json[] default null,
    p_times timestamptz[] default null,
    p_producer text default null,
    p_sequence bigint default null,
    p_user text default null
)
returns table (partition integer, first_offset bigint, events integer)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    total constant integer := penstock.check_events(stream, p_data, p_bytes, p_keys, p_headers, p_times);
    told record;
    given_digest numeric;
begin
    if greatest(cardinality(p_partitions), cardinality(p_counts)) > 100000 then
        perform penstock.check_size(greatest(cardinality(p_partitions), cardinality(p_counts)), 100000, 'chunks');
    end if;
    if (
        select sum(given.events) = total
            and every(coalesce(given.events between 1 and 1000 and given.partition between 0 and p_width - 1, false))
        from unnest(p_partitions, p_counts) as given (partition, events)
    ) is not true
    then
        raise exception 'partitions and counts do not fit the events'
            using errcode = 'PS400', hint = 'The events are sorted by partition; counts, 1 to 1,000 each, say how many go to each, and add up to their number.';
    end if;
    if p_producer is not null then
        given_digest := penstock.digest_of(p_data, p_bytes, p_keys, p_headers, p_times);
        select * into told from penstock.last_batch(stream.id, p_producer, p_user, p_sequence, given_digest);
        if told.is_repeated then
            return query
            select repeated.* from unnest(told.partitions, told.first_offsets, told.counts) as repeated
            where told.last = p_sequence;
            return;
        end if;
        return query
        with appended as (
            select *
            from penstock.append_chunks(stream, p_width, p_partitions, p_counts, p_data, p_bytes, p_keys, p_headers, p_times)
        ),
        noted as (
            update penstock.stream_producers
            set sequence = p_sequence,
                seen_at = penstock.clock(),
                digest = given_digest,
                (partitions, first_offsets, counts) = (
                    select array_agg(appended.partition), array_agg(appended.first_offset), array_agg(appended.events) from appended
                )
            where stream_producers.stream = stream.id
                and producer = p_producer
                and role = session_user::text
                and user_name = coalesce(p_user, '')
        )
        select * from appended;
    else
        return query
        select *
        from penstock.append_chunks(stream, p_width, p_partitions, p_counts, p_data, p_bytes, p_keys, p_headers, p_times);
    end if;
end
$$;
comment on function penstock.append_routed(text, integer, integer[], integer[], json[], bytea[], text[], json[], timestamptz[], text, bigint, text) is
    'The fast append, for clients that route keys themselves (partition_of, the same in every language): events sorted by partition, p_counts[i] of them for p_partitions[i], at most 1,000 each; p_width is the number of partitions that they were routed for (PS412 when it is another one by now: route again). With a producer and its batch number a repeated batch is not appended again, and gets the answer of the first time. The name of a producer belongs to the caller''s role, and within it to p_user, the user for whom it appends. Returns where each chunk begins, in the given order within each partition. The partitions stay locked until the caller commits.';

create or replace function penstock.append_many(
    p_stream text,
    p_data json[] default null,
    p_keys text[] default null,
    p_headers json[] default null,
    p_times timestamptz[] default null,
    p_bytes bytea[] default null,
    p_producer text default null,
    p_sequence bigint default null
)
returns table (partition integer, first_offset bigint, events integer)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    stream penstock.streams;
    -- In a variable of its own it is unpacked once, not for each event.
    routes smallint[];
    turn integer;
    sorted record;
    traceparent constant text := penstock.current_traceparent();
begin
    if traceparent is not null then
        p_headers := penstock.traced_headers(p_headers, traceparent, coalesce(greatest(cardinality(p_data), cardinality(p_bytes)), 0));
    end if;
    for attempt in 1 .. 10 loop
        stream := penstock.require_stream(p_stream);
        if penstock.check_events(stream, p_data, p_bytes, p_keys, p_headers, p_times) = 0 then
            return;
        end if;
        -- Events without a key go together, to one partition after another from call to call.
        turn := nextval('penstock.stream_turn') % stream.partitions;
        routes := stream.routes;
        with routed as (
            select
                given.*,
                coalesce(routes[penstock.bucket_of(given.key) + 1], turn) as partition
            from unnest(
                p_data, p_bytes, p_keys, p_headers, p_times
            ) with ordinality as given (data, bytes, key, header, time, place)
        ),
        numbered as (
            select routed.*, (row_number() over (partition by routed.partition order by routed.place) - 1) / 1000 as chunk from routed
        ),
        counted as (
            select numbered.partition, numbered.chunk, count(*)::integer as events from numbered group by numbered.partition, numbered.chunk
        )
        select
            (select array_agg(counted.partition order by counted.partition, counted.chunk) from counted) as partitions,
            (select array_agg(counted.events order by counted.partition, counted.chunk) from counted) as counts,
            array_agg(numbered.data order by numbered.partition, numbered.place) as data,
            array_agg(numbered.bytes order by numbered.partition, numbered.place) as bytes,
            array_agg(numbered.key order by numbered.partition, numbered.place) as keys,
            array_agg(numbered.header order by numbered.partition, numbered.place) as headers,
            array_agg(numbered.time order by numbered.partition, numbered.place) as times
        into sorted
        from numbered;
        begin
            return query
            select * from penstock.append_routed(
                p_stream, stream.partitions, sorted.partitions, sorted.counts,
                case when p_data is not null then sorted.data end,
                case when p_bytes is not null then sorted.bytes end,
                case when p_keys is not null then sorted.keys end,
                case when p_headers is not null then sorted.headers end,
                case when p_times is not null then sorted.times end,
                p_producer, p_sequence
            );
            return;
        exception
            when sqlstate 'PS412' then
                null;
        end;
    end loop;
    raise exception 'stream % changed again and again', p_stream
        using errcode = '40001', hint = 'Retry the transaction.';
end
$$;
comment on function penstock.append_many(text, json[], text[], json[], timestamptz[], bytea[], text, bigint) is
    'Appends up to 100,000 events, all or none, in the caller''s transaction: payloads (json or bytes, as the stream has it), and for each a key, headers and the time when it happened, all optional. Events of one key keep their order. With a producer, a name of the caller''s role, and its batch number a repeated batch is not appended again. The trace context of the transaction (set local penstock.traceparent) becomes the header traceparent of events without one. Returns where each chunk begins. The partitions stay locked until the caller commits.';

create or replace function penstock.append(
    p_stream text,
    p_data json,
    p_key text default null,
    p_headers json default null,
    p_time timestamptz default null,
    out partition integer,
    out event_offset bigint
)
language sql
security definer
set search_path = penstock, pg_temp
as $$
    select partition, first_offset
    from penstock.append_many(
        p_stream, array[p_data], array[p_key],
        case when p_headers is not null then array[p_headers] end,
        case when p_time is not null then array[p_time] end
    )
$$;
comment on function penstock.append(text, json, text, json, timestamptz) is
    'Appends one event in the caller''s transaction; returns where it is.';

create or replace function penstock.append_each(
    p_stream text,
    p_data json[] default null,
    p_keys text[] default null,
    p_headers json[] default null,
    p_times timestamptz[] default null,
    p_bytes bytea[] default null
)
returns table (partition integer, event_offset bigint)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    chunks record;
    routes smallint[];
begin
    select array_agg(appended.partition) as partitions, array_agg(appended.first_offset) as offsets, array_agg(appended.events) as events
    into chunks
    from penstock.append_many(p_stream, p_data, p_keys, p_headers, p_times, p_bytes) as appended;
    -- The partitions are locked now, so these are the routes by which the events went.
    routes := (penstock.require_stream(p_stream)).routes;
    return query
    with written as (
        select chunk.partition, min(chunk.first_offset) as first_offset, sum(chunk.events) as events
        from unnest(chunks.partitions, chunks.offsets, chunks.events) as chunk (partition, first_offset, events)
        group by chunk.partition
    ),
    given as (
        select one.place, routes[penstock.bucket_of(one.key) + 1]::integer as partition
        from unnest(
            coalesce(p_keys, array_fill(null::text, array[greatest(cardinality(p_data), cardinality(p_bytes))]))
        ) with ordinality as one (key, place)
    ),
    -- Those without a key went together to one partition: the one that got more than the events with keys.
    keyless as (
        select written.partition
        from written
        left join (select given.partition, count(*) as events from given group by given.partition) as keyed using (partition)
        where written.events > coalesce(keyed.events, 0)
    ),
    placed as (
        select given.place, coalesce(given.partition, keyless.partition) as partition
        from given
        left join keyless on true
    )
    select
        placed.partition,
        written.first_offset + row_number() over (partition by placed.partition order by placed.place) - 1
    from placed
    join written using (partition)
    order by placed.place;
end
$$;
comment on function penstock.append_each(text, json[], text[], json[], timestamptz[], bytea[]) is
    'append_many, with a row for each event in the order given: where it is.';
