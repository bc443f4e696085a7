-- Pools: their declaration and options. The heads of tables/0004_groups.sql and 0005_pools.sql explain them; claim_keys.sql has the
-- claim.

create or replace function penstock.require_pool(p_name text)
returns penstock.pools
language plpgsql
stable
as $$
declare
    pool penstock.pools;
begin
    select * into pool from penstock.pools where name = p_name;
    if not found then
        raise exception 'no such pool: %', left(p_name, 100)
            using errcode = 'PS404', hint = format('Create it first: select penstock.declare_pool(%L);', left(p_name, 200));
    end if;
    return pool;
end
$$;
comment on function penstock.require_pool(text) is 'The pool of that name, or PS404.';

create or replace function penstock.check_pool_options(p_options jsonb)
returns void
language plpgsql
as $$
begin
    perform penstock.check_options(
        p_options,
        array['slots', 'assignor', 'on_retry', 'key_concurrency', 'key_rate_limit', 'key_rate_period', 'key_max_waiting', 'weights'],
        '{"slots": 256, "on_retry": "block"}'
    );
end
$$;
comment on function penstock.check_pool_options(jsonb) is 'Part of declare_pool and convert_to_pool: raises PS400 for options that a pool does not have.';

create or replace function penstock.check_kind(p_name text)
returns void
language plpgsql
as $$
declare
    job_type penstock.jobs;
begin
    if exists (select from penstock.pools where name = p_name) then
        return;
    end if;
    perform penstock.lock_kind(p_name);
    select * into job_type from penstock.jobs where name = p_name;
    if not found or exists (select from penstock.pools where name = p_name) then
        return;
    end if;
    if job_type.topic is not null then
        raise exception '% is the queue of a subscriber', p_name
            using errcode = 'PS409', hint = 'Give the pool another name.';
    end if;
    raise exception '% is a plain job type, and a declaration does not make a pool of it', p_name
        using errcode = 'PS409',
              hint = format('Give the pool another name, or let an administrator turn the type into a pool: penstock pools create %s --convert, or select penstock.convert_to_pool(%L);', p_name, p_name);
end
$$;
comment on function penstock.check_kind(text) is 'Part of declare_pool: raises PS409 when a plain job type has the name.';

create or replace function penstock.check_key_limits(pool penstock.pools)
returns void
language plpgsql
immutable
as $$
begin
    if pool.on_retry not in ('block', 'skip') or pool.key_concurrency not between 1 and 10000
        or num_nulls(pool.on_retry, pool.key_concurrency) > 0
        or (pool.key_rate_limit is null) <> (pool.key_rate_period is null)
        or pool.key_rate_limit < 1
        or pool.key_max_waiting < 1
        or pool.key_rate_period not between interval '10 milliseconds' and interval '31 days'
    then
        raise check_violation using message = 'out of range';
    end if;
end
$$;
comment on function penstock.check_key_limits(penstock.pools) is
    'Part of declare_pool and change_pool: raises check_violation for options of a pool that are out of range.';

create or replace function penstock.put_pool(p_name text, p_options jsonb)
returns penstock.pools
language plpgsql
as $$
declare
    pool penstock.pools;
    fresh boolean;
begin
    begin
        perform penstock.declare_group(
            p_name, coalesce((p_options ->> 'slots')::integer, 256), coalesce(p_options ->> 'assignor', 'sticky')
        );
        pool := jsonb_populate_record(
            jsonb_populate_record(
                null::penstock.pools,
                jsonb_build_object('name', p_name, 'on_retry', 'block', 'key_concurrency', 1, 'keys_paused', false, 'created_at', penstock.clock())
            ),
            p_options - 'slots' - 'assignor' - 'weights'
        );
        perform penstock.check_key_limits(pool);
        pool.declaration := p_options;
        insert into penstock.pools select pool.* on conflict (name) do nothing;
        fresh := found;
        if not fresh then
            update penstock.pools
            set on_retry = pool.on_retry,
                key_concurrency = pool.key_concurrency,
                key_rate_limit = pool.key_rate_limit,
                key_rate_period = pool.key_rate_period,
                key_max_waiting = pool.key_max_waiting,
                declaration = p_options
            where pools.name = p_name and pools.declaration is distinct from p_options;
            fresh := found;
        end if;
        if fresh and p_options ? 'weights' then
            delete from penstock.key_weights where key_weights.name = p_name;
            insert into penstock.key_weights (name, key, weight)
            select p_name, given.key, given.value::integer from jsonb_each_text(p_options -> 'weights') as given;
        end if;
    exception
        when data_exception or check_violation or not_null_violation then
            raise exception 'invalid options %: %', left(p_options::text, 200), sqlerrm
                using errcode = 'PS400',
                      hint = 'on_retry is block or skip, key_concurrency 1 to 10,000; key_rate_limit and key_rate_period go together; key_max_waiting is at least 1; a weight is 1 to 1,000.';
    end;
    select * into pool from penstock.pools where name = p_name;
    return pool;
end
$$;
comment on function penstock.put_pool(text, jsonb) is 'Part of declare_pool and convert_to_pool: the group and the row of a pool whose job type is there.';

create or replace function penstock.declare_pool(
    p_name text, p_options jsonb default '{}', p_type_options jsonb default '{}', p_again boolean default true
)
returns penstock.pools
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_pool_options(p_options);
    perform penstock.check_name(p_name);
    perform penstock.check_kind(p_name);
    perform penstock.declare_job_type(p_name, p_type_options, p_again);
    return penstock.put_pool(p_name, p_options);
end
$$;
comment on function penstock.declare_pool(text, jsonb, jsonb, boolean) is
    'What an application does at start: creates the pool, its job type and its group, or changes them when the declaration differs from the last one. A plain job type of that name stays what it is: PS409. Options: slots (when it is new), assignor, on_retry, key_concurrency, key_rate_limit, key_rate_period, key_max_waiting, weights ({"key": 3}). p_again false: a pool that was dropped is not created again (PS404).';

create or replace function penstock.convert_to_pool(p_name text, p_options jsonb default '{}', p_type_options jsonb default '{}')
returns penstock.pools
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    job_type penstock.jobs;
begin
    perform penstock.check_pool_options(p_options);
    perform penstock.lock_kind(p_name);
    job_type := penstock.require_type(p_name);
    if job_type.topic is not null then
        raise exception '% is the queue of a subscriber', p_name
            using errcode = 'PS409', hint = 'Its copies can be forwarded to a pool of another name.';
    end if;
    if exists (select from penstock.pools where name = p_name) then
        raise exception '% is a pool already', p_name
            using errcode = 'PS409', hint = 'Change it with penstock.change_pool.';
    end if;
    if p_type_options <> '{}' then
        perform penstock.change_job_type(p_name, p_type_options);
    end if;
    return penstock.put_pool(p_name, p_options);
end
$$;
comment on function penstock.convert_to_pool(text, jsonb, jsonb) is
    'Turns a plain job type, with its jobs, into a pool: from now on each job needs a key, and only members of the pool work on it. A job without a key that waits becomes its own key. Options: see declare_pool; p_type_options: those of the job type to change.';

create or replace function penstock.set_weight(p_name text, p_key text, p_weight integer)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.require_pool(p_name);
    if p_key is null or p_weight is null or p_weight not between 1 and 1000 then
        raise exception 'invalid weight: %', coalesce(p_weight::text, 'null')
            using errcode = 'PS400', hint = 'A weight is 1 (like every key) to 1,000.';
    end if;
    if p_weight = 1 then
        delete from penstock.key_weights where name = p_name and key = p_key;
    else
        insert into penstock.key_weights values (p_name, p_key, p_weight)
        on conflict (name, key) do update set weight = excluded.weight;
    end if;
end
$$;
comment on function penstock.set_weight(text, text, integer) is 'How many jobs a key gets in each of its turns: 1 to 1,000.';
