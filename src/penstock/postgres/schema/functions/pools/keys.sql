-- What is known of the keys of a pool: the state of one key, and the jobs of one or all.
--
-- The jobs that have a place in the queue are found by (name, slot, key, seq), those that are deferred by (name, key, id). A list goes through
-- the first and then through the others. The cursor of a job is its position there, as text: "q", slot, ":", seq, ":" and key, or "d", id,
-- ":" and key.

create or replace function penstock.slot_of_key(p_name text, p_key text)
returns integer
language plpgsql
stable
as $$
declare
    of_group penstock.groups;
begin
    select * into of_group from penstock.groups where name = p_name;
    if of_group.assignor <> 'custom' then
        return penstock.slot_of(p_key, of_group.slots);
    end if;
    return (select slots.slot from penstock.slots where slots.group_name = p_name and slots.key = p_key);
end
$$;
comment on function penstock.slot_of_key(text, text) is 'The slot of a key; null: the pool has its own assign and has not placed the key yet.';

create or replace function penstock.jobs_of_key(p_name text, p_key text, p_limit integer)
returns setof penstock.queued_jobs
language plpgsql
stable
as $$
declare
    place constant integer := penstock.slot_of_key(p_name, p_key);
begin
    return query
    (
        select job.*
        from penstock.queued_jobs as job
        where job.name = p_name and job.slot = place and job.key collate "C" = p_key and job.seq is not null
        order by job.seq
        limit p_limit
    )
    union all
    (
        select job.*
        from penstock.queued_jobs as job
        where job.name = p_name and job.seq is null and job.key collate "C" = p_key
        limit p_limit
    );
end
$$;
comment on function penstock.jobs_of_key(text, text, integer) is
    'The jobs of a key: those in its key queue in order, then those that are deferred, up to p_limit of each.';

create or replace function penstock.key_state(p_name text, p_key text)
returns table (
    slot integer,
    owner text,
    target text,
    epoch bigint,
    weight integer,
    ready bigint,
    in_progress bigint,
    deferred bigint,
    oldest_ready_s double precision,
    standing boolean,
    paused_at timestamptz,
    quarantined_at timestamptz,
    quarantine_error text,
    running jsonb,
    next_job uuid,
    reason text,
    message text,
    since timestamptz,
    until timestamptz,
    by_job uuid,
    worker text,
    used bigint,
    most bigint,
    ahead bigint,
    expires_at timestamptz
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    pool constant penstock.pools := penstock.require_pool(p_name);
    place constant integer := penstock.slot_of_key(p_name, p_key);
begin
    return query
    with jobs as materialized (
        select
            job.id, job.status, job.seq, job.attempt, job.lease, greatest(job.run_after, job.created_at) as since,
            -- A worker claims jobs of a key ahead: what runs are the first ones, as many as the pool lets run at once.
            job.status = 'in-progress'
                and count(*) filter (where job.status = 'in-progress') over (order by job.seq) <= pool.key_concurrency as runs
        from penstock.jobs_of_key(p_name, p_key, 10000) as job
    )
    select
        place, slots.owner, slots.target, slots.epoch, coalesce(weights.weight, 1), counted.ready, counted.in_progress, counted.deferred,
        extract(epoch from penstock.clock() - counted.oldest)::double precision,
        exists (select from penstock.standing_jobs as standing where standing.name = p_name and standing.key = p_key and standing.wanted),
        paused.paused_at, case when slots.error is not null then slots.failed_at end, slots.error, counted.running,
        first.id, why.*, penstock.shown_time((first.job).expires_at)
    from (
        select
            count(*) filter (where jobs.status = 'queued' and jobs.seq is not null) as ready,
            count(*) filter (where jobs.status = 'in-progress') as in_progress,
            count(*) filter (where jobs.seq is null) as deferred,
            min(jobs.since) filter (where jobs.status = 'queued' and jobs.seq is not null) as oldest,
            coalesce(
                jsonb_agg(
                    jsonb_build_object('id', jobs.id, 'attempt', jobs.attempt, 'worker', leases.worker, 'started_at', leases.started_at)
                    order by jobs.seq
                ) filter (where jobs.runs),
                '[]'
            ) as running
        from jobs
        left join penstock.leases on leases.id = jobs.lease and jobs.runs
    ) as counted
    left join penstock.slots on slots.group_name = p_name and slots.slot = place
    left join penstock.key_weights as weights on weights.name = p_name and weights.key = p_key
    left join penstock.paused_keys as paused on paused.name = p_name and paused.key = p_key
    left join lateral (
        -- In a pool with a key concurrency, what is claimed runs or is about to.
        select job.id, job
        from (
            select jobs.id
            from jobs
            where jobs.status = 'queued' or (not jobs.runs and pool.key_concurrency = 1)
            order by jobs.seq nulls last, jobs.since
            limit 1
        ) as next
        join penstock.queued_jobs as job on job.id = next.id
    ) as first on true
    left join lateral penstock.why_of(first.job) as why on first.id is not null;
end
$$;
comment on function penstock.key_state(text, text) is
    'What is known of a key: where it is, since when it is paused or quarantined, what runs (an array of id, attempt, worker and started_at) and what waits; counts at most 10,000 jobs in its key queue, and as many deferred ones. next_job: the first that waits, and from reason on why it does, as why says it. Slot null: the pool has its own assign and has not placed the key yet.';

create or replace function penstock.pool_jobs(
    p_name text, p_key text default null, p_after text default null, p_limit integer default 100
)
returns table (
    cursor text,
    id uuid,
    key text,
    status text,
    attempt integer,
    max_attempts integer,
    created_at timestamptz,
    run_after timestamptz,
    expires_at timestamptz,
    started_at timestamptz,
    worker text
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    parts text[];
    at_slot integer := -1;
    at_key text := '';
    at_seq bigint := 0;
    at_id uuid := '00000000-0000-0000-0000-000000000000';
    only_slot constant integer := case when p_key is not null then penstock.slot_of_key(p_name, p_key) end;
    deferred boolean := false;
    listed integer := 0;
begin
    perform penstock.require_pool(p_name);
    perform penstock.check_limit(p_limit, 1000);
    if p_after is not null then
        parts := regexp_match(p_after, '^(?:q([0-9]{1,9}):([0-9]{1,18})|d([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})):(.*)$');
        if parts is null then
            raise exception 'invalid cursor: %', left(p_after, 100)
                using errcode = 'PS400', hint = 'Give the cursor of the last job of the page before.';
        end if;
        deferred := parts[3] is not null;
        at_slot := coalesce(parts[1]::integer, at_slot);
        at_seq := coalesce(parts[2]::bigint, at_seq);
        at_id := coalesce(parts[3]::uuid, at_id);
        at_key := parts[4];
    end if;
    if not deferred then
        return query
        select
            format('q%s:%s:%s', job.slot, job.seq, job.key), job.id, job.key, job.status::text, job.attempt::integer, job.max_attempts::integer,
            penstock.shown_time(job.created_at), penstock.shown_time(job.run_after), penstock.shown_time(job.expires_at),
            leases.started_at, leases.worker
        from (
            select * from penstock.placed_jobs(p_name, only_slot, p_key, at_slot, at_key, at_seq, p_limit)
        ) as job
        left join penstock.leases on leases.id = job.lease
        order by job.slot, job.key collate "C", job.seq;
        get diagnostics listed = row_count;
        at_key := '';
    end if;
    if listed < p_limit then
        return query
        select
            format('d%s:%s', job.id, job.key), job.id, job.key, job.status::text, job.attempt::integer, job.max_attempts::integer,
            penstock.shown_time(job.created_at), penstock.shown_time(job.run_after), penstock.shown_time(job.expires_at),
            null::timestamptz, null::text
        from penstock.queued_jobs as job
        where job.name = p_name and job.seq is null
            and (job.key collate "C", job.id) > (coalesce(p_key, at_key), at_id)
            and (p_key is null or job.key collate "C" <= p_key)
        order by job.key collate "C", job.id
        limit p_limit - listed;
    end if;
end
$$;
comment on function penstock.pool_jobs(text, text, text, integer) is
    'The jobs of a pool, or of one key, that wait or run: first those with a place in the queue, by key and in its order, then those that are deferred, by key. p_after: the cursor of the last one seen.';

create or replace function penstock.placed_jobs(
    p_name text, p_slot integer, p_key text, p_after_slot integer, p_after_key text, p_after_seq bigint, p_limit integer
)
returns setof penstock.queued_jobs
language plpgsql
stable
as $$
begin
    if p_key is not null then
        return query
        select job.*
        from penstock.queued_jobs as job
        where job.name = p_name and job.slot = p_slot and job.key collate "C" = p_key and job.seq > p_after_seq
        order by job.seq
        limit p_limit;
    else
        return query
        select job.*
        from penstock.queued_jobs as job
        where job.name = p_name and job.slot is not null and job.seq is not null
            and (job.slot, job.key collate "C", job.seq) > (p_after_slot, p_after_key, p_after_seq)
        order by job.slot, job.key collate "C", job.seq
        limit p_limit;
    end if;
end
$$;
comment on function penstock.placed_jobs(text, integer, text, integer, text, bigint, integer) is
    'Part of pool_jobs: the jobs of a pool, or of one key, that have a place in the queue, from a position on.';
