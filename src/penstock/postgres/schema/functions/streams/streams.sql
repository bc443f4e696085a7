-- Streams: create, change, append. The head of tables/0006_streams.sql explains them.

create or replace function penstock.bucket_of(p_key text)
returns integer
language sql
immutable
strict
parallel safe
as $$
    select (penstock.key_hash(p_key) & 4095)::integer
$$;
comment on function penstock.bucket_of(text) is 'The bucket of a key, 0 to 4095: the low twelve bits of its hash.';

create or replace function penstock.routes_of(p_partitions integer)
returns smallint[]
language sql
immutable
strict
parallel safe
as $$
    -- The hash of a bucket's number as text, so that neighbouring buckets do not go together.
    select array_agg(penstock.jump_hash(penstock.key_hash(bucket::text), p_partitions)::smallint order by bucket)
    from generate_series(0, 4095) as bucket
$$;
comment on function penstock.routes_of(integer) is
    'The partition of each bucket in a stream of so many partitions. With more partitions buckets only move to new ones.';

create or replace function penstock.partition_of(p_key text, p_partitions integer)
returns integer
language sql
immutable
strict
parallel safe
as $$
    select penstock.jump_hash(penstock.key_hash(penstock.bucket_of(p_key)::text), p_partitions)
$$;
comment on function penstock.partition_of(text, integer) is 'The partition of a key in a stream of so many partitions.';

create or replace function penstock.require_stream(p_name text)
returns penstock.streams
language plpgsql
stable
as $$
declare
    stream penstock.streams;
begin
    select * into stream from penstock.streams where name = p_name;
    if not found then
        raise exception 'no such stream: %', coalesce(left(p_name, 100), 'null')
            using errcode = 'PS404', hint = format('Create it first: select penstock.create_stream(%L);', left(p_name, 200));
    end if;
    return stream;
end
$$;
comment on function penstock.require_stream(text) is 'The stream of that name, or PS404.';

create or replace function penstock.stream_options(p_stream penstock.streams, p_options jsonb)
returns penstock.streams
language plpgsql
stable
as $$
declare
    changed penstock.streams;
    known constant text[] := array[
        'format', 'compression', 'segment_age', 'segment_bytes', 'segment_events', 'keep_age', 'keep_bytes', 'keep_events', 'keep_unread',
        'compact', 'tombstone_age', 'max_event_bytes'
    ];
begin
    perform penstock.check_options(p_options, known, '{"keep_age": "7 days"}');
    begin
        changed := jsonb_populate_record(p_stream, p_options);
    exception
        when data_exception then
            raise exception 'invalid option: %', sqlerrm
                using errcode = 'PS400', hint = 'Ages are text such as "7 days", or ISO 8601; the others are numbers, true or false.';
    end;
    if changed.format is null or changed.format not in ('json', 'bytes') then
        raise exception 'unknown format: %', coalesce(left(changed.format, 100), 'null')
            using errcode = 'PS400', hint = 'A format is json or bytes.';
    end if;
    if changed.compression is not null and (changed.compression <> 'zstd' or changed.format <> 'bytes') then
        raise exception 'unknown compression of %: %', changed.format, left(changed.compression, 100)
            using errcode = 'PS400', hint = 'The compression of a stream of bytes is zstd, or null.';
    end if;
    if num_nulls(
        changed.segment_bytes, changed.keep_unread, changed.compact, changed.tombstone_age, changed.max_event_bytes
    ) > 0 then
        raise exception 'only segment_age, segment_events, keep_age, keep_bytes and keep_events may be null'
            using errcode = 'PS400', hint = 'Leave an option out to keep it as it is.';
    end if;
    if least(changed.segment_bytes, changed.segment_events, changed.keep_bytes, changed.keep_events, changed.max_event_bytes) < 1
        or least(changed.segment_age, changed.keep_age) <= interval '0'
    then
        raise exception 'sizes, numbers and ages must be positive'
            using errcode = 'PS400', hint = 'null means no limit.';
    end if;
    return changed;
end
$$;
comment on function penstock.stream_options(penstock.streams, jsonb) is 'Part of create_stream and change_stream: a stream with these options, checked.';

create or replace function penstock.open_segment(p_stream integer)
returns bigint
language plpgsql
as $$
declare
    segment constant bigint := nextval('penstock.segment_number');
begin
    execute format('create table penstock.%I (like penstock.event_segment including all)', 'events_' || segment);
    insert into penstock.segments (id, stream, table_name, opened_at)
    values (segment, p_stream, 'events_' || segment, penstock.clock());
    return segment;
end
$$;
comment on function penstock.open_segment(integer) is 'Part of create_stream and roll_segment: a new segment, not yet written to. Returns its number.';

create or replace function penstock.create_stream(p_name text, p_partitions integer default 16, p_options jsonb default '{}')
returns penstock.streams
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    wanted penstock.streams;
    created penstock.streams;
    first_segment bigint;
begin
    if p_name is null or p_name !~ '^(?![.]{1,2}$)[A-Za-z0-9_.-]{1,100}$' and p_name !~ '^[A-Za-z0-9_.-]{1,100}[.]dead$' then
        raise exception 'invalid stream name: %', coalesce(quote_literal(left(p_name, 100)), 'null')
            using errcode = 'PS400', hint = 'A stream name has 1 to 100 letters, digits, ".", "-" or "_" (that of dead letters ".dead" after them), and is not "." or "..".';
    end if;
    if p_partitions is null or p_partitions not between 1 and 1024 then
        raise exception 'invalid number of partitions: %', coalesce(p_partitions::text, 'null')
            using errcode = 'PS400', hint = 'A stream has 1 to 1,024 partitions.';
    end if;
    wanted := penstock.stream_options(jsonb_populate_record(null::penstock.streams,
        '{"format": "json", "segment_bytes": 67108864, "keep_unread": false, "compact": false, "tombstone_age": "1 day", "max_event_bytes": 1048576}'
    ), p_options);
    insert into penstock.streams (
        name, partitions, routes, format, compression, segment_age, segment_bytes, segment_events, keep_age, keep_bytes, keep_events,
        keep_unread, compact, tombstone_age, max_event_bytes, created_at, updated_at
    )
    values (
        p_name, p_partitions, penstock.routes_of(p_partitions), wanted.format, wanted.compression, wanted.segment_age, wanted.segment_bytes,
        wanted.segment_events, wanted.keep_age, wanted.keep_bytes, wanted.keep_events, wanted.keep_unread, wanted.compact,
        wanted.tombstone_age, wanted.max_event_bytes, moment, moment
    )
    on conflict (name) do nothing
    returning * into created;
    if created.id is null then
        raise exception 'stream % exists already', p_name
            using errcode = 'PS409', hint = format('Change it: penstock streams change %s or penstock streams grow %s; in SQL penstock.change_stream or penstock.grow_stream.', p_name, p_name);
    end if;
    first_segment := penstock.open_segment(created.id);
    insert into penstock.stream_partitions (stream, partition, width, segment)
    select created.id, number, p_partitions, first_segment from generate_series(0, p_partitions - 1) as number;
    insert into penstock.segment_starts (stream, partition, segment, first_offset)
    select created.id, number, first_segment, 0 from generate_series(0, p_partitions - 1) as number;
    return created;
end
$$;
comment on function penstock.create_stream(text, integer, jsonb) is
    'Creates a stream. Options: format (json or bytes), keep_age, keep_bytes, keep_events, keep_unread (retention), compact, tombstone_age, segment_age, segment_bytes, segment_events, max_event_bytes. PS409 when it exists.';

create or replace function penstock.change_stream(p_name text, p_options jsonb)
returns penstock.streams
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    before constant penstock.streams := penstock.require_stream(p_name);
    changed constant penstock.streams := penstock.stream_options(before, p_options);
    stored penstock.streams;
begin
    if changed.format <> before.format or changed.compression is distinct from before.compression then
        raise exception 'stream % has the format %', p_name, concat_ws(' ', before.format, before.compression)
            using errcode = 'PS409', hint = 'A stream keeps its format; create another one.';
    end if;
    update penstock.streams
    set segment_age = changed.segment_age,
        segment_bytes = changed.segment_bytes,
        segment_events = changed.segment_events,
        keep_age = changed.keep_age,
        keep_bytes = changed.keep_bytes,
        keep_events = changed.keep_events,
        keep_unread = changed.keep_unread,
        compact = changed.compact,
        tombstone_age = changed.tombstone_age,
        max_event_bytes = changed.max_event_bytes,
        updated_at = penstock.clock()
    where name = p_name
    returning * into stored;
    if not found then
        -- Dropped a moment ago.
        return penstock.require_stream(p_name);
    end if;
    return stored;
end
$$;
comment on function penstock.change_stream(text, jsonb) is 'Changes the given options of a stream. For more partitions: grow_stream.';

create or replace function penstock.declare_stream(p_name text, p_partitions integer default 16, p_options jsonb default '{}')
returns penstock.streams
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    declared penstock.streams;
    defaults constant jsonb := '{
        "segment_age": null, "segment_bytes": 67108864, "segment_events": null, "keep_age": null, "keep_bytes": null,
        "keep_events": null, "keep_unread": false, "compact": false, "tombstone_age": "1 day", "max_event_bytes": 1048576
    }';
begin
    select * into declared from penstock.streams where name = p_name;
    if not found then
        begin
            declared := penstock.create_stream(p_name, p_partitions, p_options);
            update penstock.streams set declaration = p_options where name = p_name;
            return declared;
        exception
            when sqlstate 'PS409' then
                declared := penstock.require_stream(p_name);
        end;
    end if;
    if p_options - '{format,compression}'::text[] = '{}' then
        -- Who uses the stream of another application says nothing about its options, and stores payloads as it does.
        if coalesce(p_options ->> 'format', declared.format) <> declared.format
            or p_options ? 'compression' and p_options ->> 'compression' is distinct from declared.compression
        then
            return penstock.change_stream(p_name, p_options);
        end if;
        return declared;
    end if;
    if declared.declaration is distinct from p_options then
        -- What the declaration before this one said and this one does not is as if it had never been said.
        declared := penstock.change_stream(
            p_name,
            p_options || coalesce(
                (
                    select jsonb_object_agg(option.key, option.value)
                    from jsonb_each(defaults) as option
                    where declared.declaration ? option.key and not p_options ? option.key
                ),
                '{}'
            )
        );
        update penstock.streams set declaration = p_options where name = p_name;
    end if;
    return declared;
end
$$;
comment on function penstock.declare_stream(text, integer, jsonb) is
    'Creates a stream when there is none, and otherwise changes its options when the declaration is a new one. A declaration without options leaves those of a stream that exists as they are; an option that the declaration before had and this one has not gets its default. The number of partitions of a stream that exists is left alone: see grow_stream.';

create or replace function penstock.listen_for_events(p_streams text[], p_channel text)
returns void
language plpgsql
as $$
begin
    if p_channel is null or p_channel !~ '^penstock_[A-Za-z0-9_.-]{1,50}$' then
        raise exception 'invalid channel: %', coalesce(quote_literal(left(p_channel, 100)), 'null')
            using errcode = 'PS400', hint = 'A channel is penstock_ and 1 to 50 letters, digits, ".", "-" or "_".';
    end if;
    perform penstock.listen_for('events', p_streams, p_channel, p_places => 100);
end
$$;
comment on function penstock.listen_for_events(text[], text) is
    'Part of wait_for_events and wait_for_events_of: announces a reader that is idle and listens on a channel, at streams given by their numbers as text.';

create or replace function penstock.wait_for_events(p_stream text, p_channel text)
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.listen_for_events(array[(penstock.require_stream(p_stream)).id::text], p_channel)
$$;
comment on function penstock.wait_for_events(text, text) is
    'Says that a reader is idle and listens on a channel; good for 30 seconds. Read once more after it: something may have come in between. A role has 100 places at a stream; who finds none is not notified, and polls.';

create or replace function penstock.stop_waiting(p_channel text)
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    delete from penstock.listeners where channel = p_channel and kind = 'events' and role = session_user
$$;
comment on function penstock.stop_waiting(text) is 'Takes back what the caller''s role said with wait_for_events.';

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
    -- Planned each time, since segments come and go; so it is as plain as can be.
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
    perform penstock.wake(penstock.listening('events', p_stream.id::text), 'events ' || p_stream.id);
end
$$;
comment on function penstock.append_chunks(penstock.streams, integer, integer[], integer[], json[], bytea[], text[], json[], timestamptz[]) is
    'Part of append: locks the partitions and writes events that are sorted by partition, p_counts[i] of them into p_partitions[i]. PS412 when the keys were routed for another number of partitions.';

create or replace function penstock.start_of(p_stream integer, p_partition integer, p_segment bigint)
returns bigint
language sql
stable
as $$
    select first_offset from penstock.segment_starts where stream = p_stream and partition = p_partition and segment = p_segment
$$;
comment on function penstock.start_of(integer, integer, bigint) is 'Where a segment begins in a partition.';

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
    if p_times is not null and (penstock.shown_time('infinity') < any (p_times) or penstock.shown_time('-infinity') > any (p_times)) then
        perform penstock.check_times(p_times);
    end if;
    -- In conditions of their own: of what is null, as of a stream that does not compress, "and" looks at the rest too.
    if p_stream.compression = 'zstd' then
        -- Dead letters are what they were.
        if not p_stream.name like '%.dead' and exists (
            select from unnest(p_bytes) as event where penstock.unpacked_size(event) not between 0 and p_stream.max_event_bytes
        ) then
            raise exception 'an event of stream % is no frame of zstd, or becomes larger than % bytes', p_stream.name, p_stream.max_event_bytes
                using errcode = 'PS413', hint = 'Compress each payload by itself. Keep large things elsewhere and append where they are, or change max_event_bytes.';
        end if;
    end if;
    return events;
end
$$;
comment on function penstock.check_events(penstock.streams, json[], bytea[], text[], json[], timestamptz[]) is
    'Part of append: raises PS400 or PS413 unless the arrays fit each other and the stream. Returns the number of events.';

create or replace function penstock.digest_of(p_data json[], p_bytes bytea[], p_keys text[], p_headers json[], p_times timestamptz[])
returns numeric
language sql
stable
as $$
    -- Of each event a hash of all that it is; of the batch their sum, since one that is sent again after the stream grew comes in
    -- another order.
    select count(*) + coalesce(
        sum(
            hashtextextended(
                coalesce(event.data::text, encode(event.bytes, 'hex'), ''),
                hashtextextended(
                    coalesce('=' || event.key, ''),
                    case
                        -- Of most events: computed once for all of them.
                        when event.header is null and event.time is null then hashtextextended('', 1)
                        else hashtextextended(coalesce(event.header::text, ''), coalesce((extract(epoch from event.time) * 1000000)::bigint, 1))
                    end
                )
            )
        ),
        0
    )
    from unnest(p_data, p_bytes, p_keys, p_headers, p_times) as event (data, bytes, key, header, time)
$$;
comment on function penstock.digest_of(json[], bytea[], text[], json[], timestamptz[]) is
    'Part of append: tells a batch of a producer from another one, by payloads, keys, headers and times.';

create or replace function penstock.last_batch(
    p_stream integer, p_producer text, p_user text, p_sequence bigint, p_digest numeric,
    out is_repeated boolean, out last bigint, out partitions integer[], out first_offsets bigint[], out counts integer[]
)
language plpgsql
as $$
declare
    last_digest numeric;
begin
    is_repeated := false;
    if p_producer is null then
        return;
    end if;
    if p_sequence is null or p_sequence < 0 or length(p_producer) not between 1 and 200 then
        raise exception 'invalid producer or sequence: %, %', left(p_producer, 100), coalesce(p_sequence::text, 'null')
            using errcode = 'PS400',
                  hint = 'A producer has a name of up to 200 characters, and numbers its batches one by one, not below zero.';
    end if;
    if length(p_user) > 200 then
        raise exception 'invalid user: %', quote_literal(left(p_user, 100))
            using errcode = 'PS400', hint = 'The name of a user for whom a producer appends has up to 200 characters.';
    end if;
    -- Append runs with the rights of the schema's owner; session_user is who called it. A producer's name belongs to
    -- the role that appends: one role cannot use up the numbers of another.
    loop
        select noted.sequence, noted.digest, noted.partitions, noted.first_offsets, noted.counts
        into last, last_digest, partitions, first_offsets, counts
        from penstock.stream_producers as noted
        where noted.stream = p_stream
            and noted.producer = p_producer
            and noted.role = session_user::text
            and noted.user_name = coalesce(p_user, '')
        for update;
        exit when found;
        insert into penstock.stream_producers (stream, producer, role, user_name, sequence, partitions, first_offsets, counts, seen_at)
        values (p_stream, p_producer, session_user, coalesce(p_user, ''), p_sequence - 1, '{}', '{}', '{}', penstock.clock())
        on conflict do nothing;
    end loop;
    if p_sequence - 1 > last then
        raise exception 'batch % of producer % is not the next one: the last was %', p_sequence, p_producer, last
            using errcode = 'PS409', hint = 'A batch before it is missing; append that one first.';
    end if;
    is_repeated := p_sequence <= last;
    if p_sequence = last and last_digest <> p_digest then
        raise exception 'batch % of producer % was another one', p_sequence, p_producer
            using errcode = 'PS409',
                  hint = 'Each writer needs a name of its own, and goes on after its last batch: select penstock.last_sequence(stream, producer);';
    end if;
end
$$;
comment on function penstock.last_batch(integer, text, text, bigint, numeric) is
    'Part of append: locks the producer of the caller''s role and says whether this batch of it was appended before. PS409 when one is missing in between, and when its last one was another.';

create or replace function penstock.last_sequence(p_stream text, p_producer text)
returns bigint
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select coalesce(
        (
            select sequence
            from penstock.stream_producers
            where stream = (penstock.require_stream(p_stream)).id
                and producer = p_producer
                and role = session_user::text
                and user_name = ''
        ),
        0
    )
$$;
comment on function penstock.last_sequence(text, text) is
    'Number of the last batch that a producer of the caller''s role appended; 0: none, or it was not seen for 30 days.';

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
    if (select sum(given) from unnest(p_counts) as given) is distinct from total::bigint
        or cardinality(p_partitions) is distinct from cardinality(p_counts)
        or exists (select from unnest(p_counts) as given where given is null or given not between 1 and 1000)
        or exists (select from unnest(p_partitions) as given where given is null or given not between 0 and p_width - 1)
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
begin
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
    'Appends up to 100,000 events, all or none, in the caller''s transaction: payloads (json or bytes, as the stream has it), and for each a key, headers and the time when it happened, all optional. Events of one key keep their order. With a producer, a name of the caller''s role, and its batch number a repeated batch is not appended again. Returns where each chunk begins. The partitions stay locked until the caller commits.';

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
            array_agg((event ->> 'time')::timestamptz order by place)
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
    'Part of append_json: events as arrays. Those of keys, headers and times are null when no event has any; of data and bytes the one that is not the format of the stream is null. Raises PS400.';

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

-- Loads: millions of events at once, all or none. They come by COPY into penstock.loaded_chunks, where only their own transaction
-- sees them, without any lock on the stream, and are then appended by one statement.

create or replace function penstock.check_chunk()
returns trigger
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(new.stream);
begin
    -- Here and not in end_load: nothing more is copied after the first bad chunk, and what is stored may be compressed.
    if penstock.check_events(stream, new.data, new.bytes, new.keys, new.headers, new.times) <> new.events
        or new.partition not between 0 and stream.partitions - 1
    then
        raise exception 'partitions or numbers of events do not fit the events'
            using errcode = 'PS400', hint = 'Each row has as many payloads, in the format of the stream, as it says in events.';
    end if;
    return new;
end
$$;
comment on function penstock.check_chunk() is 'Trigger of loaded_chunks: checks each chunk that is copied as check_events does for an append.';

create or replace trigger loaded_chunks_check
before insert on penstock.loaded_chunks
for each row execute function penstock.check_chunk();

create or replace function penstock.gather_partitions(p_stream penstock.streams, out width integer, out active bigint)
language plpgsql
as $$
declare
    oldest bigint;
begin
    select min(locked.width), max(locked.segment), min(locked.segment)
    into width, active, oldest
    from (
        select partitions.width, partitions.segment
        from penstock.stream_partitions as partitions
        where partitions.stream = p_stream.id
        order by partitions.partition
        for no key update
    ) as locked;
    if oldest < active then
        perform penstock.move_to_segment(p_stream.id, p_stream.name, active, null);
    end if;
end
$$;
comment on function penstock.gather_partitions(penstock.streams) is
    'Part of end_load and commit_staged_events: locks all partitions of a stream and moves them to the active segment. Returns their number and the segment.';

create or replace function penstock.begin_load(p_stream text)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
begin
    delete from penstock.loaded_chunks as chunk where chunk.xid = pg_current_xact_id() and chunk.stream = p_stream;
    return stream.partitions;
end
$$;
comment on function penstock.begin_load(text) is
    'Begins to load events. Then copy into penstock.loaded_chunks (stream, partition, events, keys, times, headers, data, bytes), a row for each chunk, in this transaction, before end_load. PS413 for an event larger than max_event_bytes. Returns the number of partitions for which to route keys.';

create or replace function penstock.end_load(p_stream text, p_width integer)
returns table (partition integer, first_offset bigint, events bigint)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    gathered record;
begin
    gathered := penstock.gather_partitions(stream);
    if gathered.width is distinct from p_width then
        perform penstock.require_stream(p_stream);
        raise exception 'stream % does not have % partitions', p_stream, p_width
            using errcode = 'PS412', hint = 'It has grown meanwhile: begin again.';
    end if;
    return query execute format(
        $insert$
            with inserted as (
                insert into penstock.%1$I (partition, first_offset, events, appended_at, keys, times, headers, data, bytes)
                select
                    chunk.partition,
                    bounds.next_offset + sum(chunk.events) over (partition by chunk.partition order by chunk.place) - chunk.events,
                    chunk.events, $1, chunk.keys, chunk.times, chunk.headers, chunk.data, chunk.bytes
                from penstock.loaded_chunks as chunk
                left join penstock.stream_bounds($3) as bounds using (partition)
                where chunk.xid = $2 and chunk.stream = $3
                returning partition, first_offset, events
            )
            select partition, min(first_offset), sum(events)::bigint from inserted group by partition order by partition
        $insert$,
        'events_' || gathered.active
    )
    using penstock.clock(), pg_current_xact_id(), p_stream;
    delete from penstock.loaded_chunks as chunk where chunk.xid = pg_current_xact_id() and chunk.stream = p_stream;
    perform penstock.wake(penstock.listening('events', stream.id::text), 'events ' || stream.id);
end
$$;
comment on function penstock.end_load(text, integer) is
    'Appends what this transaction copied into penstock.loaded_chunks for the stream since begin_load. Returns the first offset and the number of events by partition.';
