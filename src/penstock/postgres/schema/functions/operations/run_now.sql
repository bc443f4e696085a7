-- The operation run-now: all deferred jobs that match become due at once.
--
-- A job that it has made due may fail, or be snoozed, and be deferred again before a later pass of the operation. Only a claim can do
-- that, and what has been claimed and written since the start is left: each job is changed once.

create or replace function penstock.is_due_by(job penstock.queued_jobs, p_until timestamptz)
returns boolean
language sql
immutable
as $$
    select penstock.is_deferred(job) and (job.attempt = 1 and job.snoozes is null or job.updated_at <= p_until)
$$;
comment on function penstock.is_due_by(penstock.queued_jobs, timestamptz) is
    'Part of matches_waiting: whether an operation run-now that was started at p_until makes a job due: one that was deferred then, and is so still.';

create or replace function penstock.make_due_matching(operation penstock.operations, p_looked uuid[], p_moment timestamptz)
returns penstock.operations
language plpgsql
as $$
declare
    queued constant record := penstock.lock_queued(operation, p_looked);
    of_type record;
begin
    for of_type in
        with ordered as (
            select job.id from penstock.queued_jobs as job where job.id = any (queued.locked) order by job.run_after, job.id
        ),
        numbered as materialized (
            select ordered.id, nextval('penstock.job_seq') as seq from ordered
        ),
        due as (
            update penstock.queued_jobs as job
            set run_after = least(job.run_after, p_moment), seq = numbered.seq, updated_at = p_moment
            from numbered
            where job.id = numbered.id
            returning job.name
        )
        select due.name, count(*)::integer as jobs from due group by due.name
    loop
        operation.done := operation.done + of_type.jobs;
        perform penstock.wake_claimers(of_type.name, of_type.jobs);
    end loop;
    operation.postponed := operation.postponed + penstock.left_over(operation, '{}', queued.matching);
    return operation;
end
$$;
comment on function penstock.make_due_matching(penstock.operations, uuid[], timestamptz) is
    'Part of advance_operation: makes those of these jobs that match due at once, in the order in which their times would have come. Returns the operation as it is then.';
