-- Runs of graphs as people and workers see them: runs, steps, and results. The head of tables/0013_workflows.sql has the whole.

create or replace function penstock.workflow_runs(
    p_limit integer default 50, p_open boolean default false, p_name text default null, p_id uuid default null, p_run text default null
)
returns table (
    id uuid, name text, workflow text, status text, on_failure text, created_at timestamptz, cancelled_at timestamptz, finished_at timestamptz,
    retry_of text, retried_by text, steps bigint, shared bigint, succeeded bigint, failed bigint, cancelled bigint, expired bigint
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
begin
    perform penstock.check_limit(p_limit, 1000);
    return query
    select
        run.id, run.name, run.graph, coalesce(run.status::text, 'running'), run.on_failure, run.created_at, run.cancelled_at, run.finished_at,
        (select before.name from penstock.job_groups as before where before.id = run.retry_of),
        (select later.name from penstock.job_groups as later where later.retry_of = run.id), steps.number, steps.shared,
        run.succeeded + ticks.succeeded, run.failed + ticks.failed, run.cancelled + ticks.cancelled, run.expired + ticks.expired
    from (
        select *
        from penstock.job_groups as wanted
        where wanted.graph is not null
            and (p_name is null or wanted.graph = p_name)
            and (p_id is null or wanted.id = p_id)
            and (p_run is null or wanted.name = p_run)
            and (not p_open or wanted.finished_at is null)
        order by wanted.created_at desc, wanted.id desc
        limit p_limit
    ) as run
    cross join lateral (
        select count(*) as number, count(*) filter (where step.shared) as shared from penstock.graph_steps as step where step.run = run.id
    ) as steps
    cross join lateral (
        select
            coalesce(sum(tick.succeeded), 0)::bigint as succeeded, coalesce(sum(tick.failed), 0)::bigint as failed,
            coalesce(sum(tick.cancelled), 0)::bigint as cancelled, coalesce(sum(tick.expired), 0)::bigint as expired
        from penstock.workflow_ticks as tick
        where tick.workflow = run.id
    ) as ticks
    order by run.created_at desc, run.id desc;
end
$$;
comment on function penstock.workflow_runs(integer, boolean, text, uuid, text) is
    'Runs of workflows, latest first: all, those of a workflow, or one by its id or its name. status: running, or how the run ended. retry_of, retried_by: the run that it retries, and the one that retries it. shared: how many of its steps succeeded in the run that it retries; succeeded and so on: how its other steps ended so far. p_open: only those that have not ended.';

create or replace function penstock.workflow_steps(p_id uuid)
returns table (
    place integer, name text, type text, job uuid, jobs integer, carried integer, after integer[], at_any_end boolean, shared boolean, status text, reason text,
    created_at timestamptz, started_at timestamptz, finished_at timestamptz, attempt integer, error text, ended bigint, succeeded bigint, failed bigint
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        step.place, step.name, step.type, step.job, step.jobs, step.carried, step.after, step.at_any_end, step.shared,
        coalesce(parts.status, waiting.status, queued.status, archived.status, 'unknown'), archived.reason,
        penstock.shown_time(coalesce(parts.created_at, waiting.created_at, queued.created_at, archived.created_at)),
        penstock.shown_time(coalesce(queued.started_at, archived.started_at)),
        penstock.shown_time(coalesce(parts.finished_at, archived.finished_at)),
        coalesce(queued.attempt, archived.attempt, 0), coalesce(queued.error, archived.error), step.carried + parts.ended, parts.succeeded, parts.failed
    from penstock.graph_steps as step
    left join lateral (
        select
            coalesce(job_group.status::text, 'running') as status, job_group.created_at, job_group.finished_at,
            job_group.succeeded + job_group.failed + job_group.cancelled + job_group.expired + ticks.ended as ended,
            job_group.succeeded + ticks.succeeded as succeeded,
            job_group.failed + job_group.expired + ticks.failed as failed
        from penstock.job_groups as job_group
        cross join lateral (
            select
                coalesce(sum(tick.succeeded + tick.failed + tick.cancelled + tick.expired), 0)::bigint as ended,
                coalesce(sum(tick.succeeded), 0)::bigint as succeeded,
                coalesce(sum(tick.failed + tick.expired), 0)::bigint as failed
            from penstock.workflow_ticks as tick
            where tick.workflow = job_group.id
        ) as ticks
        where job_group.id = step.job
    ) as parts on step.jobs is not null
    left join lateral (
        select 'waiting' as status, job.created_at from penstock.waiting_jobs as job where job.id = step.job
    ) as waiting on step.jobs is null
    left join lateral (
        select
            penstock.shown_status(held) as status, held.created_at, held.attempt::integer as attempt,
            held.errors -> -1 ->> 'message' as error,
            (select lease.started_at from penstock.leases as lease where lease.id = held.lease) as started_at
        from penstock.queued_jobs as held
        where held.id = step.job
    ) as queued on step.jobs is null
    left join lateral (
        select
            job.status::text as status, job.reason, job.created_at, job.started_at, job.finished_at, job.attempt::integer as attempt,
            job.errors -> -1 ->> 'message' as error
        from penstock.archived_jobs as job
        where job.id = step.job
        order by job.finished_at desc
        limit 1
    ) as archived on step.jobs is null and waiting.status is null and queued.status is null
    where step.run = p_id
    order by step.place
$$;
comment on function penstock.workflow_steps(uuid) is
    'The steps of a run of a workflow, with the status and the times of each. after: the places of the steps for which it waits. jobs: how many jobs a step has that is a job group, of which ended have ended (carried in the runs that this one retries), succeeded have succeeded and failed have failed in this run; null: the step is one job. status: that of the job or the group; unknown when its day was pruned.';

create or replace function penstock.step_results(p_job uuid, p_names text[])
returns table (name text, type text, job uuid, result jsonb)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    largest constant bigint := 16777216;
    size bigint := 0;
    one record;
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'steps');
    for one in
        select step.name, step.type, step.job
        from penstock.queued_jobs as job
        join penstock.job_groups as own on own.id = job.workflow
        join penstock.graph_steps as step on step.run in (own.id, own.parent)
        where job.id = p_job and step.name = any (p_names) and step.jobs is null
    loop
        name := one.name;
        type := one.type;
        job := one.job;
        result := (
            select archived.result from penstock.archived_jobs as archived where archived.id = one.job order by archived.finished_at desc limit 1
        );
        size := size + coalesce(octet_length(result::text), 0);
        if size > largest then
            raise exception 'the results of % steps of the run of job % are larger than 16 MiB', cardinality(p_names), p_job
                using errcode = 'PS413', hint = 'Read them in parts, or let steps return references to what is large.';
        end if;
        return next;
    end loop;
end
$$;
comment on function penstock.step_results(uuid, text[]) is
    'The results of steps of the run to which a running job belongs, by the names of the steps. Null: the step has no result. No row for what is no step, and for a job that is in no run. PS413 when they are larger than 16 MiB together.';
