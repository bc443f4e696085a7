-- Functions by which people, servers and scalers watch and change pools. pools.sql and standing.sql have those that workers call.

create or replace function penstock.pool_details(p_name text default null)
returns table (
    name text,
    slots integer,
    assignor text,
    on_retry text,
    key_concurrency integer,
    key_rate_limit integer,
    key_rate_period interval,
    key_max_waiting integer,
    workers integer,
    unowned_slots bigint,
    moving_slots bigint,
    standing bigint,
    standing_running bigint,
    created_at timestamptz
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        pools.name, coalesce(shared.slots, 0)::integer, groups.assignor, pools.on_retry, pools.key_concurrency, pools.key_rate_limit,
        pools.key_rate_period, pools.key_max_waiting, groups.members, coalesce(shared.unowned, 0), coalesce(shared.moving, 0), coalesce(standing.wanted, 0),
        coalesce(standing.running, 0), pools.created_at
    from penstock.pools
    join penstock.groups on groups.name = pools.name
    left join lateral (
        select
            count(*) as slots,
            count(*) filter (where slots.owner is null) as unowned,
            count(*) filter (where slots.owner is distinct from slots.target) as moving
        from penstock.slots
        where slots.group_name = pools.name
    ) as shared on true
    left join lateral (
        select count(*) filter (where jobs.wanted) as wanted, count(jobs.running_by) as running
        from penstock.standing_jobs as jobs
        where jobs.name = pools.name
    ) as standing on true
    where p_name is null or pools.name = p_name
    order by pools.name
$$;
comment on function penstock.pool_details(text) is
    'A pool, or all: its options, workers, how many slots have no owner or are on their way, and standing jobs. Its jobs: job_counts.';

create or replace function penstock.change_pool(p_name text, p_options jsonb)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    known constant text[] := array['on_retry', 'key_concurrency', 'key_rate_limit', 'key_rate_period', 'key_max_waiting'];
    pool penstock.pools := penstock.require_pool(p_name);
begin
    perform penstock.check_options(p_options, known, '{"key_concurrency": 3}', '; slots: resize_pool, weights: set_weight');
    begin
        pool := jsonb_populate_record(pool, p_options);
        perform penstock.check_key_limits(pool);
    exception
        when data_exception or check_violation then
            raise exception 'invalid options %: %', left(p_options::text, 200), sqlerrm
                using errcode = 'PS400',
                      hint = 'on_retry is block or skip, key_concurrency 1 to 10,000; key_rate_limit and key_rate_period go together; key_max_waiting is at least 1.';
    end;
    update penstock.pools
    set on_retry = pool.on_retry,
        key_concurrency = pool.key_concurrency,
        key_rate_limit = pool.key_rate_limit,
        key_rate_period = pool.key_rate_period,
        key_max_waiting = pool.key_max_waiting
    where name = p_name;
end
$$;
comment on function penstock.change_pool(text, jsonb) is
    'Changes limits of a pool: on_retry, key_concurrency, key_rate_limit, key_rate_period, key_max_waiting. Claims apply the change at once; a worker applies what it decides by itself (on_retry, key_concurrency within it) when it starts next. The change stays until an application declares other options than before.';

create or replace function penstock.key_weights_of(p_name text)
returns table (key text, weight integer)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.require_pool(p_name);
    return query
    select weights.key, weights.weight
    from penstock.key_weights as weights
    where weights.name = p_name
    order by weights.key
    limit 10000;
end
$$;
comment on function penstock.key_weights_of(text) is 'The keys of a pool that have a weight, 10,000 at most.';

create or replace function penstock.standing_list(p_name text, p_after text default null, p_limit integer default 100, p_key text default null)
returns table (
    key text,
    slot integer,
    owner text,
    running_by text,
    wanted boolean,
    started_at timestamptz,
    failures integer,
    retry_at timestamptz,
    messages bigint,
    created_at timestamptz,
    updated_at timestamptz,
    data text,
    state text,
    error text,
    entered_at timestamptz,
    crashes integer,
    quarantined_at timestamptz
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
begin
    perform penstock.require_pool(p_name);
    perform penstock.check_limit(p_limit, 1000);
    return query
    select
        standing.key, standing.slot, slots.owner, standing.running_by, standing.wanted, standing.started_at, standing.failures,
        standing.retry_at,
        (select count(*) from penstock.standing_messages as message where message.name = p_name and message.key = standing.key),
        standing.created_at, standing.updated_at, coalesce(penstock.shown(standing.data), 'null'), penstock.shown(standing.state), penstock.shown(standing.error),
        standing.entered_at, standing.crashes, standing.quarantined_at
    from penstock.standing_jobs as standing
    left join penstock.slots on slots.group_name = p_name and slots.slot = standing.slot
    where standing.name = p_name
        and (p_after is null or standing.key > p_after)
        and (p_key is null or standing.key = p_key)
    order by standing.key
    limit p_limit;
end
$$;
comment on function penstock.standing_list(text, text, integer, text) is
    'Standing jobs of a pool and where they run, by key, from after p_after on; or the one of p_key. JSON comes as text.';

create or replace function penstock.runnable_in_pools()
returns table (name text, oldest_s double precision, slots bigint)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    with waiting as materialized (
        select job.name, job.slot, job.key, job.status, job.run_after, job.created_at
        from penstock.queued_jobs as job
        where job.slot is not null and job.seq is not null
    ),
    held as materialized (
        -- Keys whose next job waits for another job of the key, not for a worker.
        select distinct waiting.name, waiting.key
        from waiting
        join penstock.pools on pools.name = waiting.name
        where pools.key_concurrency = 1
            and (waiting.status = 'in-progress' or (waiting.run_after > penstock.clock() and pools.on_retry = 'block'))
    )
    select
        waiting.name,
        extract(epoch from penstock.clock() - min(greatest(waiting.run_after, waiting.created_at)) filter (
            where waiting.status = 'queued'
                and waiting.run_after <= penstock.clock()
                and not exists (select from held where held.name = waiting.name and held.key = waiting.key)
                and not exists (select from penstock.paused_keys as paused where paused.name = waiting.name and paused.key = waiting.key)
        ))::double precision,
        count(distinct waiting.slot)
    from waiting
    group by waiting.name
$$;
comment on function penstock.runnable_in_pools() is
    'Of each pool with jobs: how long the oldest job has waited that only lacks a worker, and how many slots have jobs at all. Reads what waits.';

create or replace function penstock.load_of_types(p_over interval default '1 minute')
returns table (
    name text,
    ready bigint,
    in_progress bigint,
    oldest_ready_s double precision,
    finished bigint,
    workers bigint,
    most_workers bigint
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_span(p_over, 'time to count over', '1 second', '31 days');
    select
        counts.name,
        -- What waits in a paused type waits for the end of the pause, and no worker would help.
        case when counts.paused then 0 else counts.ready end,
        counts.in_progress,
        case
            when counts.paused then null
            when pools.name is not null then runnable.oldest_s
            else counts.oldest_ready_s
        end,
        recent.finished,
        present.workers,
        -- With more workers than jobs that may run at once, or than slots with jobs, some would be idle. Nor do more of them help
        -- a type that is at its rate limit.
        least(
            case
                when pools.name is not null then
                    greatest(
                        least(coalesce(runnable.slots, 0), jobs.concurrency),
                        (select count(distinct standing.slot) from penstock.standing_jobs as standing where standing.name = counts.name and standing.wanted)
                    )
                else jobs.concurrency
            end,
            case
                when recent.finished >= 0.95 * jobs.rate_limit * extract(epoch from p_over) / extract(epoch from jobs.rate_period)
                    then greatest(present.workers, 1)
            end
        )
    from penstock.job_counts() as counts
    join penstock.jobs on jobs.name = counts.name
    left join penstock.pools on pools.name = counts.name
    left join penstock.runnable_in_pools() as runnable on runnable.name = counts.name
    cross join lateral (
        select count(*) as finished
        from penstock.archived_jobs
        where archived_jobs.name = counts.name
            and archived_jobs.finished_at > penstock.clock() - p_over
            and archived_jobs.started_at is not null
    ) as recent
    cross join lateral (
        select
            case
                when pools.name is not null then (
                    -- A draining worker takes no further jobs.
                    select count(*) from penstock.members where members.group_name = counts.name and members.state = 'active'
                )
                else (select count(*) from penstock.workers where counts.name = any (workers.names) and workers.state = 'running')
            end as workers
    ) as present
    order by counts.name
$$;
comment on function penstock.load_of_types(interval) is
    'For each job type: what waits and how long the oldest has lacked a worker, what finished within p_over, how many workers there are and how many could be busy (null: any number). What waits in a paused type lacks no worker, and does not count; a type at its rate limit keeps no more workers busy. Reads the whole queue: for people and scalers, not for loops.';
