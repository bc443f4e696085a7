-- Pools: their declaration, keys and slots; claim_keys.sql has the claim. The heads of tables/0004_groups.sql and 0005_pools.sql explain
-- them.

create or replace function penstock.key_hash(p_key text)
returns bigint
language sql
immutable
strict
parallel safe
as $$
    select ('x' || encode(substr(sha256(convert_to(p_key, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint
$$;
comment on function penstock.key_hash(text) is 'The 64-bit hash of a key: the first eight bytes of its SHA-256.';

create or replace function penstock.jump_hash(p_key bigint, p_buckets integer)
returns integer
language plpgsql
immutable
strict
parallel safe
as $$
declare
    -- The key modulo 2^64 in two halves. 2862933555777941757 is 666578662 * 2^32 + 2276503805.
    high bigint := (p_key >> 32) & 4294967295;
    low bigint := p_key & 4294967295;
    products bigint;
    bucket bigint := -1;
    candidate bigint := 0;
begin
    if p_buckets < 1 then
        raise exception 'cannot hash into % buckets', p_buckets
            using errcode = 'PS400', hint = 'There must be at least one.';
    end if;
    while candidate < p_buckets loop
        bucket := candidate;
        -- key * 2862933555777941757 + 1 without passing 63 bits: the low half in pieces of 16 bits, and of the high half only
        -- what is left modulo 2^32, for which 2276503805 may be taken as 2276503805 - 2^32.
        products := (low & 65535) * 2276503805 + 1 + ((((low >> 16) * 2276503805) & 65535) << 16);
        high := ((products >> 32) + (((low >> 16) * 2276503805) >> 16) + high * -2018463491 + low * 666578662) & 4294967295;
        low := products & 4294967295;
        candidate := floor((bucket + 1) * (2147483648::double precision / ((high >> 1) + 1)))::bigint;
    end loop;
    return bucket::integer;
end
$$;
comment on function penstock.jump_hash(bigint, integer) is
    'Jump consistent hash of a 64-bit key into buckets 0 to p_buckets - 1. Lamping and Veach, 2014, arXiv:1406.2294.';

create or replace function penstock.slot_of(p_key text, p_slots integer)
returns integer
language sql
immutable
strict
parallel safe
as $$
    select penstock.jump_hash(penstock.key_hash(p_key), p_slots)
$$;
comment on function penstock.slot_of(text, integer) is 'The slot of a key in a group of so many slots.';

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
    -- A transaction that creates a plain type of this name takes the lock too, so that none appears before this transaction ends.
    perform pg_advisory_xact_lock(hashtext('penstock.kind'), hashtext(p_name));
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

create or replace function penstock.declare_pool(p_name text, p_options jsonb default '{}', p_type_options jsonb default '{}')
returns penstock.pools
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_pool_options(p_options);
    perform penstock.check_name(p_name);
    perform penstock.check_kind(p_name);
    perform penstock.declare_job_type(p_name, p_type_options);
    return penstock.put_pool(p_name, p_options);
end
$$;
comment on function penstock.declare_pool(text, jsonb, jsonb) is
    'What an application does at start: creates the pool, its job type and its group, or changes them when the declaration differs from the last one. A plain job type of that name stays what it is: PS409. Options: slots (when it is new), assignor, on_retry, key_concurrency, key_rate_limit, key_rate_period, weights ({"key": 3}).';

create or replace function penstock.convert_to_pool(p_name text, p_options jsonb default '{}')
returns penstock.pools
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    job_type penstock.jobs;
begin
    perform penstock.check_pool_options(p_options);
    perform pg_advisory_xact_lock(hashtext('penstock.kind'), hashtext(p_name));
    job_type := penstock.require_type(p_name);
    if job_type.topic is not null then
        raise exception '% is the queue of a subscriber', p_name
            using errcode = 'PS409', hint = 'Its copies can be forwarded to a pool of another name.';
    end if;
    if exists (select from penstock.pools where name = p_name) then
        raise exception '% is a pool already', p_name
            using errcode = 'PS409', hint = 'Change it with penstock.change_pool.';
    end if;
    return penstock.put_pool(p_name, p_options);
end
$$;
comment on function penstock.convert_to_pool(text, jsonb) is
    'Turns a plain job type, with its jobs, into a pool: from now on each job needs a key, and only members of the pool work on it. A job without a key that waits becomes its own key. Options: see declare_pool.';

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

create or replace function penstock.slots_for(p_name text, p_keys text[], p_priorities smallint[])
returns integer[]
language plpgsql
as $$
declare
    of_group penstock.groups;
    member text;
begin
    if not exists (select from penstock.pools where name = p_name) then
        return null;
    end if;
    if p_keys is null or array_position(p_keys, null) is not null then
        raise exception 'a job for the pool % has no key', p_name
            using errcode = 'PS400', hint = 'Say whose job it is: key="acme" in Python, --key acme on the command line, p_key => ''acme'' in SQL.';
    end if;
    if exists (select from unnest(p_priorities) as given (priority) where given.priority <> 0) then
        raise exception 'a job for the pool % has a priority', p_name
            using errcode = 'PS400', hint = 'Jobs of a key run in the order in which they came; keys take turns, with weights.';
    end if;
    -- Enqueues share this lock. A resize takes it exclusively, so that no job is written to an old slot meanwhile.
    perform pg_advisory_xact_lock_shared(hashtext('penstock.slots'), hashtext(p_name));
    select * into of_group from penstock.groups where name = p_name;
    if of_group.assignor <> 'custom' then
        if cardinality(p_keys) = 1 then
            return array[penstock.slot_of(p_keys[1], of_group.slots)];
        end if;
        return array(
            with each as materialized (
                select once.key, penstock.slot_of(once.key, of_group.slots) as slot
                from (select distinct given.key from unnest(p_keys) as given (key)) as once
            )
            select each.slot
            from unnest(p_keys) with ordinality as given (key, place)
            join each on each.key = given.key
            order by given.place
        );
    end if;
    insert into penstock.slots (group_name, slot, key, changed_at)
    select p_name, nextval('penstock.slot_number'), once.key, penstock.clock()
    from (select distinct given.key from unnest(p_keys) as given (key) order by 1) as once
    where not exists (select from penstock.slots where slots.group_name = p_name and slots.key = once.key)
    on conflict do nothing;
    if found then
        -- A worker has to place the keys; two are notified, since one may have crashed.
        for member in select id from penstock.members where group_name = p_name order by age limit 2 loop
            perform penstock.tell_member(p_name, member);
        end loop;
    end if;
    return array(
        select slots.slot
        from unnest(p_keys) with ordinality as given (key, place)
        join penstock.slots on slots.group_name = p_name and slots.key = given.key
        order by given.place
    );
end
$$;
comment on function penstock.slots_for(text, text[], smallint[]) is
    'Part of enqueue: the slots of these keys when the job type is a pool, otherwise null. PS400 when a job has no key or a priority.';

create or replace function penstock.adopt_unplaced(p_name text)
returns integer
language plpgsql
as $$
declare
    adopted integer;
begin
    update penstock.queued_jobs as job
    set key = coalesce(job.key, job.id::text),
        -- Its unique key applied to the whole type; another job of its key may have the same one now.
        coalesces = false,
        slot = (penstock.slots_for(p_name, array[coalesce(job.key, job.id::text)], null))[1]
    where job.ctid = any (array(
        select unplaced.ctid
        from penstock.queued_jobs as unplaced
        where unplaced.name = p_name and unplaced.slot is null and unplaced.seq is not null and unplaced.status = 'queued'
        order by unplaced.priority, unplaced.seq
        limit 10000
        for update skip locked
    ));
    get diagnostics adopted = row_count;
    return adopted;
end
$$;
comment on function penstock.adopt_unplaced(text) is
    'Part of claim_keys: jobs that were enqueued before their type became a pool get a slot, 10,000 in a call; one without a key becomes its own key.';

create or replace function penstock.is_busy(p_group text, p_slot integer)
returns boolean
language sql
stable
as $$
    select exists (
        select
        from penstock.leases
        cross join unnest(leases.jobs) as held (id)
        join penstock.queued_jobs as job on job.id = held.id
        where leases.name = p_group and job.slot = p_slot and job.status = 'in-progress'
    ) or exists (
        select from penstock.standing_jobs where name = p_group and slot = p_slot and running_by is not null
    )
$$;
comment on function penstock.is_busy(text, integer) is 'Whether jobs or standing jobs of a slot are running.';

create or replace function penstock.end_slots(p_group text, p_member text, p_slots integer[], p_error jsonb)
returns integer
language plpgsql
as $$
declare
    ids uuid[];
    attempts smallint[];
    leases bigint[];
begin
    if p_slots is null then
        perform penstock.lose_standing(p_group, p_member);
    end if;
    update penstock.standing_jobs
    set running_by = null,
        running_epoch = null,
        tried_with = null
    where name = p_group and running_by = p_member and (p_slots is null or slot = any (p_slots));
    delete from penstock.standing_jobs
    where name = p_group and not wanted and running_by is null;
    -- A job that another transaction has locked, such as one that finishes it, holds its key until that ends.
    select array_agg(job.id), array_agg(job.attempt), array_agg(job.lease)
    into ids, attempts, leases
    from (
        select job.id, job.attempt, job.lease
        from penstock.leases as lease
        cross join unnest(lease.jobs) as held (id)
        join penstock.queued_jobs as job on job.id = held.id
        where lease.worker = p_member
            and lease.name = p_group
            and job.lease = lease.id
            and job.status = 'in-progress'
            and (p_slots is null or job.slot = any (p_slots))
        for update of job skip locked
    ) as job;
    if ids is null then
        return 0;
    end if;
    perform penstock.ensure_archive(penstock.clock());
    return (
        select count(*)
        from penstock.end_attempts(
            ids, attempts, leases,
            array_fill(case p_error ->> 'type' when 'SlotMoved' then 'moved' else 'lost' end, array[cardinality(ids)]),
            array_fill(p_error, array[cardinality(ids)]), array_fill(interval '0', array[cardinality(ids)]), penstock.clock()
        )
    );
end
$$;
comment on function penstock.end_slots(text, text, integer[], jsonb) is
    'Part of end_owned_work: ends as failed what a member has in progress in slots (null: in all), to be retried from its place by the next owner.';

create or replace function penstock.lock_slots(p_name text)
returns void
language plpgsql
set lock_timeout = '3s'
as $$
begin
    perform pg_advisory_xact_lock(hashtext('penstock.slots'), hashtext(p_name));
end
$$;
comment on function penstock.lock_slots(text) is
    'Part of resize_pool: keeps enqueues out of the slots of a pool until the transaction ends. 55P03 when another transaction holds it up for 3 seconds.';

create or replace function penstock.resize_pool(p_name text, p_slots integer)
returns penstock.groups
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    resized penstock.groups;
    moment constant timestamptz := penstock.clock();
    member text;
begin
    perform penstock.require_pool(p_name);
    if p_slots is null or p_slots not between 1 and 65536 then
        raise exception 'invalid number of slots: %', coalesce(p_slots::text, 'null')
            using errcode = 'PS400', hint = 'A pool has 1 to 65,536 slots.';
    end if;
    -- Enqueues that are under way finish first, and new ones wait. The resize fails when a transaction blocks it for longer.
    perform penstock.lock_slots(p_name);
    resized := penstock.lock_group(p_name);
    if resized.assignor = 'custom' or p_slots < resized.slots then
        raise exception 'pool % cannot have % slots', p_name, p_slots
            using errcode = 'PS409',
                  hint = format('The number of slots can only grow (it is %s); a pool with a rule of its own has a slot for each key.', resized.slots);
    end if;
    if p_slots = resized.slots then
        return resized;
    end if;
    insert into penstock.slots (group_name, slot, changed_at)
    select p_name, number, moment from generate_series(resized.slots, p_slots - 1) as number;
    -- By the jump hash a key stays where it is or goes to a new slot. Its jobs in progress continue where they run; the
    -- new slot can be taken when they are done.
    with moved as (
        update penstock.queued_jobs as job
        set slot = penstock.slot_of(job.key, p_slots)
        where job.name = p_name
            and job.slot is not null
            and job.slot <> penstock.slot_of(job.key, p_slots)
        returning job.slot, job.status
    )
    update penstock.slots
    set settling = true
    where group_name = p_name and slot in (select moved.slot from moved where moved.status = 'in-progress');
    perform penstock.move_standing(p_name, p_slots);
    update penstock.groups
    set slots = p_slots,
        generation = generation + 1
    where name = p_name
    returning * into resized;
    for member in select id from penstock.members where group_name = p_name order by age limit 2 loop
        perform penstock.tell_member(p_name, member);
    end loop;
    return resized;
end
$$;
comment on function penstock.resize_pool(text, integer) is
    'Gives a live pool more slots; only keys that go to a new slot move. Then compute targets, or leave it to the members.';

create or replace function penstock.forget_keys(p_name text, p_idle interval default '1 hour')
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    forgotten integer;
begin
    perform penstock.check_span(p_idle, 'time for which keys are idle', '0', '3660 days');
    -- No transaction may write a job to such a slot meanwhile; when one does, a later call removes the slot.
    if not pg_try_advisory_xact_lock(hashtext('penstock.slots'), hashtext(p_name)) then
        return 0;
    end if;
    perform penstock.lock_group(p_name);
    delete from penstock.slots
    where group_name = p_name
        and key is not null
        and changed_at < penstock.clock() - p_idle
        and not exists (select from penstock.queued_jobs as job where job.name = p_name and job.slot = slots.slot)
        and not exists (select from penstock.standing_jobs as standing where standing.name = p_name and standing.slot = slots.slot);
    get diagnostics forgotten = row_count;
    return forgotten;
end
$$;
comment on function penstock.forget_keys(text, interval) is
    'In a pool with its own assign: removes the slots of keys that have no jobs and have not moved for p_idle. Returns how many.';

create or replace function penstock.cancelled_of(p_name text, p_member text)
returns uuid[]
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select array_agg(asked.job)
    from penstock.leases
    cross join unnest(leases.cancelled) as asked (job)
    where leases.worker = p_member and leases.name = p_name
$$;
comment on function penstock.cancelled_of(text, text) is 'Running jobs of a member whose cancellation was requested; a notification reports it too.';
