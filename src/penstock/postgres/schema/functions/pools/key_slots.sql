-- The slot of a key: by the jump consistent hash, or, with a rule of the application, a slot for each key.

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
    'Part of enqueue_many, claim_keys and the changes of standing jobs: the slots of these keys when the job type is a pool, otherwise null. PS400 when a job has no key or a priority.';

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
