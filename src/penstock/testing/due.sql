-- What a test's worker still has to do: jobs of the types $1 that are due or run, and schedules $2 that are due or run in place. And ends of jobs for which others wait.
select
    (
        select count(*)
        from penstock.queued_jobs as job
        where job.name = any($1) and (job.seq is not null or job.status = 'in-progress' or job.run_after <= now())
    ) as jobs,
    (
        select string_agg(distinct job.name, ', ' order by job.name)
        from penstock.queued_jobs as job
        where job.name = any($1) and (job.seq is not null or job.status = 'in-progress' or job.run_after <= now())
    ) as types,
    (
        select count(*)
        from penstock.schedules as schedule
        where schedule.name = any($2) and (schedule.next_at <= now() or schedule.running_by is not null)
    ) as schedules,
    (select count(*) from penstock.workflow_ticks) + (select count(*) from penstock.job_dependencies as dependency where not dependency.linked)
        as ticks
