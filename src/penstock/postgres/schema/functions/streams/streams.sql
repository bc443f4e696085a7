-- Streams: create, change, declare. The head of tables/0006_streams.sql explains them.

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
        'compact', 'tombstone_age', 'max_event_bytes', 'encrypted'
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
        changed.segment_bytes, changed.keep_unread, changed.compact, changed.tombstone_age, changed.max_event_bytes, changed.encrypted
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
    -- Infinity too, which clients cannot read.
    if greatest(changed.segment_age, changed.keep_age, changed.tombstone_age) > interval '366000 days' or changed.tombstone_age < interval '0' then
        raise exception 'an age is less than nothing, or more than 366,000 days'
            using errcode = 'PS400', hint = 'A segment_age or keep_age of null means no limit, and a tombstone_age is 0 or more.';
    end if;
    if changed.encrypted and changed.encrypted_at is null then
        changed.encrypted_at := penstock.clock();
    end if;
    return changed;
end
$$;
comment on function penstock.stream_options(penstock.streams, jsonb) is 'Part of create_stream and change_stream: a stream with these options, checked.';

create or replace function penstock.default_stream_options()
returns jsonb
language sql
immutable
as $$
    select '{
        "segment_age": null, "segment_bytes": 67108864, "segment_events": null, "keep_age": null, "keep_bytes": null,
        "keep_events": null, "keep_unread": false, "compact": false, "tombstone_age": "1 day", "max_event_bytes": 1048576
    }'::jsonb
$$;
comment on function penstock.default_stream_options() is
    'Part of create_stream and declare_stream: the options, with their defaults, that a later declaration can leave out again.';

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
comment on function penstock.open_segment(integer) is 'Part of create_stream, roll_segment and try_to_roll: a new segment, not yet written to. Returns its number.';

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
    wanted := penstock.stream_options(
        jsonb_populate_record(null::penstock.streams, penstock.default_stream_options() || '{"format": "json", "encrypted": false}'), p_options
    );
    insert into penstock.streams (
        name, partitions, routes, format, compression, segment_age, segment_bytes, segment_events, keep_age, keep_bytes, keep_events,
        keep_unread, compact, tombstone_age, max_event_bytes, encrypted, encrypted_at, created_at, updated_at
    )
    values (
        p_name, p_partitions, penstock.routes_of(p_partitions), wanted.format, wanted.compression, wanted.segment_age, wanted.segment_bytes,
        wanted.segment_events, wanted.keep_age, wanted.keep_bytes, wanted.keep_events, wanted.keep_unread, wanted.compact,
        wanted.tombstone_age, wanted.max_event_bytes, wanted.encrypted, wanted.encrypted_at, moment, moment
    )
    on conflict (name) do nothing
    returning * into created;
    if created.id is null then
        raise exception 'stream % exists already', p_name
            using errcode = 'PS409', hint = format('Change it: penstock streams change %s or penstock streams grow %s; in SQL penstock.change_stream or penstock.grow_stream.', p_name, p_name);
    end if;
    if created.encrypted then
        perform penstock.guard_staged_events();
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
    'Creates a stream. Options: format (json or bytes), keep_age, keep_bytes, keep_events, keep_unread (retention), compact, tombstone_age, segment_age, segment_bytes, segment_events, max_event_bytes, encrypted. PS409 when it exists.';

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
        encrypted = changed.encrypted,
        -- Once there may be encrypted payloads, there may be some for ever.
        encrypted_at = changed.encrypted_at,
        updated_at = penstock.clock()
    where name = p_name
    returning * into stored;
    if not found then
        -- Dropped a moment ago.
        return penstock.require_stream(p_name);
    end if;
    if stored.encrypted then
        perform penstock.guard_staged_events();
    elsif before.encrypted then
        -- Its dead letters follow: plain ones would be refused there.
        update penstock.streams set encrypted = false where name = p_name || '.dead' and encrypted;
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
    if jsonb_typeof(p_options) is distinct from 'object' then
        -- Which says what is wrong.
        return penstock.change_stream(p_name, p_options);
    end if;
    if p_options - '{format,compression}'::text[] = '{}' then
        -- An application that uses the stream of another one declares no options, and stores payloads in the same way.
        if coalesce(p_options ->> 'format', declared.format) <> declared.format
            or p_options ? 'compression' and p_options ->> 'compression' is distinct from declared.compression
        then
            return penstock.change_stream(p_name, p_options);
        end if;
        return declared;
    end if;
    perform penstock.check_encrypted_option('stream ' || p_name, p_options);
    if declared.declaration is distinct from p_options then
        -- An option that the declaration before this one had, and this one does not have, gets its default again.
        -- An older application does not know that the stream is encrypted: a declaration turns encryption on, and never off.
        declared := penstock.change_stream(
            p_name,
            case when p_options -> 'encrypted' = 'true' then p_options else p_options - 'encrypted' end || coalesce(
                (
                    select jsonb_object_agg(option.key, option.value)
                    from jsonb_each(penstock.default_stream_options()) as option
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
    'Creates a stream when there is none, and otherwise changes its options when the declaration is a new one. A declaration without options leaves those of a stream that exists as they are; an option that the declaration before had and this one has not gets its default. It turns encryption on, and never off: for that there is change_stream. The number of partitions of a stream that exists is left alone: see grow_stream.';
