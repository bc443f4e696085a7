-- The staged append: rows of staged_events become chunks of streams.

create or replace function penstock.route_again(p_writer text, p_parts text[], p_stream penstock.streams)
returns text
language plpgsql
as $$
declare
    -- In a variable of its own it is unpacked once, not for each event.
    routes constant smallint[] := p_stream.routes;
    -- Beside the parts that it is made of.
    routed constant text := regexp_replace(p_parts[1], '[^.]*$', 'routed ') || p_stream.id;
begin
    with stale as (
        delete from penstock.staged_events as staged
        where staged.writer = p_writer
            and staged.role = session_user
            and staged.part = any (p_parts)
            and staged.stream = p_stream.name
            and staged.width <> p_stream.partitions
        returning staged.*
    ),
    single as (
        select
            event.*,
            stale.data is not null as is_json,
            coalesce(routes[penstock.bucket_of(event.key) + 1], stale.partition) as new_partition,
            row_number() over (order by array_position(p_parts, stale.part), stale.place, event.at) as nth
        from stale
        cross join lateral rows from (
            generate_series(1, stale.events), unnest(stale.keys), unnest(stale.times), unnest(stale.headers), unnest(stale.data),
            unnest(stale.bytes)
        ) as event (at, key, happened_at, headers, data, bytes)
    ),
    numbered as (
        select single.*, (row_number() over (partition by single.new_partition order by single.nth) - 1) / 1000 as chunk from single
    )
    insert into penstock.staged_events (writer, part, place, stream, width, partition, events, keys, times, headers, data, bytes)
    select
        p_writer, routed, row_number() over (order by numbered.new_partition, numbered.chunk), p_stream.name, p_stream.partitions,
        numbered.new_partition, count(*)::integer,
        case when count(numbered.key) > 0 then array_agg(numbered.key order by numbered.nth) end,
        case when count(numbered.happened_at) > 0 then array_agg(numbered.happened_at order by numbered.nth) end,
        case when count(numbered.headers) > 0 then array_agg(numbered.headers order by numbered.nth) end,
        case when bool_or(numbered.is_json) then array_agg(numbered.data order by numbered.nth) end,
        case when not bool_or(numbered.is_json) then array_agg(numbered.bytes order by numbered.nth) end
    from numbered
    group by numbered.new_partition, numbered.chunk;
    return routed;
end
$$;
comment on function penstock.route_again(text, text[], penstock.streams) is
    'Part of commit_staged_events: routes what was staged before the stream grew for as many partitions as it has now. Returns the part in which it is.';

create or replace function penstock.check_staged_events(p_writer text, p_parts text[], p_stream penstock.streams)
returns void
language plpgsql
stable
as $$
declare
    wrong integer;
    size bigint;
    odd_times timestamptz[];
begin
    select staged.partition into wrong
    from penstock.staged_events as staged
    where staged.writer = p_writer
        and staged.role = session_user
        and staged.part = any (p_parts)
        and staged.stream = p_stream.name
        and (
            staged.partition not between 0 and p_stream.partitions - 1
            or staged.events is distinct from cardinality(case p_stream.format when 'json' then staged.data else null end)
                and staged.events is distinct from cardinality(case p_stream.format when 'bytes' then staged.bytes else null end)
        )
    limit 1;
    if found then
        raise exception 'events for partition % do not fit stream %', wrong, p_stream.name
            using errcode = 'PS400',
                  hint = format('It has the partitions 0 to %s, and payloads in the format %s.', p_stream.partitions - 1, p_stream.format);
    end if;
    perform penstock.check_lists(
        array[array_dims(staged.data), array_dims(staged.bytes), array_dims(staged.keys), array_dims(staged.headers), array_dims(staged.times)]
    )
    from penstock.staged_events as staged
    where staged.writer = p_writer and staged.role = session_user and staged.part = any (p_parts) and staged.stream = p_stream.name;
    if p_stream.encrypted then
        -- Staged before the stream was encrypted, or by hand.
        perform penstock.refuse_plain_events(p_stream, staged.data::json[], staged.bytes)
        from penstock.staged_events as staged
        where staged.writer = p_writer and staged.role = session_user and staged.part = any (p_parts) and staged.stream = p_stream.name;
    end if;
    -- A role that stages may write these rows by hand. The sink refuses the same before it stages, and says which row it is.
    select largest.size, staged.times into size, odd_times
    from penstock.staged_events as staged
    cross join lateral (
        select greatest(
            (select max(octet_length(payload)) from unnest(staged.data) as payload),
            (select max(octet_length(payload)) from unnest(staged.bytes) as payload),
            (select max(octet_length(key)) from unnest(staged.keys) as key),
            (select max(octet_length(header)) from unnest(staged.headers) as header)
        ) as size
    ) as largest
    where staged.writer = p_writer
        and staged.role = session_user
        and staged.part = any (p_parts)
        and staged.stream = p_stream.name
        and (
            largest.size > p_stream.max_event_bytes
            or p_stream.compression = 'zstd' and not p_stream.name like '%.dead' and exists (
                select from unnest(staged.bytes) as payload
                where penstock.unpacked_size(payload) not between 0 and p_stream.max_event_bytes
                    and not (p_stream.encrypted_at is not null and penstock.is_sealed_bytes(payload))
            )
            or exists (select from unnest(staged.times) as happened_at where happened_at <> penstock.shown_time(happened_at))
        )
    limit 1;
    if found then
        perform penstock.check_times(odd_times);
        raise exception 'an event of stream % is larger than % bytes', p_stream.name, p_stream.max_event_bytes
            using errcode = 'PS413', hint = 'Keep large things elsewhere and append where they are, or change max_event_bytes. Of a stream that is compressed, each payload is a frame of zstd.';
    end if;
end
$$;
comment on function penstock.check_staged_events(text, text[], penstock.streams) is
    'Part of commit_staged_events: raises PS400 for staged events that do not fit the partitions or the format of the stream or have a time that not every client can read, and PS413 for one that is too large.';

create or replace function penstock.append_staged(p_writer text, p_epoch bigint, p_parts text[], p_name text, p_id integer)
returns void
language plpgsql
as $$
#variable_conflict use_column
declare
    stream penstock.streams := penstock.require_stream(p_name);
    gathered record;
begin
    gathered := penstock.gather_partitions(stream);
    -- Read again: no transaction changes the number now.
    stream := penstock.require_stream(p_name);
    if stream.id <> p_id then
        raise exception 'stream % was dropped and created again while events for it were staged', p_name
            using errcode = 'PS409', hint = 'Keys and payloads were made for the stream that was there before: write the batch again.';
    end if;
    if exists (
        select from penstock.staged_events
        where writer = p_writer and role = session_user and part = any (p_parts) and staged_events.stream = p_name and width <> gathered.width
    ) then
        p_parts := p_parts || penstock.route_again(p_writer, p_parts, stream);
    end if;
    perform penstock.check_staged_events(p_writer, p_parts, stream);
    execute format(
        $insert$
            insert into penstock.%1$I (partition, first_offset, events, appended_at, keys, times, headers, data, bytes)
            select
                chunk.partition,
                bounds.next_offset
                    + sum(chunk.events) over (partition by chunk.partition order by given.turn, chunk.place) - chunk.events,
                chunk.events, $1, chunk.keys, chunk.times, chunk.headers::json[], chunk.data::json[], chunk.bytes
            from unnest($2) with ordinality as given (part, turn)
            join penstock.staged_events as chunk on chunk.writer = $3 and chunk.role = session_user and chunk.part = given.part and chunk.stream = $4
            left join penstock.stream_bounds($4) as bounds on bounds.partition = chunk.partition
        $insert$,
        'events_' || gathered.active
    )
    using penstock.clock(), p_parts, p_writer, p_name;
    perform penstock.wake(penstock.listening('events', stream.id::text), 'events ' || stream.id);
end
$$;
comment on function penstock.append_staged(text, bigint, text[], text, integer) is
    'Part of commit_staged_events: appends what these parts have staged for one stream, if it still is the one of this id (null: whichever it is).';

create or replace function penstock.commit_staged_events(
    p_writer text,
    p_epoch bigint,
    p_parts text[],
    p_rows bigint,
    p_target text,
    p_query text default null,
    p_offsets jsonb default null,
    p_named jsonb default null
)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    noted constant jsonb := penstock.note_targets(p_writer, p_target, p_epoch, p_rows, p_named, p_query, p_offsets);
    present jsonb;
    wanted record;
begin
    perform penstock.check_size(cardinality(p_parts), 1000000, 'parts');
    if noted <> '{}' and p_rows > 0 then
        select coalesce(jsonb_object_agg(by_stream.stream, by_stream.events), '{}')
        into present
        from (
            select stream, sum(events) as events
            from penstock.staged_events
            where writer = p_writer and role = session_user and part = any (p_parts)
            group by stream
        ) as by_stream;
        perform penstock.check_staged(p_writer, p_target, p_named, noted, present);
        -- In the order of names, and of partitions in each, so that two writers do not lock each other.
        for wanted in select key as name, (value ->> 'id')::integer as id from jsonb_each(noted) where present ? key order by key loop
            perform penstock.append_staged(p_writer, p_epoch, p_parts, wanted.name, wanted.id);
        end loop;
    end if;
    -- Of this epoch, and what attempts that did not count or crashed writers have left.
    delete from penstock.staged_events where writer = p_writer and role = session_user and (part = any (p_parts) or starts_with(part, penstock.parts_of(p_epoch, p_target)));
    return noted <> '{}';
end
$$;
comment on function penstock.commit_staged_events(text, bigint, text[], bigint, text, text, jsonb, jsonb) is
    'Appends what these parts have staged, p_rows events in all, unless the writer has committed this epoch or a later one to this target (see note_epoch). p_named has the streams, as {"orders": {"rows": 5, "id": 7}}, of which each is a target of its own when the target is streams; with the id of a stream, one that was created again since is refused (PS409). One transaction. False when it had been committed before.';
