-- Let time pass for what is planned: $1 is how much. A job that waits to run alone has a time in the year 9999, which stays.
with jobs as (
    update penstock.queued_jobs as job
    set
        run_after = case
            when (job.seq is null or job.waits_for is not null) and job.run_after < '9000-01-01' then job.run_after - $1::interval
            else job.run_after
        end,
        expires_at = job.expires_at - $1::interval
    where job.seq is null or job.waits_for is not null or job.expires_at is not null
),
steps as (
    update penstock.job_steps
    set due = due - $1::interval
    where due is not null
),
schedules as (
    update penstock.schedules
    set next_at = next_at - $1::interval
    where next_at is not null
),
periods as (
    update penstock.unique_periods
    set until = until - $1::interval, look_at = look_at - $1::interval
)
update penstock.subscriptions
set expires_at = expires_at - $1::interval
where expires_at is not null
