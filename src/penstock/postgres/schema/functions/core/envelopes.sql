-- Envelopes: what the database knows of encrypted documents, of which it reads none.
--
-- A document of an encrypted type has to be an envelope when it is stored: each function that stores one calls refuse_plain before, with
-- the flag that it has read with the rest of the type. What workers report of a job (result, error, progress) goes through
-- without_plain instead, which leaves out what is not encrypted: an outcome counts, whatever came with it.

create or replace function penstock.is_key_id(p_text text)
returns boolean
language sql
immutable
parallel safe
as $$
    -- Six bytes in base64 for URLs: whatever shows the id of a key shows nothing else.
    select p_text ~ '^[A-Za-z0-9_-]{8}$'
$$;
comment on function penstock.is_key_id(text) is 'Whether a text has the form of the id of a key.';

create or replace function penstock.check_key_ids(p_who text, p_key_ids text[], p_most integer default 1000)
returns void
language plpgsql
immutable
as $$
begin
    if p_most is not null then
        perform penstock.check_size(cardinality(p_key_ids), p_most, 'keys');
    end if;
    -- Pages and logs show them.
    if exists (select from unnest(p_key_ids) as given where penstock.is_key_id(given) is not true) then
        raise exception '% names a key by something else than its id', p_who
            using errcode = 'PS400', hint = 'The id of a key has 8 letters, digits, "-" or "_": penstock keys list.';
    end if;
end
$$;
comment on function penstock.check_key_ids(text, text[], integer) is
    'Raises PS400 for what is no id of a key, and for more of them than p_most (null: any number).';

create or replace function penstock.is_envelope(p_data jsonb)
returns boolean
language sql
immutable
parallel safe
as $$
    select coalesce(
        case when jsonb_typeof(p_data) = 'object' and jsonb_typeof(p_data -> 'penstock') = 'object' then
            p_data - 'penstock' = '{}'
            and (p_data -> 'penstock') - '{v,kid,c}'::text[] = '{}'
            and jsonb_typeof(p_data #> '{penstock,v}') = 'number'
            and jsonb_typeof(p_data #> '{penstock,kid}') = 'string'
            and penstock.is_key_id(p_data #>> '{penstock,kid}')
            and p_data #>> '{penstock,c}' ~ '^[A-Za-z0-9+/]{38,}={0,2}$'
        end,
        false
    )
$$;
comment on function penstock.is_envelope(jsonb) is 'Whether a document has the form of an encrypted one.';

create or replace function penstock.key_of_envelope(p_data jsonb)
returns text
language sql
immutable
parallel safe
as $$
    select case when penstock.is_envelope(p_data) then p_data #>> '{penstock,kid}' end
$$;
comment on function penstock.key_of_envelope(jsonb) is 'The id of the key with which a document is encrypted; null: it is not.';

create or replace function penstock.has_key_for(p_data jsonb, p_message bigint, p_keys text[])
returns boolean
language sql
stable
parallel safe
as $$
    select coalesce(penstock.key_of_envelope(coalesce(penstock.payload(p_message), p_data)) = any (coalesce(p_keys, '{}')), true)
$$;
comment on function penstock.has_key_for(jsonb, bigint, text[]) is
    'Part of the claims, and of what looks for jobs that run alone, for types that may have encrypted documents: whether a worker with these keys can read a job.';

create or replace function penstock.refuse_plain(p_what text, p_data jsonb[])
returns void
language plpgsql
as $$
declare
    place integer;
begin
    select min(given.place) into place
    from unnest(p_data) with ordinality as given (document, place)
    where not penstock.is_envelope(given.document);
    if place is not null then
        raise exception '% is encrypted, and document % of % is not', p_what, place, cardinality(p_data)
            using errcode = 'PS400',
                  hint = 'Only an application that declares it with encrypted=True and has a key can write to it: Penstock(keys=[...]).';
    end if;
end
$$;
comment on function penstock.refuse_plain(text, jsonb[]) is
    'Part of what stores documents of encrypted job types: raises PS400 for the first one that is no envelope. p_what: what they are for.';

create or replace function penstock.is_sealed_bytes(p_payload bytea)
returns boolean
language sql
immutable
parallel safe
as $$
    -- A mark, a version, six bytes that are the id of the key, twelve of the nonce, and the tag of an empty text.
    select length(p_payload) >= 39 and substr(p_payload, 1, 5) = decode('f5504e5301', 'hex')
$$;
comment on function penstock.is_sealed_bytes(bytea) is 'Whether bytes have the form of an encrypted payload of a stream of bytes.';

create or replace function penstock.refuse_plain_events(p_stream penstock.streams, p_data json[], p_bytes bytea[])
returns void
language plpgsql
as $$
declare
    place bigint;
begin
    -- Null marks a key as deleted, and says nothing.
    if p_stream.format = 'json' then
        select min(given.place) into place
        from unnest(p_data) with ordinality as given (document, place)
        where given.document is not null and not penstock.is_envelope(given.document::jsonb);
    else
        select min(given.place) into place
        from unnest(p_bytes) with ordinality as given (payload, place)
        where given.payload is not null and not penstock.is_sealed_bytes(given.payload);
    end if;
    if place is not null then
        raise exception 'stream % is encrypted, and event % of % is not',
            p_stream.name, place, coalesce(cardinality(p_data), cardinality(p_bytes))
            using errcode = 'PS400',
                  hint = 'Only an application that declares it with encrypted=True and has a key can write to it: Penstock(keys=[...]).';
    end if;
end
$$;
comment on function penstock.refuse_plain_events(penstock.streams, json[], bytea[]) is
    'Part of the appends and of what stages events: raises PS400 for the first event of an encrypted stream whose payload is not encrypted.';

create or replace function penstock.kept_reason(p_stream penstock.streams, p_error text)
returns text
language sql
immutable
as $$
    select case
        when not p_stream.encrypted or p_error is null then p_error
        -- The class of an error with the envelope of its message, or what a consumer says of offsets and keys itself.
        when p_error ~ '[{]"penstock":[{]"v":1,"kid":"[A-Za-z0-9_-]{8}","c":"[A-Za-z0-9+/=]*"[}][}]' then p_error
        when p_error ~ '^(offset [0-9]+ of partition [0-9]+ of stream [^ ]+ is gone: the first stored offset is [0-9]+|KeyMissing: the document is encrypted with the key [A-Za-z0-9_-]{8}, which this application does not have)$' then p_error
        else coalesce(substring(p_error from '^((?:offset [0-9]+: )?[A-Za-z_][A-Za-z0-9_.]*: ).'), '')
            || 'not stored: it was sent without encryption, and the stream is encrypted'
    end
$$;
comment on function penstock.kept_reason(penstock.streams, text) is
    'What is stored of why a handler failed: of an encrypted stream the class of the error and an envelope, and nothing that is not encrypted.';

create or replace function penstock.check_staged_event()
returns trigger
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream penstock.streams;
begin
    select * into stream from penstock.streams where streams.name = new.stream and streams.encrypted;
    if found then
        begin
            perform penstock.refuse_plain_events(stream, new.data::json[], new.bytes);
        exception
            when data_exception then
                -- It is not JSON, and so not an envelope.
                perform penstock.refuse_plain_events(stream, array['0'::json], null);
        end;
    end if;
    return new;
end
$$;
comment on function penstock.check_staged_event() is
    'Trigger of staged_events: refuses a row that an encrypted stream does not take, before it is written anywhere.';

create or replace function penstock.guard_staged_events()
returns void
language plpgsql
as $$
begin
    -- As guard_staged_jobs: made with the first encrypted stream.
    perform pg_advisory_xact_lock(hashtext('penstock.guard_staged_events'));
    if not exists (
        select from pg_trigger where tgrelid = 'penstock.staged_events'::regclass and tgname = 'staged_events_check'
    ) then
        create trigger staged_events_check
        before insert on penstock.staged_events
        for each row execute function penstock.check_staged_event();
    end if;
end
$$;
comment on function penstock.guard_staged_events() is 'Part of what makes a stream encrypted: from then on staged_events takes no plain payload for one.';

create or replace function penstock.is_sealed_error(p_error jsonb)
returns boolean
language sql
immutable
parallel safe
as $$
    select jsonb_typeof(p_error) = 'object' and penstock.is_envelope(p_error - 'type')
$$;
comment on function penstock.is_sealed_error(jsonb) is
    'Whether an error is encrypted: its type is readable, and an envelope beside it has the message and the traceback.';

create or replace function penstock.is_sealed(p_name text, p_data jsonb, p_errors jsonb, p_more jsonb, p_log jsonb)
returns boolean
language sql
stable
as $$
    -- In a type that never was encrypted, a document that looks like an envelope is an ordinary document. The type of a subscriber may be gone.
    select coalesce((select jobs.encrypted_at is not null from penstock.jobs where jobs.name = p_name), true)
        and (
            penstock.is_envelope(p_data)
            or penstock.is_envelope(p_more)
            or exists (
                select
                from jsonb_array_elements(coalesce(case when jsonb_typeof(p_errors) = 'array' then p_errors end, '[]') || coalesce(p_log, '[]')) as entry
                where jsonb_typeof(entry) = 'object' and entry ? 'penstock'
            )
        )
$$;
comment on function penstock.is_sealed(text, jsonb, jsonb, jsonb, jsonb) is 'Part of find_jobs: whether something of a job is encrypted.';

create or replace function penstock.without_plain(p_detail jsonb)
returns jsonb
language sql
immutable
parallel safe
as $$
    select case
        when penstock.is_envelope(p_detail) or penstock.is_sealed_error(p_detail) then p_detail
        when jsonb_typeof(p_detail -> 'type') = 'string' and p_detail ? 'message' then jsonb_build_object(
            'type', p_detail -> 'type',
            'message', 'not stored: it was sent without encryption, and the job type is encrypted'
        )
    end
$$;
comment on function penstock.without_plain(jsonb) is
    'What is stored of a result or an error of an encrypted job type: an envelope as it is, of an error that is none its type, of a result that is none nothing.';

create or replace function penstock.log_line(p_text text, p_encrypted boolean)
returns jsonb
language plpgsql
immutable
as $$
declare
    envelope jsonb;
begin
    if not p_encrypted then
        return jsonb_build_object('line', left(p_text, 1000));
    end if;
    if starts_with(p_text, '{"penstock":') and length(p_text) <= 8192 then
        envelope := p_text::jsonb;
        if penstock.is_envelope(envelope) then
            return envelope;
        end if;
    end if;
    return '{"line": "not stored: it was sent without encryption, and the job type is encrypted"}';
exception
    when data_exception then
        return '{"line": "not stored: it was sent without encryption, and the job type is encrypted"}';
end
$$;
comment on function penstock.log_line(text, boolean) is
    'Part of append_log: a line as it is stored; of an encrypted job type an envelope, which has to be one.';

create or replace function penstock.any_encrypted(p_ids uuid[])
returns boolean
language plpgsql
stable
as $$
begin
    -- Without encrypted types this is one look into an empty index.
    if not exists (select from penstock.jobs where encrypted) then
        return false;
    end if;
    return exists (
        select
        from unnest(p_ids) as given (id)
        join penstock.queued_jobs as job on job.id = given.id
        join penstock.jobs on jobs.name = job.name
        where jobs.encrypted
    );
end
$$;
comment on function penstock.any_encrypted(uuid[]) is 'Part of settle and report_progress: whether one of these jobs is of an encrypted type.';

create or replace function penstock.sealed_details(p_ids uuid[], p_details jsonb[], p_outcomes text[] default null)
returns jsonb[]
language sql
stable
as $$
    select array_agg(
        -- The name of a step is no payload.
        case
            when type.encrypted and given.outcome is distinct from 'suspended' then penstock.without_plain(given.detail)
            else given.detail
        end
        order by given.place
    )
    from unnest(p_ids, p_details, p_outcomes) with ordinality as given (id, detail, outcome, place)
    left join penstock.queued_jobs as job on job.id = given.id
    left join penstock.jobs as type on type.name = job.name
$$;
comment on function penstock.sealed_details(uuid[], jsonb[], text[]) is
    'Part of settle, finish and report_progress: the details of these jobs, without what may not be stored of those of encrypted types.';

create or replace function penstock.check_staged_job()
returns trigger
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    fits boolean;
begin
    if exists (select from penstock.jobs where jobs.name = new.name and jobs.encrypted) then
        begin
            fits := penstock.is_envelope(new.data::jsonb);
        exception
            when data_exception then
                fits := false;
        end;
        if not fits then
            perform penstock.refuse_plain('job type ' || new.name, array['null'::jsonb]);
        end if;
    end if;
    return new;
end
$$;
comment on function penstock.check_staged_job() is
    'Trigger of staged_jobs: refuses a row that an encrypted job type does not take, before it is written anywhere.';

create or replace function penstock.guard_staged_jobs()
returns void
language plpgsql
as $$
begin
    -- A trigger costs each staged row a little, so it is made with the first encrypted type.
    perform pg_advisory_xact_lock(hashtext('penstock.guard_staged_jobs'));
    if not exists (
        select from pg_trigger where tgrelid = 'penstock.staged_jobs'::regclass and tgname = 'staged_jobs_check'
    ) then
        create trigger staged_jobs_check
        before insert on penstock.staged_jobs
        for each row execute function penstock.check_staged_job();
    end if;
end
$$;
comment on function penstock.guard_staged_jobs() is 'Part of what makes a job type encrypted: from then on staged_jobs takes no plain document for one.';

create or replace function penstock.is_locked(job penstock.queued_jobs, p_key_id text, p_owner text)
returns boolean
language sql
stable
as $$
    -- In a pool the member that counts is the owner of the key.
    select coalesce(bool_and(case when p_key_id is null then one.key_ids = '{}' else p_key_id <> all (one.key_ids) end), false)
    from (
        select live.key_ids
        from penstock.workers as live
        where p_owner is null and live.seen_at > penstock.clock() - live.dead_after
            and (job.name = any (live.names) or live.no_key ? job.name)
        union all
        select members.key_ids from penstock.members where members.group_name = job.name and members.id = p_owner
    ) as one
$$;
comment on function penstock.is_locked(penstock.queued_jobs, text, text) is
    'Part of why: whether the live workers of an encrypted type lack the key of a job (null: any key). p_owner: the owner of its key in a pool.';
