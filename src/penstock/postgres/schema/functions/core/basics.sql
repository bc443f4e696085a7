-- Basics: the clock, ids, and the checks that several operations share.
--
-- Errors. Every error that a caller can cause carries an SQLSTATE of class PS, a message that names the wrong value
-- and a hint that says what to do:
--   PS400 bad parameter   PS404 no such thing   PS409 not possible in this state   PS413 too large
--
-- All functions that callers use are security definer with a fixed search_path: a role needs no right on any table
-- to work through them (see grant_access).

create or replace function penstock.held_clock()
returns timestamptz
language sql
stable
as $$
    select case
        when pg_has_role(session_user, nspowner, 'member') then current_setting('penstock.clock')::timestamptz
        else clock_timestamp()
    end
    from pg_namespace
    where nspname = 'penstock'
$$;
comment on function penstock.held_clock() is 'Part of clock: the time that a test set, which counts only for the owner of the schema.';

-- In PL/pgSQL, whose plan is kept: almost every call asks for the time once, and a function in SQL is prepared for that in each
-- transaction, which costs 30 microseconds. (The planner cannot write it out, since its body is volatile.)
create or replace function penstock.clock()
returns timestamptz
language plpgsql
stable
as $$
begin
    return case
        when current_setting('penstock.clock', true) > '' then penstock.held_clock()
        else clock_timestamp()
    end;
end
$$;
comment on function penstock.clock() is
    'The only clock. A test can hold it still with: set penstock.clock = ''2026-01-01T00:00:00Z''.';

do $do$
begin
    if current_setting('server_version_num')::integer >= 180000 then
        create or replace function penstock.new_id() returns uuid language sql volatile as 'select uuidv7()';
    else
        -- RFC 9562: 48 bits of milliseconds, then the version and random bits.
        create or replace function penstock.new_id() returns uuid language sql volatile as $$
            select encode(
                set_bit(
                    set_bit(
                        overlay(
                            uuid_send(gen_random_uuid())
                            placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
                            from 1 for 6
                        ),
                        52, 1
                    ),
                    53, 1
                ),
                'hex'
            )::pg_catalog.uuid
        $$;
    end if;
end
$do$;
comment on function penstock.new_id() is 'A new UUIDv7.';

create or replace function penstock.id_time(id uuid)
returns timestamptz
language sql
immutable
strict
parallel safe
as $$
    select case
        when substr(id::text, 15, 1) = '7' then
            to_timestamp(('x' || translate(substr(id::text, 1, 13), '-', ''))::bit(48)::bigint / 1000.0)
    end
$$;
comment on function penstock.id_time(uuid) is 'When a UUIDv7 was made, by its maker''s clock; null for other ids.';

create or replace function penstock.check_name(p_name text)
returns void
language plpgsql
immutable
as $$
begin
    -- "." and ".." are no parts of a URL's path: clients remove them.
    if p_name is null or p_name !~ '^(?![.]{1,2}$)[^[:space:]/[:cntrl:]]{1,200}$' or starts_with(p_name, 'job_') then
        raise exception 'invalid job type name: %', coalesce(quote_literal(left(p_name, 100)), 'null')
            using errcode = 'PS400',
                  hint = 'A name has 1 to 200 characters, none of them white space, "/" or a control character, does not begin with "job_", and is not "." or "..".';
    end if;
end
$$;
comment on function penstock.check_name(text) is 'Raises PS400 unless the text can name a job type.';

create or replace function penstock.check_options(p_options jsonb, p_known text[], p_example text, p_elsewhere text default '')
returns void
language plpgsql
immutable
as $$
declare
    unknown text;
begin
    if p_options is null or jsonb_typeof(p_options) <> 'object' then
        raise exception 'options must be a JSON object, not %', coalesce(left(p_options::text, 100), 'null')
            using errcode = 'PS400', hint = 'For example ' || p_example || '.';
    end if;
    perform penstock.check_json(p_options, 'options', 65536);
    select option into unknown from jsonb_object_keys(p_options) as option where option <> all (p_known) limit 1;
    if unknown is not null then
        raise exception 'unknown option: %', left(unknown, 100)
            using errcode = 'PS400', hint = 'Known are ' || array_to_string(p_known, ', ') || p_elsewhere || '.';
    end if;
end
$$;
comment on function penstock.check_options(jsonb, text[], text, text) is 'Raises PS400 unless this is a JSON object of known options.';

create or replace function penstock.check_documents(p_documents jsonb, p_known text[], p_what text, p_example text)
returns void
language plpgsql
immutable
as $$
declare
    wrong text;
begin
    if p_documents is null or jsonb_typeof(p_documents) <> 'array' then
        raise exception '%s must be a JSON array', p_what
            using errcode = 'PS400', hint = 'For example [' || p_example || '].';
    end if;
    select 'not an object: ' || left(document::text, 100) into wrong
    from jsonb_array_elements(p_documents) as document
    where jsonb_typeof(document) <> 'object'
    limit 1;
    if wrong is null then
        select 'unknown field: ' || left(field, 100) into wrong
        from jsonb_array_elements(p_documents) as document, jsonb_object_keys(document) as field
        where field <> all (p_known)
        limit 1;
    end if;
    if wrong is not null then
        raise exception 'invalid %: %', p_what, wrong
            using errcode = 'PS400',
                  hint = 'It is an object with ' || array_to_string(p_known, ', ') || ', for example ' || p_example || '.';
    end if;
end
$$;
comment on function penstock.check_documents(jsonb, text[], text, text) is
    'Raises PS400 unless this is a JSON array of objects with known fields. p_what: what each of them is, in the singular.';

create or replace function penstock.require_type(p_name text)
returns penstock.jobs
language plpgsql
stable
as $$
declare
    job_type penstock.jobs;
    dropped timestamptz;
begin
    select * into job_type from penstock.jobs where name = p_name;
    if not found then
        perform penstock.check_name(p_name);
        select dropped_at into dropped from penstock.dropped_types where name = p_name;
        if found then
            raise exception 'no such job type: %, it was dropped at %', p_name, to_char(dropped at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
                using errcode = 'PS404',
                      hint = format(
                          'If it is to exist again: penstock declare MODULE:APP, or start a worker for it; in SQL: select penstock.create_job_type(%L);',
                          p_name
                      );
        end if;
        raise exception 'no such job type: %', p_name
            using errcode = 'PS404',
                  hint = format(
                      'An application declares it when it opens or a worker of it starts, and by: penstock declare MODULE:APP. In SQL: select penstock.create_job_type(%L);',
                      p_name
                  );
    end if;
    return job_type;
end
$$;
comment on function penstock.require_type(text) is 'The job type of that name, or PS404.';

create or replace function penstock.check_worker(p_worker text)
returns void
language plpgsql
as $$
begin
    -- It is the name of a channel, behind a prefix of nine bytes.
    if p_worker is null or p_worker !~ '^[^[:cntrl:]]+$' or octet_length(p_worker) > 54 then
        raise exception 'invalid worker: %', coalesce(quote_literal(left(p_worker, 100)), 'null')
            using errcode = 'PS400', hint = 'Name the worker with 1 to 54 bytes, different from every other worker.';
    end if;
end
$$;
comment on function penstock.check_worker(text) is 'Raises PS400 unless a worker can have this name.';

create or replace function penstock.payload(p_message bigint)
returns jsonb
language sql
stable
strict
security definer
set search_path = penstock, pg_temp
as $$
    select data from penstock.topic_messages where number = p_message
$$;
comment on function penstock.payload(bigint) is 'The payload of a topic message, for jobs that are copies: coalesce(penstock.payload(message), data). Null for null.';

create or replace function penstock.shell_word(p_text text)
returns text
language sql
immutable
strict
as $$
    -- Keys and names of signals are any text. What begins with a dash would be read as an option.
    select case when starts_with(p_text, '-') then '-- ' else '' end
        || case when p_text ~ '^[A-Za-z0-9_./:@+=,-]+$' then p_text else '''' || replace(p_text, '''', '''' || chr(92) || '''''') || '''' end
$$;
comment on function penstock.shell_word(text) is 'Part of why: a text as the last word of a command, as a shell reads it.';
