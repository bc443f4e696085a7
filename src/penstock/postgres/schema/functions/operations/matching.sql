-- The filters of operations: which are accepted, whether a job matches one, and the jobs that do, locked.

create or replace function penstock.check_operation(p_kind text, p_filter jsonb)
returns jsonb
language plpgsql
stable
as $$
declare
    unknown text;
    changes jsonb := '{}';
    status constant text := p_filter ->> 'status';
    statuses constant text[] := case p_kind
        when 'cancel' then array['waiting', 'queued', 'in-progress']
        when 'purge' then array['waiting', 'queued']
        when 'set-priority' then array['waiting', 'queued']
        when 'run-now' then array['queued']
        when 'replay' then array['failed', 'succeeded', 'expired', 'cancelled']
    end;
begin
    if statuses is null then
        raise exception 'unknown operation: %', coalesce(left(p_kind, 100), 'null')
            using errcode = 'PS400', hint = 'An operation is cancel, replay, purge, run-now or set-priority.';
    end if;
    perform penstock.check_json(p_filter, 'a filter', 65536);
    if p_filter is null or jsonb_typeof(p_filter) <> 'object' then
        raise exception 'a filter must be an object' using errcode = 'PS400', hint = 'For example {"name": "invoice-shipments", "status": "failed"}.';
    end if;
    -- What it is to be, and not which jobs.
    p_filter := jsonb_strip_nulls(p_filter);
    if p_kind = 'set-priority' then
        perform penstock.check_new_priority(p_filter);
        changes := jsonb_build_object('new_priority', p_filter ->> 'new_priority');
        p_filter := p_filter - 'new_priority';
    end if;
    select each.key into unknown
    from jsonb_each(p_filter) as each
    where each.key not in ('name', 'status', 'key', 'workflow', 'reason', 'error', 'signature', 'since', 'until')
        or jsonb_typeof(each.value) not in ('string', 'null')
        or p_kind <> 'replay' and each.key in ('reason', 'error', 'signature')
    limit 1;
    if found then
        raise exception 'invalid condition of a filter for %: %', p_kind, left(unknown, 100)
            using errcode = 'PS400', hint = 'Conditions are texts: name, status, key, workflow, since and until; of finished jobs also reason, error and signature.';
    end if;
    if p_filter = '{}' then
        raise exception 'a filter without a condition matches every job'
            using errcode = 'PS400', hint = 'Give at least one condition, such as the name of a job type.';
    end if;
    if status is not null and status <> all (statuses) then
        raise exception '% does not apply to jobs with the status %', p_kind, left(status, 100)
            using errcode = 'PS400', hint = 'It applies to jobs that are ' || array_to_string(statuses, ', ') || '.';
    end if;
    if p_filter ? 'name' and not exists (select from penstock.jobs where name = p_filter ->> 'name')
        and not (p_kind = 'replay' and exists (select from penstock.archived_jobs where name = p_filter ->> 'name')) then
        perform penstock.require_type(p_filter ->> 'name');
    end if;
    begin
        perform (p_filter ->> 'workflow')::uuid;
        -- Each later batch reads them again, in a session of its own.
        perform penstock.check_times(array[penstock.zoned_time(p_filter ->> 'since', 'since'), penstock.zoned_time(p_filter ->> 'until', 'until')]);
    exception
        when data_exception then
            raise exception 'since or until is not a time, or workflow is not the id of a job group'
                using errcode = 'PS400', hint = 'Write a time such as 2026-01-11T18:26:26Z.';
    end;
    -- A replay without a status is one of failed jobs.
    return case when p_kind = 'replay' and not p_filter ? 'status' then p_filter || '{"status": "failed"}' else p_filter || changes end;
end
$$;
comment on function penstock.check_operation(text, jsonb) is
    'Part of preview_operation and start_operation: the filter as it is stored, or PS400 when it does not fit the kind, PS404 when there is no such job type.';

create or replace function penstock.matches_waiting(job penstock.queued_jobs, p_kind text, p_filter jsonb, p_until timestamptz)
returns boolean
language sql
stable
as $$
    select (job.status = 'queued' or p_kind = 'cancel' and job.cancel_requested_at is null)
        and job.created_at <= p_until
        and (not p_filter ? 'name' or job.name = p_filter ->> 'name')
        and (not p_filter ? 'status' or penstock.shown_status(job) = p_filter ->> 'status')
        and (not p_filter ? 'key' or job.key = p_filter ->> 'key')
        and (not p_filter ? 'workflow' or job.workflow = (p_filter ->> 'workflow')::uuid)
        and (not p_filter ? 'since' or job.created_at >= (p_filter ->> 'since')::timestamptz)
        and (not p_filter ? 'until' or job.created_at < (p_filter ->> 'until')::timestamptz)
        and (p_kind <> 'run-now' or penstock.is_due_by(job, p_until))
        and (
            not p_filter ? 'new_priority'
            or job.priority <> (p_filter ->> 'new_priority')::smallint and not exists (select from penstock.pools where pools.name = job.name)
        )
$$;
comment on function penstock.matches_waiting(penstock.queued_jobs, text, jsonb, timestamptz) is
    'Part of the operations: whether a job that is not finished is to be changed by an operation that was started at p_until.';

create or replace function penstock.matches_dependent(job penstock.waiting_jobs, p_kind text, p_filter jsonb, p_until timestamptz)
returns boolean
language sql
stable
as $$
    select p_kind <> 'run-now' and coalesce(p_filter ->> 'status', 'waiting') = 'waiting'
        and penstock.matches_waiting(penstock.as_queued(job), p_kind, p_filter - 'status', p_until)
$$;
comment on function penstock.matches_dependent(penstock.waiting_jobs, text, jsonb, timestamptz) is
    'Part of the operations: whether a job that waits for others is to be changed by an operation that was started at p_until.';

create or replace function penstock.matches_finished(job penstock.archived_jobs, p_filter jsonb, p_until timestamptz)
returns boolean
language sql
stable
as $$
    select job.status::text = p_filter ->> 'status'
        and job.finished_at <= p_until
        and (not p_filter ? 'name' or job.name = p_filter ->> 'name')
        and (not p_filter ? 'key' or job.key = p_filter ->> 'key')
        and (not p_filter ? 'workflow' or job.workflow = (p_filter ->> 'workflow')::uuid)
        and (not p_filter ? 'reason' or job.reason = p_filter ->> 'reason')
        and (not p_filter ? 'error' or job.errors -> -1 ->> 'type' = p_filter ->> 'error')
        and (not p_filter ? 'signature' or job.signature = p_filter ->> 'signature')
        and (not p_filter ? 'since' or job.finished_at >= (p_filter ->> 'since')::timestamptz)
        and (not p_filter ? 'until' or job.finished_at < (p_filter ->> 'until')::timestamptz)
$$;
comment on function penstock.matches_finished(penstock.archived_jobs, jsonb, timestamptz) is
    'Part of the operations: whether a finished job is to be replayed by an operation that was started at p_until.';

create or replace function penstock.lock_dependents(operation penstock.operations, p_looked uuid[], out matching uuid[], out locked uuid[])
language plpgsql
as $$
begin
    matching := array(
        select job.id from penstock.waiting_jobs as job
        where job.id = any (p_looked)
            and penstock.matches_dependent(job, operation.kind, operation.filter, operation.started_at)
    );
    locked := array(select job.id from penstock.waiting_jobs as job where job.id = any (matching) order by job.id for update skip locked);
end
$$;
comment on function penstock.lock_dependents(penstock.operations, uuid[]) is
    'Part of advance_operation: those of these jobs that match and wait for other jobs, and those of them that no other transaction holds, which it locks.';

create or replace function penstock.lock_queued(operation penstock.operations, p_looked uuid[], out matching uuid[], out locked uuid[])
language plpgsql
as $$
begin
    matching := array(
        select job.id from penstock.queued_jobs as job
        where job.id = any (p_looked) and penstock.matches_waiting(job, operation.kind, operation.filter, operation.started_at)
    );
    locked := array(
        select job.id from penstock.queued_jobs as job
        where job.id = any (matching) and penstock.matches_waiting(job, operation.kind, operation.filter, operation.started_at)
        order by job.id
        for update skip locked
    );
end
$$;
comment on function penstock.lock_queued(penstock.operations, uuid[]) is
    'Part of advance_operation: those of these jobs that match and are queued, and those of them that no other transaction holds, which it locks.';

create or replace function penstock.left_over(operation penstock.operations, p_dependents uuid[], p_queued uuid[])
returns bigint
language sql
as $$
    select
        (
            select count(*) from penstock.waiting_jobs as job
            where job.id = any (p_dependents) and penstock.matches_dependent(job, operation.kind, operation.filter, operation.started_at)
        )
        + (
            select count(*) from penstock.queued_jobs as job
            where job.id = any (p_queued) and penstock.matches_waiting(job, operation.kind, operation.filter, operation.started_at)
        )
$$;
comment on function penstock.left_over(penstock.operations, uuid[], uuid[]) is
    'Part of advance_operation: how many of these jobs, which wait for others or are queued, match still after the operation has changed those that it had locked: another transaction has them locked.';
