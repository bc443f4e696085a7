-- Views: what people and dashboards query.

create or replace function penstock.is_suspended(job penstock.queued_jobs)
returns boolean
language sql
stable
as $$
    select job.waits_for is not null and job.status = 'queued' and job.run_after > penstock.clock()
$$;
comment on function penstock.is_suspended(penstock.queued_jobs) is 'Whether a job waits in one of its durable steps: its status is then waiting.';

create or replace function penstock.shown_status(job penstock.queued_jobs)
returns text
language sql
stable
as $$
    select case when penstock.is_suspended(job) then 'waiting' else job.status::text end
$$;
comment on function penstock.shown_status(penstock.queued_jobs) is 'The status of a job that is not finished: queued, in-progress, or waiting when it is suspended.';

create or replace function penstock.job_counts()
returns table (
    name text,
    paused boolean,
    waiting bigint,
    ready bigint,
    deferred bigint,
    in_progress bigint,
    oldest_ready_s double precision,
    succeeded_last_hour bigint,
    failed_last_hour bigint,
    expired_last_hour bigint,
    cancelled_last_hour bigint,
    quarantined_last_hour bigint
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        jobs.name,
        jobs.paused_at is not null or coalesce(jobs.concurrency = 0, false),
        coalesce(waiting.jobs, 0) + coalesce(queued.suspended, 0),
        coalesce(queued.ready, 0),
        coalesce(queued.deferred, 0),
        coalesce(queued.in_progress, 0),
        extract(epoch from penstock.clock() - queued.oldest)::double precision,
        coalesce(finished.succeeded, 0),
        coalesce(finished.failed, 0),
        coalesce(finished.expired, 0),
        coalesce(finished.cancelled, 0),
        coalesce(finished.quarantined, 0)
    from penstock.jobs
    left join (
        select
            name,
            count(*) filter (where status = 'queued' and seq is not null and not suspended) as ready,
            count(*) filter (where status = 'queued' and seq is null and not suspended) as deferred,
            count(*) filter (where suspended) as suspended,
            count(*) filter (where status = 'in-progress') as in_progress,
            min(greatest(run_after, created_at)) filter (where status = 'queued' and seq is not null and not suspended) as oldest
        from penstock.queued_jobs as job
        cross join lateral (select penstock.is_suspended(job) as suspended) as state
        group by name
    ) as queued using (name)
    left join (select name, count(*) as jobs from penstock.waiting_jobs group by name) as waiting using (name)
    left join (
        select
            name,
            count(*) filter (where status = 'succeeded') as succeeded,
            count(*) filter (where status = 'failed') as failed,
            count(*) filter (where status = 'expired') as expired,
            count(*) filter (where status = 'cancelled') as cancelled,
            count(*) filter (where reason = 'quarantined') as quarantined
        from penstock.archived_jobs
        where finished_at > penstock.clock() - interval '1 hour'
        group by name
    ) as finished using (name)
    order by jobs.name
$$;
comment on function penstock.job_counts() is 'For each job type: what waits, runs and finished in the last hour. Reads the whole queue: for people, not for loops.';

create or replace function penstock.find_jobs(p_ids uuid[], p_log boolean default true)
returns table (
    id uuid, name text, status text, attempt smallint, max_attempts smallint, priority smallint, key text,
    unique_key text, data text, created_at timestamptz, run_after timestamptz, expires_at timestamptz,
    started_at timestamptz, finished_at timestamptz, worker text, errors text, result text, progress text,
    replay_of uuid, cancel_requested_at timestamptz, reason text, replayed_by uuid[], time_limit_s double precision, snoozes integer,
    log text, encrypted boolean, after uuid[], run_when text, workflow uuid
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(cardinality(p_ids), 10000, 'jobs');
    select
        job.id, job.name, penstock.shown_status(job), job.attempt, job.max_attempts, job.priority, job.key, job.unique_key,
        coalesce(penstock.shown(coalesce(penstock.payload(job.message), job.data)), 'null'), penstock.shown_time(job.created_at),
        penstock.shown_time(job.run_after), penstock.shown_time(job.expires_at), lease.started_at, null::timestamptz, lease.worker,
        penstock.shown(job.errors), null, penstock.shown(job.progress), job.replay_of, job.cancel_requested_at, null,
        array(select replays.id from penstock.replays_of(job.id) as replays order by replays.id),
        (job.options ->> 'time_limit')::double precision, coalesce(job.snoozes, 0),
        case when p_log then penstock.shown(job.log) end,
        penstock.is_sealed(job.name, coalesce(penstock.payload(job.message), job.data), job.errors, job.progress, job.log),
        penstock.after_of(job.options), coalesce(job.options ->> 'when', 'succeeded'), job.workflow
    from penstock.queued_jobs as job
    left join penstock.leases as lease on lease.id = job.lease
    where job.id = any (p_ids)
    union all
    select
        job.id, job.name, 'waiting', job.attempt, job.max_attempts, job.priority, job.key, job.unique_key,
        coalesce(penstock.shown(job.data), 'null'), penstock.shown_time(job.created_at), penstock.shown_time(job.run_after),
        penstock.shown_time(job.expires_at), null::timestamptz, null::timestamptz, null, penstock.shown(job.errors), null,
        penstock.shown(job.progress), job.replay_of, null::timestamptz, null, '{}'::uuid[], (job.options ->> 'time_limit')::double precision,
        coalesce(job.snoozes, 0), case when p_log then penstock.shown(job.log) end,
        penstock.is_sealed(job.name, job.data, job.errors, job.progress, job.log),
        penstock.after_of(job.options), coalesce(job.options ->> 'when', 'succeeded'), job.workflow
    from penstock.waiting_jobs as job
    where job.id = any (p_ids)
    union all
    select
        job.id, job.name, job.status::text, job.attempt, job.max_attempts, job.priority, job.key, job.unique_key,
        coalesce(penstock.shown(coalesce(penstock.payload(job.message), job.data)), 'null'),
        penstock.shown_time(job.created_at), penstock.shown_time(job.run_after), penstock.shown_time(job.expires_at), job.started_at,
        job.finished_at, job.worker, penstock.shown(job.errors), penstock.shown(job.result), null, job.replay_of, null, job.reason,
        array(select replays.id from penstock.replays_of(job.id) as replays order by replays.id),
        (job.options ->> 'time_limit')::double precision, coalesce(job.snoozes, 0),
        case when p_log then penstock.shown(job.log) end,
        penstock.is_sealed(job.name, coalesce(penstock.payload(job.message), job.data), job.errors, job.result, job.log),
        penstock.after_of(job.options), coalesce(job.options ->> 'when', 'succeeded'), job.workflow
    from penstock.archived_jobs as job
    where job.id = any (p_ids)
$$;
comment on function penstock.find_jobs(uuid[], boolean) is 'Everything known of these jobs, waiting for others, queued or archived, in one shape; p_log: with the lines of their logs. JSON comes as text, null in place of what cannot be read; times are within the years 1 to 9999. encrypted: whether some of it is in envelopes.';

create or replace function penstock.check_status(p_status text)
returns void
language plpgsql
immutable
as $$
begin
    if p_status is not null and p_status not in ('waiting', 'queued', 'in-progress', 'succeeded', 'failed', 'expired', 'cancelled') then
        raise exception 'unknown status: %', left(p_status, 100)
            using errcode = 'PS400', hint = 'A status is waiting, queued, in-progress, succeeded, failed, expired or cancelled.';
    end if;
end
$$;
comment on function penstock.check_status(text) is 'Raises PS400 unless this is a status of a job, or null.';

create or replace function penstock.list_jobs(
    p_name text default null,
    p_status text default null,
    p_key text default null,
    p_limit integer default 50,
    p_before timestamptz default null,
    p_before_id uuid default null,
    p_reason text default null,
    p_workflow uuid default null
)
returns setof uuid
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_status(p_status);
    perform penstock.check_limit(p_limit, 1000);
    return query
    select listed.id
    from (
        (
            select job.id, job.created_at as at
            from penstock.queued_jobs as job
            where (p_name is null or job.name = p_name)
                and (p_status is null or penstock.shown_status(job) = p_status)
                and (p_key is null or job.key = p_key)
                and (p_workflow is null or job.workflow = p_workflow)
                and p_reason is null
                and (p_before is null or (job.created_at, job.id) < (p_before, p_before_id))
            order by job.created_at desc, job.id desc
            limit p_limit
        )
        union all
        (
            select job.id, job.created_at
            from penstock.waiting_jobs as job
            where (p_name is null or job.name = p_name)
                and (p_status is null or p_status = 'waiting')
                and (p_key is null or job.key = p_key)
                and (p_workflow is null or job.workflow = p_workflow)
                and p_reason is null
                and (p_before is null or (job.created_at, job.id) < (p_before, p_before_id))
            order by job.created_at desc, job.id desc
            limit p_limit
        )
        union all
        (
            select job.id, job.finished_at
            from penstock.archived_jobs as job
            where (p_name is null or job.name = p_name)
                and (p_status is null or job.status::text = p_status)
                and (p_key is null or job.key = p_key)
                and (p_workflow is null or job.workflow = p_workflow)
                and (p_reason is null or job.reason = p_reason)
                and (p_before is null or (job.finished_at, job.id) < (p_before, p_before_id))
            order by job.finished_at desc, job.id desc
            limit p_limit
        )
    ) as listed
    order by listed.at desc, listed.id desc
    limit p_limit;
end
$$;
comment on function penstock.list_jobs(text, text, text, integer, timestamptz, uuid, text, uuid) is
    'Ids of jobs, latest first: by the time they finished, or were enqueued when they are not finished. p_before and p_before_id: that time and the id of the last one seen. p_reason: only those archived for it, such as quarantined. p_workflow: only the jobs of this workflow, such as the children of a job group.';
