-- Writers: the fence of those that are Spark jobs, whose writes count while the job is held as when their driver was started; and
-- forgetting one.

create or replace function penstock.require_attempt(p_job uuid, p_attempt integer, p_lease bigint)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    -- The number of an attempt does not tell two claims apart: a job that was released before its end is claimed again as the same attempt.
    if not exists (
        select from penstock.queued_jobs as job
        join penstock.leases as lease on lease.id = job.lease
        where job.id = p_job and job.status = 'in-progress' and job.attempt = p_attempt and p_lease in (lease.id, lease.origin)
    ) then
        raise exception 'attempt % of Spark job % does not run any more under lease %', p_attempt, p_job, coalesce(p_lease::text, 'null')
            using errcode = 'PS409', hint = 'The job was taken over by another worker, cancelled, or has ended: what this driver writes does not count.';
    end if;
end
$$;
comment on function penstock.require_attempt(uuid, integer, bigint) is
    'Raises PS409 unless this attempt of a job runs under the lease of this claim, also when that was extended. The driver of a Spark job calls it in the transactions of its writes, so that a driver that lives on after its worker writes nothing.';

create or replace function penstock.forget_writer(p_writer text, p_target text default null)
returns bigint
language sql
security definer
set search_path = penstock, pg_temp
as $$
    with forgotten as (
        delete from penstock.sink_epochs
        where writer = p_writer and role = session_user and (target = p_target or p_target is null)
        returning 1
    )
    select count(*) from forgotten
$$;
comment on function penstock.forget_writer(text, text) is
    'Forgets what the caller has written under a name, to one target or to all, so that another query may have the name. Returns how many notes.';
