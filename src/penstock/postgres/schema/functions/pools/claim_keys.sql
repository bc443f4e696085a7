-- The claim of a pool: the owner of slots claims jobs of their keys, which take turns.
--
-- A claim has three steps. walk_keys walks over the ring of keys from where the last claim ended, by one probe of the index
-- (name, slot, key, seq) for each key: the jobs behind the first one of a key cost the other keys nothing. choose_of_keys looks into the
-- key queues that the walk found, and chooses jobs by rounds. claim_keys locks these, leaves out the jobs behind one that it cannot
-- lock, and opens the lease.
--
-- The steps are one statement, so they see one snapshot: between two statements the version of a job that the walk found could be
-- pruned, and its place in the table (ctid) given to another job. The planner inlines the first two functions, which are mere
-- queries, into that statement: they cost what they would cost there, and have the planner settings of claim_keys. So they must
-- stay `language sql stable` without settings of their own, and no argument of them may be a subquery or volatile. A query that
-- locks cannot be inlined; as a call that receives the jobs as arrays, it made a claim 3 % slower.

-- Long, since the first key of the ring and those after it are looked at by the same conditions, each in its own query.
create or replace function penstock.walk_keys(
    p_name text,
    p_slots integer[],
    p_after_key text,
    p_midway boolean,
    p_resuming boolean,
    p_longest integer,
    p_room integer,
    p_key_concurrency integer,
    p_held_keys jsonb,
    p_keys_paused boolean,
    p_moment timestamptz,
    p_sealed boolean,
    p_keys text[]
)
returns table (
    place integer, key text, step integer, found integer, startable boolean, due timestamptz, head tid, head_seq bigint, alive boolean
)
language sql
stable
as $$
    with recursive ring as (
        select 1 as place, case when p_midway then p_after_key else '' end as key, 0 as step,
            coalesce(head.startable, false)::integer as found, coalesce(head.startable, false) as startable,
            null::timestamptz as due, head.ctid as head, head.seq as head_seq, head.alive
        from (select) as start
        left join lateral (
            select
                job.ctid, job.seq,
                (
                    (
                        job.status = 'queued' and job.run_after <= p_moment
                        and (not p_sealed or penstock.has_key_for(job.data, job.message, p_keys))
                    )
                    or p_key_concurrency > 1
                    or p_held_keys ? job.key
                )
                    and not (
                        p_keys_paused
                        and exists (select from penstock.paused_keys as paused where paused.name = p_name and paused.key = job.key)
                    ) as startable,
                job.expires_at is null or job.expires_at > p_moment as alive
            from penstock.queued_jobs as job
            where p_resuming
                and job.name = p_name
                and job.slot = p_slots[1]
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
                (
                    (
                        head.status = 'queued' and head.run_after <= p_moment
                        and (not p_sealed or penstock.has_key_for(head.data, head.message, p_keys))
                    )
                    or p_key_concurrency > 1
                    or p_held_keys ? head.key
                )
                    and not (
                        p_keys_paused
                        and exists (select from penstock.paused_keys as paused where paused.name = p_name and paused.key = head.key)
                    ) as startable,
                case when head.status = 'queued' then head.run_after end as due,
                head.ctid as head,
                head.seq as head_seq,
                head.expires_at is null or head.expires_at > p_moment as alive
            from penstock.queued_jobs as head
            where head.name = p_name
                and head.slot = p_slots[ring.place]
                and head.seq is not null
                and head.key collate "C" > ring.key
                and not (
                    p_midway and ring.place = cardinality(p_slots)
                    and (head.key collate "C" > p_after_key or (p_resuming and head.key collate "C" = p_after_key))
                )
            order by head.key collate "C", head.seq
            limit 1
        ) as next on true
        where ring.place <= cardinality(p_slots)
            and ring.found < p_room
            and ring.step < p_longest
    )
    select ring.place, ring.key, ring.step, ring.found, ring.startable, ring.due, ring.head, ring.head_seq, ring.alive from ring
$$;
comment on function penstock.walk_keys(
    text, integer[], text, boolean, boolean, integer, integer, integer, jsonb, boolean, timestamptz, boolean, text[]
) is
    'Part of claim_keys: the keys of the slots in the order of the ring, each with the first job of its key queue, until p_room of them can start jobs or p_longest steps are done; a paused key cannot. place: of the slot in p_slots. Step 0 is p_after_key when p_resuming. p_sealed: whether the pool may have encrypted documents; p_keys: as in claim_keys.';

-- Long, since it looks at the same key queues twice: by one probe where a key gets one job, as a window where it gets more.
create or replace function penstock.choose_of_keys(
    p_name text,
    p_slots integer[],
    p_after_key text,
    p_midway boolean,
    p_turn_left integer,
    p_longest integer,
    p_room integer,
    p_whole_turns boolean,
    p_depth integer,
    p_key_concurrency integer,
    p_held_keys jsonb,
    p_keys_paused boolean,
    p_key_rate_limit integer,
    p_key_rate_period interval,
    p_moment timestamptz,
    p_sealed boolean,
    p_keys text[]
)
returns table (job tid, turn integer, nth bigint, at_slot integer, at_key text, due_in_s double precision, turn_left integer, weights text)
language sql
stable
as $$
    with ring as materialized (
        select walked.*
        from penstock.walk_keys(
            p_name, p_slots, p_after_key, p_midway, p_turn_left > 0, p_longest, p_room, p_key_concurrency, p_held_keys, p_keys_paused,
            p_moment, p_sealed, p_keys
        ) as walked
    ),
    turns as (
        select
            ring.step as turn, p_slots[ring.place] as slot, ring.key, heavy.weight,
            -- No more jobs of a key than are needed to fill the room.
            least(p_depth, (p_room - 1) / count(*) over () + 1) * heavy.weight * p_key_concurrency as most,
            ring.head, ring.head_seq, ring.alive
        from ring
        left join penstock.key_weights on key_weights.name = p_name and key_weights.key = ring.key
        cross join lateral (
            select case when ring.step = 0 then p_turn_left else coalesce(key_weights.weight, 1) end as weight
        ) as heavy
        where ring.startable
    ),
    queued as (
        -- When a key gets one job, the walk has found it already.
        select turns.turn, turns.weight, turns.head as ctid, 1::bigint as nth, turns.alive as startable
        from turns
        where p_key_concurrency = 1 and p_key_rate_limit is null and p_held_keys = '{}' and turns.most = 1
        union all
        select
            turns.turn, turns.weight, front.ctid, front.nth,
            case
                when p_key_concurrency > 1 then
                    front.startable and front.nth_startable <= p_key_concurrency * p_depth - front.running
                else front.startable_until_here
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
                    each.status = 'queued' and each.run_after <= p_moment
                        and (each.expires_at is null or each.expires_at > p_moment)
                        and (not p_sealed or penstock.has_key_for(each.data, each.message, p_keys)) as startable
                from penstock.queued_jobs as each
                where each.name = p_name
                    and each.slot = turns.slot
                    and each.seq is not null
                    and each.key collate "C" = turns.key
                    -- From the lowest visible number, which the walk has found, passing over only the jobs that the caller
                    -- holds: a job that becomes visible late is taken before those that follow it.
                    and each.seq >= turns.head_seq
                    and (each.status = 'queued' or p_key_concurrency > 1 or not p_held_keys ? turns.key)
                order by each.seq
                limit case when p_key_rate_limit is null then turns.most
                    else greatest(0, least(turns.most, penstock.rate_room(p_name, turns.key, p_key_rate_limit, p_key_rate_period, p_moment)))
                end
            ) as job
        ) as front
        where not (p_key_concurrency = 1 and p_key_rate_limit is null and p_held_keys = '{}' and turns.most = 1)
    ),
    ranked as (
        -- By rounds. A key gets the whole of its first turn, even if that is a little more than there is room for; only the
        -- limits of the type are never passed. A turn that they cut short goes on in the next claim.
        select
            placed.ctid, placed.turn, placed.nth, placed.round,
            placed.place <= p_room or (placed.round = 0 and p_whole_turns) as taken
        from (
            select
                queued.ctid, queued.turn, queued.nth, (queued.nth - 1) / queued.weight as round,
                row_number() over (order by (queued.nth - 1) / queued.weight, queued.turn, queued.nth) as place
            from queued
            where queued.startable
        ) as placed
    )
    select ranked.ctid, ranked.turn, ranked.nth, null::integer, null::text, null::double precision, null::integer, null::text
    from ranked
    where ranked.taken
    union all
    select
        null, null, null,
        p_slots[coalesce(cut_at.place, walked.place)],
        coalesce(cut_at.key, walked.key),
        extract(epoch from walked.due - p_moment)::double precision,
        cut.jobs,
        (select jsonb_object_agg(turns.key, turns.weight)::text from turns where turns.weight > 1)
    from (
        select
            (array_agg(ring.place order by ring.step desc))[1] as place,
            (array_agg(ring.key order by ring.step desc))[1] as key,
            min(case
                when ring.due > p_moment then ring.due
                when ring.startable and p_key_rate_limit is not null then p_moment + p_key_rate_period / 50
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
    left join ring as cut_at on cut_at.step = cut.turn
$$;
comment on function penstock.choose_of_keys(
    text, integer[], text, boolean, integer, integer, integer, boolean, integer, integer, jsonb, boolean, integer, interval, timestamptz, boolean, text[]
) is
    'Part of claim_keys: the jobs to be claimed, of each key that the walk finds (turn) from the front of its key queue (nth), and a last row without a job that says where the walk ended, as claim_keys returns it. p_turn_left: how many jobs the turn of p_after_key has left, 0: none. p_whole_turns: whether a key gets the whole of its first turn even past p_room.';

-- Long, since it checks that the caller is a member, and since locking, claiming and the answer are one statement: see the head.
create or replace function penstock.claim_keys(
    p_member text,
    p_name text,
    p_slots integer[],
    p_epochs bigint[],
    p_limit integer,
    p_depth integer default 1,
    p_after_slot integer default null,
    p_after_key text default null,
    p_held_keys jsonb default '{}',
    p_turn_left integer default null,
    p_keys text[] default null
)
returns table (
    id uuid,
    name text,
    attempt smallint,
    max_attempts smallint,
    priority smallint,
    key text,
    data text,
    created_at timestamptz,
    run_after timestamptz,
    seq bigint,
    lease bigint,
    lease_s double precision,
    time_limit_s double precision,
    snoozes integer,
    at_slot integer,
    at_key text,
    due_in_s double precision,
    turn_left integer,
    weights text
)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment timestamptz := penstock.clock();
    -- A walk past this many keys and slots goes on in the next claim.
    longest_walk constant integer := 3000 + least(p_limit, 10000);
    job_type penstock.jobs;
    pool penstock.pools;
    owned integer[];
    sealed boolean;
    midway boolean;
    resuming boolean;
    limited boolean;
    places integer;
    room integer;
    claimed integer;
    new_lease bigint;
    latest constant timestamptz := penstock.shown_time('infinity');
    earliest constant timestamptz := penstock.shown_time('-infinity');
begin
    perform penstock.check_size(greatest(cardinality(p_slots), cardinality(p_epochs)), 1000000, 'slots');
    if p_keys is not null then
        perform penstock.check_size(cardinality(p_keys), 1000, 'keys');
    end if;
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
    -- While this row is locked, no transaction can take slots of this member away and end the jobs that are claimed here.
    perform from penstock.members where group_name = p_name and members.id = p_member for key share;
    if not found then
        raise exception '% is no member of pool %', left(p_member, 100), p_name
            using errcode = 'PS404', hint = 'It was evicted, or left: join again.';
    end if;
    if job_type.paused_at is not null or job_type.concurrency = 0 or (job_type.encrypted and p_keys is null) then
        return;
    end if;
    if exists (select from penstock.queued_jobs where expires_at <= moment and status = 'queued') then
        perform penstock.expire(1000);
    end if;
    if exists (
        select from penstock.queued_jobs as unplaced
        where unplaced.name = p_name and unplaced.slot is null and unplaced.seq is not null
    ) then
        perform penstock.adopt_unplaced(p_name);
        -- Claim nothing while jobs without a slot are left, or another claim adopts them: later jobs of their keys would overtake them.
        if exists (
            select from penstock.queued_jobs as unplaced
            where unplaced.name = p_name and unplaced.slot is null and unplaced.seq is not null and unplaced.status = 'queued'
        ) then
            return;
        end if;
    end if;
    -- The ring begins where the last walk ended; the slot in which it ended comes again at the end, for its first keys.
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
    -- The turn that the last claim cut short continues first.
    sealed := job_type.encrypted_at is not null;
    resuming := midway and coalesce(p_turn_left > 0, false);
    new_lease := nextval('penstock.lease_id');

    return query
    with chosen as materialized (
        select job.*
        from penstock.choose_of_keys(
            p_name, owned, p_after_key, midway, case when resuming then p_turn_left else 0 end, longest_walk, room, not limited,
            p_depth, pool.key_concurrency, p_held_keys, pool.keys_paused, pool.key_rate_limit, pool.key_rate_period, moment,
            sealed, p_keys
        ) as job
    ),
    locked as (
        select job.ctid, chosen.turn, chosen.nth
        from chosen
        join penstock.queued_jobs as job on job.ctid = chosen.job
        where job.status = 'queued'
        for update of job skip locked
    ),
    -- The jobs behind one that another transaction has locked wait too.
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
            job.id, job.name, job.attempt, job.max_attempts, job.priority, job.key, job.created_at, job.run_after, job.seq,
            job.slot, job.options, job.snoozes, job.data::text as text
    ),
    opened as (
        select penstock.open_lease(
            new_lease, p_name, p_member, 0::smallint, moment, job_type.visibility_timeout, min(claimed.seq), max(claimed.seq), count(*),
            array_agg(claimed.id)
        ) as lease
        from claimed
    )
    select
        claimed.id, claimed.name, claimed.attempt, claimed.max_attempts, claimed.priority, claimed.key,
        case when octet_length(claimed.text) <= 4194304 then claimed.text end,
        greatest(least(claimed.created_at, latest), earliest), greatest(least(claimed.run_after, latest), earliest), claimed.seq,
        -- Computed once, with the first job, so that no lease is opened without a job.
        (select opened.lease from opened),
        extract(epoch from job_type.visibility_timeout)::double precision,
        (claimed.options ->> 'time_limit')::double precision, coalesce(claimed.snoozes, 0), claimed.slot, null::text, null::double precision,
        null::integer, null::text
    from claimed
    union all
    select
        null, null, null, null, null, null, null, null, null, null, null, null, null, null,
        chosen.at_slot, chosen.at_key, chosen.due_in_s, chosen.turn_left, chosen.weights
    from chosen
    where chosen.job is null;
    get diagnostics claimed = row_count;
    claimed := claimed - 1;
    if limited then
        perform penstock.pass_on_places(p_name, p_member, places, room, claimed, p_limit);
    end if;

    if claimed > 0 then
        if job_type.rate_limit is not null then
            perform penstock.note_starts(p_name, '', claimed, job_type.rate_period, moment);
        end if;
        if pool.key_rate_limit is not null then
            perform penstock.note_starts(p_name, started.key, started.jobs, pool.key_rate_period, moment)
            from (
                select job.key, count(*)::integer as jobs
                from penstock.leases
                cross join unnest(leases.jobs) as held (id)
                join penstock.queued_jobs as job on job.id = held.id
                where leases.id = new_lease
                group by job.key
            ) as started;
            -- Delete twice as many as were written, so that keys which never come again do not stay.
            delete from penstock.rate_windows
            where ctid = any (array(
                select old.ctid
                from penstock.rate_windows as old
                where old.name = p_name and old.key <> '' and old.ends_at <= moment - pool.key_rate_period
                order by old.ends_at
                limit 2 * claimed
                for update skip locked
            ));
        end if;
        delete from penstock.listeners where channel = 'penstock_' || p_member and kind = 'keys' and subject = p_name;
    end if;
end
$$;
comment on function penstock.claim_keys(text, text, integer[], bigint[], integer, integer, integer, text, jsonb, integer, text[]) is
    'Claims up to p_limit jobs of a pool from slots that the member has under these epochs: of each key that is not busy up to p_depth (times its weight) from the front, keys in turn. p_held_keys ({"key": 1}) names keys of which the caller has jobs that are not settled, and after which it will start what it gets: of these too it gets the lowest numbers that are visible and not in progress. Job rows have their slot in at_slot. The last row has no id: it says where the walk ended (at_slot, at_key; null: it saw every key), to go on from there, and when a job that is waited for is due; turn_left: how many jobs the turn of at_key has left, to be given back as p_turn_left; weights: of the keys that have one. p_keys: as in claim; a job that is encrypted with another key holds its key.';
