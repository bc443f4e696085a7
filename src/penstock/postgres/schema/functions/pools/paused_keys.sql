-- Paused keys: the jobs of a key wait while those of all other keys go on. tables/0005_pools.sql says how a claim learns of them.
--
-- A worker claims jobs of a key ahead. So a pause also tells the worker that owns the key, which releases those that it has not started.

create or replace function penstock.tell_owner(p_name text, p_key text, p_what text)
returns void
language plpgsql
as $$
declare
    owner_of_key text;
begin
    select slots.owner into owner_of_key
    from penstock.slots
    where slots.group_name = p_name and slots.slot = penstock.slot_of_key(p_name, p_key);
    if owner_of_key is not null then
        perform penstock.tell(owner_of_key, p_what, p_name);
    end if;
end
$$;
comment on function penstock.tell_owner(text, text, text) is 'Part of pause_key and resume_key: notifies the worker that owns a key.';

create or replace function penstock.pause_key(p_name text, p_key text)
returns timestamptz
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    since timestamptz;
begin
    perform penstock.require_pool(p_name);
    if p_key is null or not penstock.is_key(p_key) then
        raise exception 'invalid key %', coalesce(quote_literal(left(p_key, 100)), 'null')
            using errcode = 'PS400', hint = 'A key has 1 to 255 characters and no control characters.';
    end if;
    perform from penstock.pools where name = p_name for no key update;
    select paused_at into since from penstock.paused_keys where name = p_name and key = p_key;
    if found then
        return since;
    end if;
    since := penstock.clock();
    insert into penstock.paused_keys (name, key, paused_at) values (p_name, p_key, since);
    update penstock.pools set keys_paused = true where name = p_name and not keys_paused;
    perform penstock.tell_owner(p_name, p_key, 'paused');
    return since;
end
$$;
comment on function penstock.pause_key(text, text) is
    'No job of the key is claimed until resume_key; running jobs go on, and its standing job too. Jobs that its worker claimed ahead and has not started go back to their places. Idempotent. Returns since when it is paused.';

create or replace function penstock.resume_key(p_name text, p_key text)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.require_pool(p_name);
    perform from penstock.pools where name = p_name for no key update;
    delete from penstock.paused_keys where name = p_name and key = p_key;
    if not found then
        return false;
    end if;
    update penstock.pools
    set keys_paused = false
    where name = p_name and not exists (select from penstock.paused_keys where paused_keys.name = p_name);
    perform penstock.tell_owner(p_name, p_key, 'keys');
    return true;
end
$$;
comment on function penstock.resume_key(text, text) is 'Ends the pause of a key. False when it was not paused.';

create or replace function penstock.paused_keys_of(p_name text, p_after text default null, p_limit integer default 100)
returns table (key text, paused_at timestamptz, jobs bigint)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
begin
    perform penstock.check_limit(p_limit, 1000);
    perform penstock.require_pool(p_name);
    return query
    select paused.key, paused.paused_at, (select count(*) from penstock.jobs_of_key(p_name, paused.key, 10000))
    from penstock.paused_keys as paused
    where paused.name = p_name and (p_after is null or paused.key > p_after)
    order by paused.key
    limit p_limit;
end
$$;
comment on function penstock.paused_keys_of(text, text, integer) is
    'The paused keys of a pool, by key, from p_after on: since when, and how many jobs are there (at most 10,000 are counted).';

create or replace function penstock.paused_keys_held(p_name text, p_member text)
returns text[]
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
begin
    if not exists (select from penstock.pools where name = p_name and keys_paused) then
        return null;
    end if;
    return (
        select array_agg(distinct job.key)
        from penstock.leases
        cross join unnest(leases.jobs) as held (id)
        join penstock.queued_jobs as job on job.id = held.id
        where leases.worker = p_member
            and leases.name = p_name
            and job.lease = leases.id
            and exists (select from penstock.paused_keys as paused where paused.name = p_name and paused.key = job.key)
    );
end
$$;
comment on function penstock.paused_keys_held(text, text) is
    'Paused keys of which a member has jobs: it releases those that it has not started. A notification tells it to ask.';
