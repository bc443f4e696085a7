-- Derived ids: ids that a second try of the same thing has to find again, such as that of the run of a schedule for one of its times.
--
-- Such an id is the hash of what it is for, under a secret of the database (penstock.id_secrets). So no role can enqueue a job under the
-- id before the job for which it is meant is there: neither stop that job, nor give its result. docs/decisions/0034-derived-ids.md lists all
-- derived ids. derived_ids is for the functions of the owner alone. What a role may ask for is bound to what is its own: to the lease that it
-- holds (child_ids), or to its name (own_ids).
--
-- The hash is NMAC with SHA-256 (Bellare, Canetti, Krawczyk: Keying Hash Functions for Message Authentication, 1996), that is, HMAC with
-- two independent keys of the length of a block. SHA-256 is built in, and pgcrypto may be missing.

create or replace function penstock.renew_id_secret()
returns void
language sql
as $$
    -- gen_random_uuid draws from the strong random numbers of the server.
    with random as (
        select
            uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) as one,
            uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) as other
    )
    insert into penstock.id_secrets (made_at, inner_key, outer_key)
    select clock_timestamp(), random.one, random.other from random
$$;
comment on function penstock.renew_id_secret() is
    'Makes a new secret for derived ids, for the owner of the schema. What began before keeps its ids. See docs/decisions/0034-derived-ids.md.';

select penstock.renew_id_secret() where not exists (select from penstock.id_secrets);

create or replace function penstock.derived_ids(p_at timestamptz, p_texts text[])
returns uuid[]
language sql
stable
set search_path = penstock, pg_temp
as $$
    with secret as materialized (
        select known.inner_key, known.outer_key
        from penstock.id_secrets as known
        -- That of the time; of a time before all of them the first one.
        order by
            known.made_at > coalesce(p_at, 'infinity'),
            case when known.made_at <= coalesce(p_at, 'infinity') then known.made_at end desc,
            known.made_at
        limit 1
    )
    select array_agg(
        (
            case
                when p_at is null then left(hashed.hash, 12) || '8'
                else lpad(to_hex(floor(extract(epoch from p_at) * 1000)::bigint), 12, '0') || '7'
            end || substr(hashed.hash, 13, 3) || '8' || substr(hashed.hash, 17, 15)
        )::uuid
        order by hashed.place
    )
    from (
        select given.place, encode(sha256(secret.outer_key || sha256(secret.inner_key || convert_to(given.text, 'UTF8'))), 'hex') as hash
        from unnest(p_texts) with ordinality as given (text, place)
        cross join secret
    ) as hashed
$$;
comment on function penstock.derived_ids(timestamptz, text[]) is
    'The ids that follow from texts, under the secret of the database: UUIDv7 of the time p_at, or UUIDv8 when it is null. A text begins with the kind of what the id is for.';

create or replace function penstock.own_ids(p_purpose text, p_texts text[])
returns uuid[]
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_size(cardinality(p_texts), 10000, 'texts');
    perform penstock.check_lists(array[array_dims(p_texts)]);
    if p_purpose is null or length(p_purpose) not between 1 and 100 or array_position(p_texts, null) is not null then
        raise exception 'a derived id needs a purpose of 1 to 100 characters, and a text'
            using errcode = 'PS400', hint = 'For example: select penstock.own_ids(''imports'', array[''orders.csv, line 1'']);';
    end if;
    return penstock.derived_ids(
        null,
        array(
            select 'own ' || jsonb_build_array(session_user, p_purpose, given.text)::text
            from unnest(p_texts) with ordinality as given (text, place)
            order by given.place
        )
    );
end
$$;
comment on function penstock.own_ids(text, text[]) is
    'Ids that follow from texts, the same for each call of the same role: for jobs that a repeated enqueue has to meet again, although their names can be guessed. Another role gets other ids, so it cannot take these. p_purpose keeps those of several programs apart.';
