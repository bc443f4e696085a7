-- Erasure: what belongs to the key or to the value, and which payloads cannot be seen.

create or replace function penstock.unseen_payloads()
returns text[]
language sql
stable
as $$
    select array(
        select 'job type ' || jobs.name from penstock.jobs where jobs.encrypted_at is not null and jobs.topic is null
        union all
        select 'topic ' || topics.name from penstock.topics where topics.encrypted_at is not null
        union all
        select 'stream ' || streams.name from penstock.streams where streams.encrypted_at is not null or streams.format = 'bytes'
        order by 1
    )
$$;
comment on function penstock.unseen_payloads() is
    'Part of preview_erasure and start_erasure: the job types, topics and streams with payloads of which the database sees no field, since they are encrypted or bytes.';

create or replace function penstock.refuse_unseen(p_subject jsonb)
returns void
language plpgsql
stable
as $$
declare
    unseen constant text[] := case when p_subject ? 'field' then penstock.unseen_payloads() else '{}' end;
begin
    if cardinality(unseen) > 0 and not coalesce((p_subject ->> 'skip_unseen')::boolean, false) then
        raise exception 'the fields of payloads cannot be seen, since they are encrypted or bytes, of %', left(array_to_string(unseen, ', '), 1000)
            using errcode = 'PS409', hint = 'Erase there by key. To erase by the field elsewhere: skip_unseen (--skip-unseen).';
    end if;
end
$$;
comment on function penstock.refuse_unseen(jsonb) is 'Part of start_erasure: PS409 when payloads cannot be seen by whose field is to be erased.';

create or replace function penstock.is_erased_by(p_subject jsonb, p_key text, p_data jsonb, p_message bigint, p_job uuid default null)
returns boolean
language sql
stable
as $$
    select coalesce(
        case
            when p_subject ? 'key' then p_key = p_subject ->> 'key'
            when p_subject ? 'job' then p_job = (p_subject ->> 'job')::uuid
            else coalesce(penstock.payload(p_message), p_data) #>> string_to_array(p_subject ->> 'field', '.') = p_subject ->> 'value'
        end,
        false
    )
$$;
comment on function penstock.is_erased_by(jsonb, text, jsonb, bigint, uuid) is
    'Part of erasures: whether a job with this key, payload and id belongs to what is to be erased. p_message: the message of which it is a copy.';

create or replace function penstock.mentions(p_text text, p_subject jsonb)
returns boolean
language sql
immutable
as $$
    -- Between two parts of the text around it there is neither a letter nor a digit on either side.
    select exists (
        select
        from (
            select split.part, lead(split.part) over (order by split.place) as following
            from unnest(string_to_array(p_text, coalesce(p_subject ->> 'key', p_subject ->> 'value', p_subject ->> 'job'))) with ordinality as split (part, place)
        ) as around
        where around.following is not null and right(around.part, 1) !~ '[[:alnum:]_]' and left(around.following, 1) !~ '[[:alnum:]_]'
    )
$$;
comment on function penstock.mentions(text, jsonb) is 'Part of erasures: whether a text has the key or the value as a word.';
