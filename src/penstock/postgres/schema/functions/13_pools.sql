-- Pools: keys, their slots, and the claim of the owner of a slot. The head of tables/0003_ownership.sql explains them.

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
        array['slots', 'assignor', 'on_retry', 'key_concurrency', 'key_rate_limit', 'key_rate_period', 'weights'],
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
    -- Held by whoever creates a type of this name too, so that what it is stays the same until this transaction ends.
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
              hint = format('Give the pool another name, or let an administrator turn the type into a pool: select penstock.convert_to_pool(%L);', p_name);
end
$$;
comment on function penstock.check_kind(text) is 'Part of declare_pool: raises PS409 for a job type that is there and is no pool.';

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
                jsonb_build_object('name', p_name, 'on_retry', 'block', 'key_concurrency', 1, 'created_at', penstock.clock())
            ),
            p_options - 'slots' - 'assignor' - 'weights'
        );
        if pool.on_retry not in ('block', 'skip') or pool.key_concurrency not between 1 and 10000
            or num_nulls(pool.on_retry, pool.key_concurrency) > 0
            or (pool.key_rate_limit is null) <> (pool.key_rate_period is null)
            or pool.key_rate_limit < 1
            or pool.key_rate_period not between interval '10 milliseconds' and interval '31 days'
        then
            raise check_violation using message = 'out of range';
        end if;
        pool.declaration := p_options;
        insert into penstock.pools select pool.* on conflict (name) do nothing;
        fresh := found;
        if not fresh then
            update penstock.pools
            set on_retry = pool.on_retry,
                key_concurrency = pool.key_concurrency,
                key_rate_limit = pool.key_rate_limit,
                key_rate_period = pool.key_rate_period,
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
                      hint = 'on_retry is block or skip, key_concurrency 1 to 10,000; key_rate_limit and key_rate_period go together; a weight is 1 to 1,000.';
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
            using errcode = 'PS400', hint = 'Say whose job it is: penstock.enqueue(''...'', ''...'', p_key => ''acme'').';
    end if;
    if exists (select from unnest(p_priorities) as given (priority) where given.priority <> 0) then
        raise exception 'a job for the pool % has a priority', p_name
            using errcode = 'PS400', hint = 'Jobs of a key run in the order in which they came; keys take turns, with weights.';
    end if;
    -- Shared with the other enqueues; a resize takes it alone, and so meets no job that is being put into an old slot.
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
        -- Somebody has to place them; two are told, since one may have died.
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

create or replace function penstock.wake_slots(p_name text, p_slots integer[])
returns void
language plpgsql
as $$
declare
    idle text;
begin
    for idle in
        select distinct waiting.member
        from penstock.idle_members as waiting
        where waiting.group_name = p_name
            and waiting.since > clock_timestamp() - interval '30 seconds'
            and exists (
                select from penstock.slots
                where slots.group_name = p_name
                    and slots.owner = waiting.member
                    and (p_slots is null or slots.slot = any (p_slots))
            )
    loop
        perform pg_notify('penstock_' || idle, 'keys ' || p_name);
    end loop;
end
$$;
comment on function penstock.wake_slots(text, integer[]) is 'Notifies the idle owners of these slots (null: of any) that there are jobs; does nothing when none is idle.';

create or replace function penstock.adopt_strays(p_name text)
returns integer
language plpgsql
as $$
declare
    adopted integer;
begin
    update penstock.queued_jobs as job
    set key = coalesce(job.key, job.id::text),
        -- Its unique key was one of the whole type; a job of its key may have the same by now.
        coalesces = false,
        slot = (penstock.slots_for(p_name, array[coalesce(job.key, job.id::text)], null))[1]
    where job.ctid = any (array(
        select stray.ctid
        from penstock.queued_jobs as stray
        where stray.name = p_name and stray.slot is null and stray.seq is not null and stray.status = 'queued'
        order by stray.priority, stray.seq
        limit 10000
        for update skip locked
    ));
    get diagnostics adopted = row_count;
    return adopted;
end
$$;
comment on function penstock.adopt_strays(text) is
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
set enable_seqscan = off
set enable_indexscan = off
set enable_indexonlyscan = off
set enable_hashjoin = off
set enable_mergejoin = off
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
    select array_agg(job.id), array_agg(job.attempts), array_agg(job.lease)
    into ids, attempts, leases
    from penstock.leases as lease
    cross join unnest(lease.jobs) as held (id)
    join penstock.queued_jobs as job on job.id = held.id
    where lease.worker = p_member
        and lease.name = p_group
        and job.lease = lease.id
        and job.status = 'in-progress'
        and (p_slots is null or job.slot = any (p_slots));
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
    'Part of vacate: ends as failed what a member has in progress in slots (null: in all), to be retried from its place by the next owner.';

create or replace function penstock.key_room(pool penstock.pools, p_key text, p_moment timestamptz)
returns integer
language plpgsql
as $$
declare
    room integer;
begin
    delete from penstock.key_starts
    where name = pool.name and key = p_key and ends_at <= p_moment - pool.key_rate_period;
    select pool.key_rate_limit - coalesce(sum(started), 0) into room
    from penstock.key_starts
    where name = pool.name and key = p_key;
    return room;
end
$$;
comment on function penstock.key_room(penstock.pools, text, timestamptz) is 'Part of claim_keys: how many jobs the rate limit of a key admits now.';

create or replace function penstock.claim_keys(
    p_member text,
    p_name text,
    p_slots integer[],
    p_epochs bigint[],
    p_limit integer,
    p_depth integer default 1,
    p_after_slot integer default null,
    p_after_key text default null,
    p_marks jsonb default '{}',
    p_turn_left integer default null
)
returns table (
    id uuid,
    name text,
    attempts smallint,
    max_attempts smallint,
    priority smallint,
    key text,
    data text,
    created_at timestamptz,
    run_after timestamptz,
    seq bigint,
    lease bigint,
    lease_s double precision,
    at_slot integer,
    at_key text,
    due_in_s double precision,
    turn_left integer,
    weights text
)
language plpgsql
security definer
set search_path = penstock, pg_temp
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    moment timestamptz := penstock.clock();
    -- A walk past this many keys and slots goes on in the next claim.
    longest_walk constant integer := 3000 + least(p_limit, 10000);
    job_type penstock.jobs;
    pool penstock.pools;
    owned integer[];
    midway boolean;
    resuming boolean;
    simple boolean;
    limited boolean;
    places integer;
    room integer;
    claimed integer;
    new_lease bigint;
    width interval;
    latest constant timestamptz := penstock.shown_time('infinity');
    earliest constant timestamptz := penstock.shown_time('-infinity');
begin
    perform penstock.check_size(greatest(cardinality(p_slots), cardinality(p_epochs)), 1000000, 'slots');
    if p_limit is null or p_limit not between 1 and 10000 or p_depth is null or p_depth not between 1 and 10000 then
        raise exception 'invalid limit or depth: %, %', p_limit, p_depth
            using errcode = 'PS400', hint = 'Claim between 1 and 10,000 jobs at once, and so many of each key.';
    end if;
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'claim_keys needs the isolation level read committed'
            using errcode = 'PS409', hint = 'Claim in a transaction of its own with the default isolation level.';
    end if;
    pool := penstock.require_pool(p_name);
    job_type := penstock.require_type(p_name);
    -- While it is held nobody can take slots of this member away, and with them end what is claimed here.
    perform from penstock.members where group_name = p_name and members.id = p_member for key share;
    if not found then
        raise exception '% is no member of pool %', left(p_member, 100), p_name
            using errcode = 'PS404', hint = 'It was evicted, or left: join again.';
    end if;
    if job_type.paused_at is not null or job_type.concurrency = 0 then
        return;
    end if;
    if exists (select from penstock.queued_jobs where expires_at <= moment and status = 'queued') then
        perform penstock.expire(1000);
    end if;
    if exists (
        select from penstock.queued_jobs as stray where stray.name = p_name and stray.slot is null and stray.seq is not null
    ) then
        perform penstock.adopt_strays(p_name);
        -- While some are left, or another claim adopts them at this moment, a later job of their keys would overtake them.
        if exists (
            select from penstock.queued_jobs as stray
            where stray.name = p_name and stray.slot is null and stray.seq is not null and stray.status = 'queued'
        ) then
            return;
        end if;
    end if;
    -- The ring begins where the last walk ended; the slot in which it ended comes once more at the end, for its first keys.
    select array_agg(mine.slot order by mine.slot < coalesce(p_after_slot, 0), mine.slot)
    into owned
    from unnest(penstock.still_owned(p_name, p_member, p_slots, p_epochs)) as mine (slot);
    if owned is null then
        return;
    end if;
    perform penstock.lock_limits(array[p_name]);
    moment := penstock.clock();
    limited := job_type.concurrency is not null or job_type.rate_limit is not null;
    if limited then
        places := penstock.admit(job_type, 1000000, moment);
        room := least(p_limit, penstock.fair_places(p_name, p_member, places));
        if room <= 0 then
            if places > 0 then
                perform penstock.pass_on_places(p_name, p_member, places, 0, 0, p_limit);
            end if;
            return;
        end if;
    else
        room := p_limit;
    end if;
    if exists (select from penstock.large_payloads where large_payloads.name = p_name) then
        -- Payloads have 2 MiB at most, so these have 32 MiB together.
        room := least(room, 16);
    end if;
    midway := coalesce(owned[1] = p_after_slot and p_after_key <> '', false);
    if midway then
        owned := owned || owned[1];
    end if;
    -- The turn that the last claim had no room for goes on first.
    resuming := midway and coalesce(p_turn_left > 0, false);
    simple := pool.key_concurrency = 1 and pool.key_rate_limit is null and p_marks = '{}';
    new_lease := nextval('penstock.lease_id');

    return query
    with recursive ring as (
        select 1 as place, case when midway then p_after_key else '' end as key, 0 as step,
            coalesce(head.startable, false)::integer as found, coalesce(head.startable, false) as startable,
            null::timestamptz as due, head.ctid as head, head.seq as head_seq, head.alive
        from (select) as start
        left join lateral (
            select
                job.ctid, job.seq,
                (job.status = 'queued' and job.run_after <= moment) or pool.key_concurrency > 1 or p_marks ? job.key as startable,
                job.expires_at is null or job.expires_at > moment as alive
            from penstock.queued_jobs as job
            where resuming
                and job.name = p_name
                and job.slot = owned[1]
                and job.seq is not null
                and job.key collate "C" = p_after_key
            order by job.seq
            limit 1
        ) as head on true
        union all
        select
            ring.place + (next.key is null)::integer,
            coalesce(next.key, ''),
            ring.step + 1,
            ring.found + coalesce(next.startable, false)::integer,
            coalesce(next.startable, false),
            next.due,
            next.head,
            next.head_seq,
            next.alive
        from ring
        left join lateral (
            select
                head.key,
                (head.status = 'queued' and head.run_after <= moment) or pool.key_concurrency > 1 or p_marks ? head.key as startable,
                case when head.status = 'queued' then head.run_after end as due,
                head.ctid as head,
                head.seq as head_seq,
                head.expires_at is null or head.expires_at > moment as alive
            from penstock.queued_jobs as head
            where head.name = p_name
                and head.slot = owned[ring.place]
                and head.seq is not null
                and head.key collate "C" > ring.key
                and not (
                    midway and ring.place = cardinality(owned)
                    and (head.key collate "C" > p_after_key or (resuming and head.key collate "C" = p_after_key))
                )
            order by head.key collate "C", head.seq
            limit 1
        ) as next on true
        where ring.place <= cardinality(owned)
            and ring.found < room
            and ring.step < longest_walk
    ),
    turns as (
        select
            ring.step as turn, owned[ring.place] as slot, ring.key, heavy.weight,
            -- No deeper than it takes to fill the room.
            least(p_depth, (room - 1) / count(*) over () + 1) * heavy.weight * pool.key_concurrency as most,
            ring.head, ring.head_seq, ring.alive
        from ring
        left join penstock.key_weights on key_weights.name = p_name and key_weights.key = ring.key
        cross join lateral (
            select case when ring.step = 0 then p_turn_left else coalesce(key_weights.weight, 1) end as weight
        ) as heavy
        where ring.startable
    ),
    lines as (
        -- Where a key gets one job, the walk has found it already.
        select turns.turn, turns.weight, turns.head as ctid, 1::bigint as nth, turns.alive as startable
        from turns
        where simple and turns.most = 1
        union all
        select
            turns.turn, turns.weight, line.ctid, line.nth,
            case
                when pool.key_concurrency > 1 then
                    line.startable and line.nth_startable <= pool.key_concurrency * p_depth - line.running
                else line.startable_until_here
            end as startable
        from turns
        cross join lateral (
            select
                job.ctid,
                row_number() over (order by job.seq) as nth,
                job.startable,
                bool_and(job.startable) over (order by job.seq) as startable_until_here,
                count(*) filter (where job.startable) over (order by job.seq) as nth_startable,
                count(*) filter (where job.running) over () as running
            from (
                select
                    each.ctid, each.seq,
                    each.status = 'in-progress' as running,
                    each.status = 'queued' and each.run_after <= moment
                        and (each.expires_at is null or each.expires_at > moment) as startable
                from penstock.queued_jobs as each
                where each.name = p_name
                    and each.slot = turns.slot
                    and each.seq is not null
                    and each.key collate "C" = turns.key
                    -- From the lowest number that can be seen, which the walk has found, and past nothing but what the caller has
                    -- in hand: whatever commits late is there to be taken before those that follow it.
                    and each.seq >= turns.head_seq
                    and (each.status = 'queued' or pool.key_concurrency > 1 or not p_marks ? turns.key)
                order by each.seq
                limit case when pool.key_rate_limit is null then turns.most
                    else greatest(0, least(turns.most, penstock.key_room(pool, turns.key, moment)))
                end
            ) as job
        ) as line
        where not (simple and turns.most = 1)
    ),
    ranked as (
        -- By rounds. A key gets the whole of its first turn, even if that is a little more than there is room for; only the
        -- limits of the type are never passed. A turn that they cut short goes on in the next claim.
        select
            placed.ctid, placed.turn, placed.nth, placed.round,
            placed.place <= room or (placed.round = 0 and job_type.concurrency is null and job_type.rate_limit is null) as taken
        from (
            select
                lines.ctid, lines.turn, lines.nth, (lines.nth - 1) / lines.weight as round,
                row_number() over (order by (lines.nth - 1) / lines.weight, lines.turn, lines.nth) as place
            from lines
            where lines.startable
        ) as placed
    ),
    chosen as (
        select ranked.ctid, ranked.turn, ranked.nth from ranked where ranked.taken
    ),
    locked as (
        select job.ctid, chosen.turn, chosen.nth
        from chosen
        join penstock.queued_jobs as job on job.ctid = chosen.ctid
        where job.status = 'queued'
        for update of job skip locked
    ),
    -- A job that somebody holds at this moment keeps those behind it waiting too.
    unbroken as (
        select ordered.ctid
        from (
            select locked.ctid, locked.nth, row_number() over (partition by locked.turn order by locked.nth) as place from locked
        ) as ordered
        where ordered.nth = ordered.place or pool.key_concurrency > 1
    ),
    claimed as (
        update penstock.queued_jobs as job
        set status = 'in-progress',
            lease = new_lease,
            updated_at = moment,
            coalesces = false
        where job.ctid = any (array(select unbroken.ctid from unbroken))
        returning
            job.id, job.name, job.attempts, job.max_attempts, job.priority, job.key, job.created_at, job.run_after, job.seq,
            job.lease, job.slot, job.data::text as text
    ),
    opened as (
        insert into penstock.leases (id, first_seq, last_seq, started_at, expires_at, open_jobs, priority, name, worker, jobs)
        select new_lease, min(claimed.seq), max(claimed.seq), moment, moment + job_type.visibility_timeout, count(*), 0, p_name,
            p_member, array_agg(claimed.id)
        from claimed
        having count(*) > 0
    ),
    counted as (
        insert into penstock.key_starts (name, key, ends_at, started)
        select p_name, claimed.key, date_bin(pool.key_rate_period / 100, moment, 'epoch') + pool.key_rate_period / 100, count(*)
        from claimed
        where pool.key_rate_limit is not null
        group by claimed.key
        on conflict (name, key, ends_at) do update set started = key_starts.started + excluded.started
    )
    select
        claimed.id, claimed.name, claimed.attempts, claimed.max_attempts, claimed.priority, claimed.key,
        case when octet_length(claimed.text) <= 4194304 then claimed.text end,
        greatest(least(claimed.created_at, latest), earliest), greatest(least(claimed.run_after, latest), earliest), claimed.seq, claimed.lease,
        extract(epoch from job_type.visibility_timeout)::double precision, claimed.slot, null::text, null::double precision,
        null::integer, null::text
    from claimed
    union all
    select
        null, null, null, null, null, null, null, null, null, null, null, null,
        owned[coalesce(cut_at.place, walked.place)],
        coalesce(cut_at.key, walked.key),
        extract(epoch from walked.due - moment)::double precision,
        cut.jobs,
        (select jsonb_object_agg(turns.key, turns.weight)::text from turns where turns.weight > 1)
    from (
        select
            (array_agg(ring.place order by ring.step desc))[1] as place,
            (array_agg(ring.key order by ring.step desc))[1] as key,
            min(case
                when ring.due > moment then ring.due
                when ring.startable and pool.key_rate_limit is not null then moment + pool.key_rate_period / 50
            end) as due
        from ring
    ) as walked
    left join (
        select ranked.turn, count(*)::integer as jobs
        from ranked
        where not ranked.taken and ranked.round = 0
        group by ranked.turn
        order by ranked.turn
        limit 1
    ) as cut on true
    left join ring as cut_at on cut_at.step = cut.turn;
    get diagnostics claimed = row_count;
    claimed := claimed - 1;
    if limited then
        perform penstock.pass_on_places(p_name, p_member, places, room, claimed, p_limit);
    end if;

    if claimed > 0 then
        if job_type.rate_limit is not null then
            width := job_type.rate_period / 100;
            insert into penstock.rate_windows (name, ends_at, started)
            values (p_name, date_bin(width, moment, 'epoch') + width, claimed)
            on conflict (name, ends_at) do update set started = rate_windows.started + excluded.started;
        end if;
        if pool.key_rate_limit is not null then
            -- Twice as many as were written: keys that never come again must not stay for ever.
            delete from penstock.key_starts
            where ctid = any (array(
                select old.ctid
                from penstock.key_starts as old
                where old.name = p_name and old.ends_at <= moment - pool.key_rate_period
                order by old.ends_at
                limit 2 * claimed
                for update skip locked
            ));
        end if;
        delete from penstock.idle_members where group_name = p_name and member = p_member;
    end if;
end
$$;
comment on function penstock.claim_keys(text, text, integer[], bigint[], integer, integer, integer, text, jsonb, integer) is
    'Claims up to p_limit jobs of a pool from slots that the member has under these epochs: of each key that is not busy up to p_depth (times its weight) from the front, keys in turn. p_marks ({"key": 1}) names keys of which the caller has jobs in hand, and after which it will start what it gets: of these too it gets the lowest numbers that are visible and not in progress. Job rows have their slot in at_slot. The last row has no id: it says where the walk ended (at_slot, at_key; null: it saw every key), to go on from there, and when a job that is waited for is due; turn_left: how many jobs the turn of at_key has left, to be given back as p_turn_left; weights: of the keys that have one.';

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
    'Part of resize_pool: keeps enqueues out of the slots of a pool until the transaction ends. 55P03 when somebody holds it up for 3 seconds.';

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
    -- Enqueues that are under way finish first, and new ones wait; whoever holds them up longer than this is left alone.
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
    -- By the jump hash a key stays where it is or goes to a new slot. What is in progress goes on where it runs; its
    -- new slot can be taken when that is done.
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
    -- Nobody may be putting a job into such a slot meanwhile; when somebody is, another time will do.
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
    'In a pool with a rule of its own: removes the slots of keys that have no jobs and have not moved for p_idle. Returns how many.';

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
comment on function penstock.cancelled_of(text, text) is 'Jobs in hand of a member that somebody asked to cancel; a notification says so too.';
