-- Groups that the handler of a job fills: they belong to that job until they are sealed. The head of tables/0013_workflows.sql has the whole.

create or replace function penstock.fill_group(p_id uuid, p_job uuid, p_lease bigint)
returns uuid
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    held boolean;
    marked boolean;
    created_at timestamptz;
begin
    select job.status = 'in-progress' and p_lease in (lease.id, lease.origin, lease.renews), job.awaited is not null into held, marked
    from penstock.queued_jobs as job
    left join penstock.leases as lease on lease.id = job.lease
    where job.id = p_job
    for no key update of job;
    if not found and not exists (select from penstock.archived_jobs as job where job.id = p_job) then
        -- A job of another database.
        return null;
    end if;
    if held is distinct from true then
        raise exception 'job % no longer belongs to this worker', p_job
            using errcode = 'PS409', hint = 'Stop: another worker may be running it.';
    end if;
    if not marked then
        -- Whatever ends the job tells of it, and resolve_workflows looks for the groups that it has left open.
        update penstock.queued_jobs as job set awaited = true where job.id = p_job;
    end if;
    update penstock.job_groups as job_group
    set filled_by = p_job
    where job_group.id = p_id and job_group.filled_by is distinct from p_job and job_group.sealed_at is null
        and job_group.cancelled_at is null and job_group.finished_at is null;
    select job_group.created_at into created_at from penstock.job_groups as job_group where job_group.id = p_id;
    return (penstock.derived_ids(created_at, array[format('fill %s %s', p_id, p_job)]))[1];
end
$$;
comment on function penstock.fill_group(uuid, uuid, bigint) is
    'Says that the handler of a job, which is held under this lease, adds the children of a job group: until it is sealed, the end of this job cancels it, and a failed attempt does not. Returns what the ids of the children follow from, in each attempt the same, which no other caller learns. Null: there is no such job in this database. PS409 when the job is not held.';

create or replace function penstock.is_left_open(p_group penstock.job_groups)
returns boolean
language sql
stable
as $$
    select p_group.filled_by is not null and p_group.sealed_at is null and p_group.cancelled_at is null and p_group.finished_at is null
        and (select 1 from penstock.queued_jobs as job where job.id = p_group.filled_by) is null
$$;
comment on function penstock.is_left_open(penstock.job_groups) is
    'Part of fold_ticks: whether a job group was not sealed when the job ended whose handler filled it, so that it is to be cancelled.';

create or replace function penstock.stop_left_group(p_id uuid, p_then uuid, p_moment timestamptz, p_since timestamptz)
returns boolean
language plpgsql
as $$
begin
    -- Before the group, whose end would release it where it runs at any end.
    perform from penstock.waiting_jobs as job where job.id = p_then for update skip locked;
    if found then
        perform penstock.ensure_archive(p_moment);
        perform penstock.end_waiting(array[p_then], 'cancelled', array['group'], null, p_moment);
    elsif exists (select from penstock.waiting_jobs as job where job.id = p_then) then
        insert into penstock.workflow_ticks (workflow, noted_at) values (p_id, p_since);
        return false;
    end if;
    return penstock.stop_group(p_id, p_moment, p_since);
end
$$;
comment on function penstock.stop_left_group(uuid, uuid, timestamptz, timestamptz) is
    'Part of fold_ticks: cancels a job group that was left open, which the caller has locked, as cancel_group does, but waits for no lock. Returns whether it was all; false: it wrote a tick for what is left, with p_since as its time.';
