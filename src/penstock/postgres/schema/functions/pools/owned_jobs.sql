-- The jobs in the slots of a member: whether a slot is busy, what is cancelled, and the end of what is in progress when a slot moves.

create or replace function penstock.is_busy(p_group text, p_slot integer)
returns boolean
language sql
stable
as $$
    select exists (
        select
        from penstock.leases
        cross join unnest(leases.jobs) as held (id)
        join penstock.queued_jobs as job on job.id = held.id
        where leases.name = p_group and job.slot = p_slot and job.status = 'in-progress'
    ) or exists (
        select from penstock.standing_jobs where name = p_group and slot = p_slot and running_by is not null
    )
$$;
comment on function penstock.is_busy(text, integer) is 'Whether jobs or standing jobs of a slot are running.';

create or replace function penstock.end_slots(p_group text, p_member text, p_slots integer[], p_error jsonb)
returns integer
language plpgsql
as $$
declare
    -- A slot that moves, and a member that leaves, say nothing about what is in progress.
    speaks constant boolean := coalesce(p_error ->> 'type', '') not in ('SlotMoved', 'WorkerLeft') and penstock.speaks_of(p_member);
    ids uuid[];
    attempts smallint[];
    leases bigint[];
begin
    if p_slots is null and speaks then
        perform penstock.lose_standing(p_group, p_member);
    end if;
    update penstock.standing_jobs
    set running_by = null,
        running_epoch = null,
        tried_with = null
    where name = p_group and running_by = p_member and (p_slots is null or slot = any (p_slots));
    delete from penstock.standing_jobs
    where name = p_group and not wanted and running_by is null;
    -- A job that another transaction has locked, such as one that finishes it, holds its key until that ends.
    select array_agg(job.id), array_agg(job.attempt), array_agg(job.lease)
    into ids, attempts, leases
    from (
        select job.id, job.attempt, job.lease
        from penstock.leases as lease
        cross join unnest(lease.jobs) as held (id)
        join penstock.queued_jobs as job on job.id = held.id
        where lease.worker = p_member
            and lease.name = p_group
            and job.lease = lease.id
            and job.status = 'in-progress'
            and (p_slots is null or job.slot = any (p_slots))
        for update of job skip locked
    ) as job;
    if ids is null then
        return 0;
    end if;
    perform penstock.ensure_archive(penstock.clock());
    return penstock.end_lost(p_member, ids, attempts, leases, p_error, speaks, penstock.clock());
end
$$;
comment on function penstock.end_slots(text, text, integer[], jsonb) is
    'Part of end_owned_work: ends as failed what a member has in progress in slots (null: in all), to be retried from its place by the next owner.';

create or replace function penstock.cancelled_of(p_name text, p_member text)
returns uuid[]
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select array_agg(asked.job)
    from penstock.leases
    cross join unnest(leases.cancelled) as asked (job)
    where leases.worker = p_member and leases.name = p_name
$$;
comment on function penstock.cancelled_of(text, text) is 'Running jobs of a member whose cancellation was requested; a notification reports it too.';
