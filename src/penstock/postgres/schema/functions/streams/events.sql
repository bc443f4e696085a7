-- What events may be: their number, sizes, times and compression; and events as JSON.

create or replace function penstock.unpacked_size(p_frame bytea)
returns bigint
language sql
immutable
parallel safe
as $$
    -- RFC 8878, 3.1.1: a magic number, a byte of flags, of which the first two are the width of the size; before the size a byte of
    -- the window unless the sixth flag is set, and an id of a dictionary, which does not exist here. A frame need not have its size.
    select case
        when p_frame is null then 0
        when length(p_frame) < 9 or substr(p_frame, 1, 4) <> decode('28b52ffd', 'hex') or get_byte(p_frame, 4) & 3 <> 0 then -1
        when get_byte(p_frame, 4) >> 5 = 0 then 0
        when get_byte(p_frame, 4) >> 5 = 1 then get_byte(p_frame, 5)
        when get_byte(p_frame, 4) >> 6 = 2 and length(p_frame) < 12 then -1
        when get_byte(p_frame, 4) >> 5 = 2 then get_byte(p_frame, 6) + 256 * get_byte(p_frame, 7) + 256
        when get_byte(p_frame, 4) >> 5 = 3 then get_byte(p_frame, 5) + 256 * get_byte(p_frame, 6) + 256
        when get_byte(p_frame, 4) >> 5 = 4 then
            get_byte(p_frame, 6) + 256 * get_byte(p_frame, 7) + 65536 * get_byte(p_frame, 8) + 16777216 * get_byte(p_frame, 9)::bigint
        when get_byte(p_frame, 4) >> 5 = 5 then
            get_byte(p_frame, 5) + 256 * get_byte(p_frame, 6) + 65536 * get_byte(p_frame, 7) + 16777216 * get_byte(p_frame, 8)::bigint
        else 9223372036854775807
    end
$$;
comment on function penstock.unpacked_size(bytea) is
    'What a frame of zstd says that it becomes, in bytes; 0 when it does not say, -1 when it is none. Sizes of 4 GiB and more are not told apart.';

create or replace function penstock.check_events(
    p_stream penstock.streams, p_data json[], p_bytes bytea[], p_keys text[], p_headers json[], p_times timestamptz[]
)
returns integer
language plpgsql
stable
as $$
declare
    total constant integer := cardinality(case p_stream.format when 'json' then p_data end);
    events constant integer := coalesce(total, cardinality(p_bytes));
    size constant bigint := coalesce(pg_column_size(p_data), pg_column_size(p_bytes));
begin
    if events is null or (case p_stream.format when 'json' then p_bytes is not null else p_data is not null end) then
        raise exception 'stream % has payloads in the format %', p_stream.name, p_stream.format
            using errcode = 'PS400', hint = 'Give data to a stream of json, bytes to a stream of bytes.';
    end if;
    if coalesce(cardinality(p_keys), events) <> events
        or coalesce(cardinality(p_headers), events) <> events
        or coalesce(cardinality(p_times), events) <> events
    then
        raise exception 'the arrays differ in length'
            using errcode = 'PS400', hint = 'Give one element for each event, or null for all.';
    end if;
    if events > 100000 or size > 268435456 then
        raise exception '% events of % bytes are too many at once', events, size
            using errcode = 'PS413', hint = 'Append at most 100,000 events and 256 MiB in one call.';
    end if;
    -- Elements are looked at only when one of them can be too large.
    if greatest(size, pg_column_size(p_keys), pg_column_size(p_headers)) > p_stream.max_event_bytes then
        if exists (
            select from unnest(p_keys, p_headers) as event (key, header)
            where greatest(pg_column_size(event.key), pg_column_size(event.header)) - 4 > p_stream.max_event_bytes
        )
            or exists (select from unnest(p_data) as event where pg_column_size(event) - 4 > p_stream.max_event_bytes)
            or exists (select from unnest(p_bytes) as event where pg_column_size(event) - 4 > p_stream.max_event_bytes)
        then
            raise exception 'an event of stream % is larger than % bytes', p_stream.name, p_stream.max_event_bytes
                using errcode = 'PS413', hint = 'Keep large things elsewhere and append where they are, or change max_event_bytes.';
        end if;
    end if;
    if p_stream.encrypted then
        perform penstock.refuse_plain_events(p_stream, p_data, p_bytes);
    end if;
    if p_times is not null and (penstock.shown_time('infinity') < any (p_times) or penstock.shown_time('-infinity') > any (p_times)) then
        perform penstock.check_times(p_times);
    end if;
    -- In conditions of their own: of what is null, as of a stream that does not compress, "and" looks at the rest too.
    if p_stream.compression = 'zstd' then
        -- Dead letters stay as they were appended.
        if not p_stream.name like '%.dead' and exists (
            select from unnest(p_bytes) as event
            where penstock.unpacked_size(event) not between 0 and p_stream.max_event_bytes
                -- What is encrypted was compressed before, and unpacks where its key is.
                and not (p_stream.encrypted_at is not null and penstock.is_sealed_bytes(event))
        ) then
            raise exception 'an event of stream % is no frame of zstd, or becomes larger than % bytes', p_stream.name, p_stream.max_event_bytes
                using errcode = 'PS413', hint = 'Compress each payload by itself. Keep large things elsewhere and append where they are, or change max_event_bytes.';
        end if;
    end if;
    return events;
end
$$;
comment on function penstock.check_events(penstock.streams, json[], bytea[], text[], json[], timestamptz[]) is
    'Part of the appends and of check_chunk: raises PS400 or PS413 unless the arrays fit each other and the stream. Returns the number of events.';

create or replace function penstock.parse_events(
    p_stream text, p_events jsonb, out data json[], out bytes bytea[], out keys text[], out headers json[], out times timestamptz[]
)
language plpgsql
stable
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    known constant text[] := array['data', 'bytes', 'key', 'headers', 'time'];
begin
    perform penstock.check_documents(p_events, known, 'event', '{"key": "N14228", "data": {"delay": 5}}');
    begin
        select
            coalesce(array_agg((event -> 'data')::json order by place), '{}'),
            coalesce(array_agg(decode(event ->> 'bytes', 'base64') order by place), '{}'),
            array_agg(event ->> 'key' order by place),
            array_agg(nullif(event -> 'headers', 'null')::json order by place),
            array_agg(penstock.zoned_time(event ->> 'time', 'time') order by place)
        into data, bytes, keys, headers, times
        from jsonb_array_elements(p_events) with ordinality as given (event, place);
    exception
        when data_exception then
            raise exception 'invalid event: %', sqlerrm
                using errcode = 'PS400', hint = 'bytes are base64, time is a time such as "2026-01-31T12:00:00Z".';
    end;
    perform penstock.check_each_json(array(select event -> 'data' from jsonb_array_elements(p_events) as event), 'an event', 134217728);
    perform penstock.check_each_json(array(select event -> 'headers' from jsonb_array_elements(p_events) as event), 'a header', 134217728);
    keys := case when num_nonnulls(variadic keys) > 0 then keys end;
    headers := case when num_nonnulls(variadic headers) > 0 then headers end;
    times := case when num_nonnulls(variadic times) > 0 then times end;
    data := case stream.format when 'json' then data end;
    bytes := case stream.format when 'bytes' then bytes end;
end
$$;
comment on function penstock.parse_events(text, jsonb) is
    'Part of append_json and append_each_json: events as arrays. Those of keys, headers and times are null when no event has any; of data and bytes the one that is not the format of the stream is null. Raises PS400.';

create or replace function penstock.append_json(p_stream text, p_events jsonb)
returns table (partition integer, first_offset bigint, events integer)
language sql
security definer
set search_path = penstock, pg_temp
as $$
    select appended.*
    from penstock.parse_events(p_stream, p_events) as given
    cross join lateral penstock.append_many(p_stream, given.data, given.keys, given.headers, given.times, given.bytes) as appended
$$;
comment on function penstock.append_json(text, jsonb) is
    'append_many for clients without arrays: a JSON array of {data, bytes (base64), key, headers, time}, each optional.';

create or replace function penstock.append_each_json(p_stream text, p_events jsonb)
returns table (partition integer, event_offset bigint)
language sql
security definer
set search_path = penstock, pg_temp
as $$
    select appended.*
    from penstock.parse_events(p_stream, p_events) as given
    cross join lateral penstock.append_each(p_stream, given.data, given.keys, given.headers, given.times, given.bytes) as appended
$$;
comment on function penstock.append_each_json(text, jsonb) is 'append_json, with a row for each event in the order given: where it is.';
