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
    traceparent text,
    at_slot integer,
    at_key text,
    due_in_s double precision,
    turn_left integer,
    weights text,
    lacking text
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
    -- The start is read behind the update, as in claim.
    opened as (
        select penstock.open_lease(
            new_lease, p_name, p_member, 0::smallint, penstock.clock(), moment + job_type.visibility_timeout, min(claimed.seq), max(claimed.seq), count(*),
            array_agg(claimed.id), penstock.retention_class(job_type.keep_succeeded)
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
        (claimed.options ->> 'time_limit')::double precision, coalesce(claimed.snoozes, 0), claimed.options ->> 'traceparent',
        claimed.slot, null::text, null::double precision, null::integer, null::text, null::text
    from claimed
    union all
    select
        null, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
        chosen.at_slot, chosen.at_key, chosen.due_in_s, chosen.turn_left, chosen.weights, chosen.lacking
    from chosen
    where chosen.job is null;
    get diagnostics claimed = row_count;
    claimed := claimed - 1;
    if limited then
        perform penstock.pass_on_places(p_name, p_member, places, room, claimed, p_limit);
    end if;

    if claimed > 0 then
        if job_type.rate_limit is not null then
            perform penstock.note_starts(p_name, '', claimed, job_type.rate_period);
        end if;
        if pool.key_rate_limit is not null then
            perform penstock.note_starts(p_name, started.key, started.jobs, pool.key_rate_period)
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
    'Claims up to p_limit jobs of a pool from slots that the member has under these epochs: of each key that is not busy up to p_depth (times its weight) from the front, keys in turn. p_held_keys ({"key": 1}) names keys of which the caller has jobs that are not settled, and after which it will start what it gets: of these too it gets the lowest numbers that are visible and not in progress. Job rows have their slot in at_slot. The last row has no id: it says where the walk ended (at_slot, at_key; null: it saw every key), to go on from there, and when a job that is waited for is due; turn_left: how many jobs the turn of at_key has left, to be given back as p_turn_left; weights: of the keys that have one; lacking: [[slot, "<id>"]], the keys of encryption that the first jobs of its keys wait for, which need_keys is told. p_keys: as in claim; a job that is encrypted with another key holds its key.';
