-- What the HTTP API needs beside the functions that every client uses: an enqueue that returns the rows as they are
-- stored, lists by page, and rates. Callbacks have a file of their own.

create or replace function penstock.put_jobs(
    p_name text,
    p_data jsonb[],
    p_ids uuid[],
    p_keys text[] default null,
    p_priorities smallint[] default null,
    p_run_after timestamptz[] default null,
    p_expires_at timestamptz[] default null,
    p_unique_keys text[] default null,
    p_options jsonb[] default null
)
returns table (
    ordinal integer, outcome text, id uuid, name text, attempt smallint, max_attempts smallint, run_after timestamptz, expires_at timestamptz,
    created_at timestamptz, updated_at timestamptz, status text, data text
)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    ids uuid[] := p_ids;
    outcomes text[] := array_fill('queued'::text, array[coalesce(cardinality(p_ids), 0)]);
    enqueued record;
begin
    if p_ids is null then
        raise exception 'ids are null'
            using errcode = 'PS400', hint = 'Give one id for each job.';
    end if;
    for enqueued in
        select * from penstock.enqueue_many(
            p_name, p_data, p_ids, p_keys, p_priorities, p_run_after, p_expires_at, p_unique_keys, null, p_options
        )
    loop
        ids[enqueued.ordinal] := enqueued.id;
        outcomes[enqueued.ordinal] := enqueued.outcome;
    end loop;
    -- A statement of its own: it sees what the one before wrote.
    return query
    select
        given.place::integer, given.outcome, given.id, job.name, job.attempt, job.max_attempts, penstock.shown_time(job.run_after),
        penstock.shown_time(job.expires_at), penstock.shown_time(job.created_at), penstock.shown_time(job.updated_at),
        case when job.waits then 'waiting' else job.status::text end, case when given.outcome not in ('queued', 'taken') then coalesce(penstock.shown(coalesce(penstock.payload(job.message), job.data)), 'null') end
    from unnest(ids, outcomes) with ordinality as given (id, outcome, place)
    left join lateral (
        select queued.*, penstock.is_suspended(queued) as waits from penstock.queued_jobs as queued where queued.id = given.id
        union all
        select waiting.*, true from penstock.waiting_jobs as waiting where waiting.id = given.id
        limit 1
    ) as job on job.name = p_name;
end
$$;
comment on function penstock.put_jobs(text, jsonb[], uuid[], text[], smallint[], timestamptz[], timestamptz[], text[], jsonb[]) is
    'enqueue_many that returns each job as it is stored, in order, with its outcome. data only where it may differ from what was given (duplicate, coalesced). The columns of a job that is archived, or was by the time it was read, or is of another type (taken), are null.';

create or replace function penstock.attempts_of(p_ids uuid[])
returns table (id uuid, attempt smallint, lease bigint)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(cardinality(p_ids), 10000, 'jobs');
    select job.id, job.attempt, job.lease from penstock.queued_jobs as job where job.id = any (p_ids)
$$;
comment on function penstock.attempts_of(uuid[]) is
    'Which of these jobs are not finished, with attempt and lease: what a client that waits for many jobs looks at.';

create or replace function penstock.page_of_jobs(
    p_archived boolean,
    p_names text[] default null,
    p_status text default null,
    p_key text default null,
    p_since timestamptz default null,
    p_until timestamptz default null,
    p_limit integer default 100,
    p_before timestamptz default null,
    p_before_id uuid default null,
    p_reason text default null,
    p_workflow uuid default null
)
returns table (id uuid, at timestamptz)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
begin
    if p_status is not null and (
        p_archived and p_status not in ('succeeded', 'failed', 'expired', 'cancelled')
        or not p_archived and p_status not in ('queued', 'in-progress', 'waiting')
    ) then
        raise exception 'unknown status: %', left(p_status, 100)
            using errcode = 'PS400',
                  hint = case when p_archived then 'A status is succeeded, failed, expired or cancelled.' else 'A status is queued, in-progress or waiting.' end;
    end if;
    perform penstock.check_size(cardinality(p_names), 10000, 'job types');
    perform penstock.check_limit(p_limit, 1000);
    if p_archived then
        return query
        select job.id, job.finished_at
        from penstock.archived_jobs as job
        where (p_names is null or job.name = any (p_names))
            and (p_status is null or job.status = p_status::penstock.archived_job_status)
            and (p_key is null or job.key = p_key)
            and (p_workflow is null or job.workflow = p_workflow)
            and (p_reason is null or job.reason = p_reason)
            and (p_since is null or job.finished_at >= p_since)
            and (p_until is null or job.finished_at < p_until)
            and (p_before is null or job.finished_at <= p_before and (job.finished_at, job.id) < (p_before, p_before_id))
        order by job.finished_at desc, job.id desc
        limit p_limit;
    else
        return query
        select listed.id, penstock.shown_time(listed.created_at)
        from (
            (
                select job.id, job.created_at
                from penstock.queued_jobs as job
                where (p_names is null or job.name = any (p_names))
                    and (p_status is null or penstock.shown_status(job) = p_status)
                    and (p_key is null or job.key = p_key)
                    and (p_workflow is null or job.workflow = p_workflow)
                    and p_reason is null
                    and (p_since is null or job.created_at >= p_since)
                    and (p_until is null or job.created_at < p_until)
                    and (p_before is null or (job.created_at, job.id) < (p_before, p_before_id))
                order by job.created_at desc, job.id desc
                limit p_limit
            )
            union all
            (
                select job.id, job.created_at
                from penstock.waiting_jobs as job
                where (p_names is null or job.name = any (p_names))
                    and (p_status is null or p_status = 'waiting')
                    and (p_key is null or job.key = p_key)
                    and (p_workflow is null or job.workflow = p_workflow)
                    and p_reason is null
                    and (p_since is null or job.created_at >= p_since)
                    and (p_until is null or job.created_at < p_until)
                    and (p_before is null or (job.created_at, job.id) < (p_before, p_before_id))
                order by job.created_at desc, job.id desc
                limit p_limit
            )
        ) as listed
        order by listed.created_at desc, listed.id desc
        limit p_limit;
    end if;
end
$$;
comment on function penstock.page_of_jobs(boolean, text[], text, text, timestamptz, timestamptz, integer, timestamptz, uuid, text, uuid) is
    'One page of jobs, latest first: archived ones by when they finished, others by when they were enqueued. The next page starts with the time and id of the last row as p_before and p_before_id. p_reason: only those archived for it. p_workflow: only the jobs of this workflow.';

create or replace function penstock.job_rates(p_over interval default '1 minute')
returns table (name text, enqueued_per_s double precision, finished_per_s double precision, failed_per_s double precision)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
declare
    since timestamptz;
    seconds constant double precision := extract(epoch from p_over);
begin
    if p_over is null or p_over < interval '1 second' or p_over > interval '31 days' then
        raise exception 'cannot count over %', coalesce(p_over::text, 'null')
            using errcode = 'PS400', hint = 'Count over 1 second to 31 days.';
    end if;
    since := penstock.clock() - p_over;
    return query
    select
        jobs.name,
        (coalesce(waiting.jobs, 0) + coalesce(done.enqueued, 0)) / seconds,
        coalesce(done.finished, 0) / seconds,
        coalesce(done.failed, 0) / seconds
    from penstock.jobs
    left join (
        select job.name, count(*) as jobs
        from penstock.queued_jobs as job
        where job.created_at >= since
        group by job.name
    ) as waiting on waiting.name = jobs.name
    left join (
        select
            job.name,
            count(*) as finished,
            count(*) filter (where job.status = 'failed') as failed,
            count(*) filter (where job.created_at >= since) as enqueued
        from penstock.archived_jobs as job
        where job.finished_at >= since
        group by job.name
    ) as done on done.name = jobs.name
    order by jobs.name;
end
$$;
comment on function penstock.job_rates(interval) is
    'For each job type: jobs enqueued, finished and failed a second over the time up to now. Reads the whole queue: for people, not for loops.';

create or replace function penstock.stored_jobs(p_ids uuid[], p_log boolean default true)
returns table (
    id uuid, name text, status text, attempt smallint, max_attempts smallint, priority smallint, key text,
    unique_key text, data text, created_at timestamptz, run_after timestamptz, expires_at timestamptz,
    started_at timestamptz, finished_at timestamptz, worker text, errors text, result text, progress text,
    replay_of uuid, cancel_requested_at timestamptz, reason text, replayed_by uuid[], time_limit_s double precision, snoozes integer,
    log text, encrypted boolean, after uuid[], run_when text, workflow uuid, updated_at timestamptz
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select found.*, penstock.shown_time(coalesce(job.updated_at, found.finished_at))
    from penstock.find_jobs(p_ids, p_log) as found
    left join penstock.queued_jobs as job on job.id = found.id
$$;
comment on function penstock.stored_jobs(uuid[], boolean) is 'find_jobs, with the time of the last change.';
