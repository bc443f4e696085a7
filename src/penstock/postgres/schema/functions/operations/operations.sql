-- Operations on all jobs that match a filter: preview, start, advance, cancel. tables/0012_operations.sql says how they go.
--
-- Every batch looks at a bounded number of jobs by the primary key, so that its time does not depend on how many of them match.

create or replace function penstock.check_operation(p_kind text, p_filter jsonb)
returns jsonb
language plpgsql
stable
as $$
declare
    unknown text;
    status constant text := p_filter ->> 'status';
    statuses constant text[] := case p_kind
        when 'cancel' then array['queued', 'in-progress']
        when 'purge' then array['queued']
        when 'replay' then array['failed', 'succeeded', 'expired', 'cancelled']
    end;
begin
    if statuses is null then
        raise exception 'unknown operation: %', coalesce(left(p_kind, 100), 'null')
            using errcode = 'PS400', hint = 'An operation is cancel, replay or purge.';
    end if;
    perform penstock.check_json(p_filter, 'a filter', 65536);
    if p_filter is null or jsonb_typeof(p_filter) <> 'object' then
        raise exception 'a filter must be an object' using errcode = 'PS400', hint = 'For example {"name": "invoice-shipments", "status": "failed"}.';
    end if;
    select each.key into unknown
    from jsonb_each(p_filter) as each
    where each.key not in ('name', 'status', 'key', 'reason', 'error', 'since', 'until')
        or jsonb_typeof(each.value) not in ('string', 'null')
        or p_kind <> 'replay' and each.key in ('reason', 'error')
    limit 1;
    if found then
        raise exception 'invalid condition of a filter for %: %', p_kind, left(unknown, 100)
            using errcode = 'PS400', hint = 'Conditions are texts: name, status, key, since and until; of finished jobs also reason and error.';
    end if;
    p_filter := jsonb_strip_nulls(p_filter);
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
        perform penstock.check_times(array[(p_filter ->> 'since')::timestamptz, (p_filter ->> 'until')::timestamptz]);
    exception
        when data_exception then
            raise exception 'since or until is not a time' using errcode = 'PS400', hint = 'Write a time such as 2026-01-11T18:26:26Z.';
    end;
    -- A replay without a status is one of failed jobs.
    return case when p_kind = 'replay' and not p_filter ? 'status' then p_filter || '{"status": "failed"}' else p_filter end;
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
        and (not p_filter ? 'status' or job.status::text = p_filter ->> 'status')
        and (not p_filter ? 'key' or job.key = p_filter ->> 'key')
        and (not p_filter ? 'since' or job.created_at >= (p_filter ->> 'since')::timestamptz)
        and (not p_filter ? 'until' or job.created_at < (p_filter ->> 'until')::timestamptz)
$$;
comment on function penstock.matches_waiting(penstock.queued_jobs, text, jsonb, timestamptz) is
    'Part of the operations: whether a job that is not finished is to be changed by an operation that was started at p_until.';

create or replace function penstock.matches_finished(job penstock.archived_jobs, p_filter jsonb, p_until timestamptz)
returns boolean
language sql
stable
as $$
    select job.status::text = p_filter ->> 'status'
        and job.finished_at <= p_until
        and (not p_filter ? 'name' or job.name = p_filter ->> 'name')
        and (not p_filter ? 'key' or job.key = p_filter ->> 'key')
        and (not p_filter ? 'reason' or job.reason = p_filter ->> 'reason')
        and (not p_filter ? 'error' or job.errors -> -1 ->> 'type' = p_filter ->> 'error')
        and (not p_filter ? 'since' or job.finished_at >= (p_filter ->> 'since')::timestamptz)
        and (not p_filter ? 'until' or job.finished_at < (p_filter ->> 'until')::timestamptz)
$$;
comment on function penstock.matches_finished(penstock.archived_jobs, jsonb, timestamptz) is
    'Part of the operations: whether a finished job is to be replayed by an operation that was started at p_until.';

create or replace function penstock.preview_operation(p_kind text, p_filter jsonb, p_limit integer default 100000)
returns table (jobs bigint, whole boolean, sample uuid[])
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    filter constant jsonb := penstock.check_operation(p_kind, p_filter);
begin
    perform penstock.check_limit(p_limit, 1000000);
    if p_kind = 'replay' then
        return query
        select count(*), count(*) < p_limit, (array_agg(found.id))[:10]
        from (
            select job.id from penstock.archived_jobs as job
            where job.finished_at >= coalesce((filter ->> 'since')::timestamptz, '-infinity') and penstock.matches_finished(job, filter, moment)
            limit p_limit
        ) as found;
    else
        return query
        select count(*), count(*) < p_limit, (array_agg(found.id))[:10]
        from (
            select job.id from penstock.queued_jobs as job where penstock.matches_waiting(job, p_kind, filter, moment) limit p_limit
        ) as found;
    end if;
end
$$;
comment on function penstock.preview_operation(text, jsonb, integer) is
    'How many jobs match an operation now, at most p_limit (whole: there are no more), and up to ten of them. It changes nothing. Kinds and filters: see start_operation.';

create or replace function penstock.start_operation(p_kind text, p_filter jsonb, p_id uuid default null)
returns penstock.operations
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    filter constant jsonb := penstock.check_operation(p_kind, p_filter);
    started penstock.operations;
begin
    insert into penstock.operations (id, kind, filter, started_at, updated_at)
    values (coalesce(p_id, penstock.new_id()), p_kind, filter, moment, moment)
    on conflict (id) do nothing
    returning * into started;
    if not found then
        select * into started from penstock.operations where operations.id = p_id;
        if started.kind <> p_kind or started.filter <> filter then
            raise exception 'operation % is another one: %', p_id, started.kind
                using errcode = 'PS409', hint = 'Take a new UUID for each operation.';
        end if;
    end if;
    return started;
end
$$;
comment on function penstock.start_operation(text, jsonb, uuid) is
    'Starts an operation on all jobs that match now. Kinds: cancel (queued jobs are archived as cancelled, running ones are told), replay (finished jobs, by default those that failed, are enqueued again, unless a replay of them waits, runs or has succeeded), purge (queued jobs are archived as cancelled, with the reason purged). The filter has at least one of name, status, key, since, until (when enqueued; of replay: finished), and for replay reason and error (type of the last error). Workers do it in batches. p_id: so that a repeated call starts one.';

create or replace function penstock.cancel_operation(p_id uuid)
returns penstock.operations
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    cancelled penstock.operations;
begin
    update penstock.operations
    set state = 'cancelled', finished_at = penstock.clock()
    where id = p_id and state = 'running';
    select * into cancelled from penstock.operations where id = p_id;
    if not found then
        raise exception 'no such operation: %', p_id
            using errcode = 'PS404', hint = 'See: select * from penstock.operations order by started_at desc;';
    end if;
    return cancelled;
end
$$;
comment on function penstock.cancel_operation(uuid) is
    'Ends an operation after its current batch; what it has changed stays so. Returns it; one that has ended stays as it is. PS404 when there is none.';

create or replace function penstock.cancel_rows(p_jobs uuid[], p_reason text, p_moment timestamptz)
returns integer
language plpgsql
as $$
declare
    waiting uuid[];
    names text[];
    told record;
    running uuid[];
    cancelled integer;
begin
    -- The caller has locked them.
    select array_agg(id) filter (where status = 'queued'), array_agg(id) filter (where status = 'in-progress'), array_agg(distinct name)
    into waiting, running, names
    from penstock.queued_jobs
    where id = any (p_jobs);
    cancelled := penstock.archive_waiting(waiting, 'cancelled', p_reason, null, p_moment);
    if running is not null then
        update penstock.queued_jobs set cancel_requested_at = coalesce(cancel_requested_at, p_moment) where id = any (running);
        -- In the order of their numbers, as settlements lock them.
        perform from penstock.leases
        where id = any (array(select lease from penstock.queued_jobs where id = any (running)))
        order by id
        for update;
        for told in
            update penstock.leases
            set cancelled = array(
                select unnest(leases.cancelled)
                union
                select job.id from penstock.queued_jobs as job where job.id = any (running) and job.lease = leases.id
            )
            where id = any (array(select lease from penstock.queued_jobs where id = any (running)))
            returning worker, leases.cancelled[1] as job
        loop
            -- One job is enough: the worker then asks which of its jobs are cancelled.
            perform penstock.tell(told.worker, 'cancel', told.job::text);
        end loop;
        cancelled := cancelled + cardinality(running);
    end if;
    -- A job that waited for its retry may have held its key.
    perform penstock.wake_claimers(freed.name, 1)
    from unnest(names) as freed (name)
    where exists (select from penstock.pools where pools.name = freed.name);
    return cancelled;
end
$$;
comment on function penstock.cancel_rows(uuid[], text, timestamptz) is
    'Part of the operations: cancels these jobs, which the caller has locked: queued ones are archived, with this reason, and of running ones the workers are told. Returns how many.';

create or replace function penstock.cancel_matching(operation penstock.operations, p_looked uuid[], p_moment timestamptz)
returns penstock.operations
language plpgsql
as $$
declare
    matching uuid[];
    locked uuid[];
begin
    matching := array(
        select job.id from penstock.queued_jobs as job
        where job.id = any (p_looked) and penstock.matches_waiting(job, operation.kind, operation.filter, operation.started_at)
    );
    select coalesce(array_agg(free.id), '{}') into locked
    from (
        select job.id from penstock.queued_jobs as job
        where job.id = any (matching) and penstock.matches_waiting(job, operation.kind, operation.filter, operation.started_at)
        order by job.id
        for update skip locked
    ) as free;
    operation.done := operation.done + penstock.cancel_rows(
        locked, case operation.kind when 'purge' then 'purged' end, p_moment
    );
    -- What is gone or has changed meanwhile matches no more; what is left of the others is locked by another transaction.
    operation.postponed := operation.postponed + (
        select count(*) from penstock.queued_jobs as job
        where job.id = any (matching) and job.id <> all (locked)
            and penstock.matches_waiting(job, operation.kind, operation.filter, operation.started_at)
    );
    return operation;
end
$$;
comment on function penstock.cancel_matching(penstock.operations, uuid[], timestamptz) is
    'Part of advance_operation: cancels those of these jobs that match. Returns the operation as it is then.';

create or replace function penstock.replay_matching(operation penstock.operations, p_looked uuid[])
returns penstock.operations
language plpgsql
as $$
declare
    job uuid;
    problem text;
begin
    for job in
        select archived.id from penstock.archived_jobs as archived
        where archived.id = any (p_looked)
            and archived.finished_at >= operation.at_day::timestamp at time zone 'UTC'
            and archived.finished_at < (operation.at_day + 1)::timestamp at time zone 'UTC'
            and penstock.matches_finished(archived, operation.filter, operation.started_at)
        order by archived.id
    loop
        begin
            perform penstock.replay(job, p_force => false);
            operation.done := operation.done + 1;
        exception
            when sqlstate 'PS400' or sqlstate 'PS404' or sqlstate 'PS409' or sqlstate 'PS413' then
                get stacked diagnostics problem = message_text;
                if exists (select from penstock.replays_of(job) as earlier where earlier.status in ('queued', 'in-progress', 'succeeded')) then
                    operation.skipped := operation.skipped + 1;
                else
                    operation.failed := operation.failed + 1;
                    operation.error := left(problem, 1000);
                end if;
        end;
    end loop;
    return operation;
end
$$;
comment on function penstock.replay_matching(penstock.operations, uuid[]) is
    'Part of advance_operation: replays those of these jobs of its day that match, each by penstock.replay without force. Returns the operation as it is then.';

create or replace function penstock.advance_operation(p_limit integer default 1000)
returns penstock.operations
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    -- A replay costs as much as several cancellations.
    most integer := p_limit;
    operation penstock.operations;
    last date;
    looked uuid[];
begin
    perform penstock.check_limit(p_limit, 10000);
    -- One that has to wait for other transactions looks again after a second.
    select * into operation
    from penstock.operations
    where state = 'running' and (postponed = 0 or at_id is not null or updated_at < moment - interval '1 second' or updated_at > moment)
    order by updated_at
    limit 1
    for update skip locked;
    if not found then
        return null;
    end if;
    perform pg_current_xact_id();
    perform penstock.ensure_archive(moment);
    if operation.kind = 'replay' then
        most := least(p_limit, 200);
        last := least((operation.filter ->> 'until')::timestamptz, operation.started_at) at time zone 'UTC';
        operation.at_day := coalesce(
            operation.at_day,
            greatest(
                (select min(finished_at at time zone 'UTC')::date from penstock.archived_jobs),
                ((operation.filter ->> 'since')::timestamptz at time zone 'UTC')::date
            )
        );
        looked := array(
            select archived.id from penstock.archived_jobs as archived
            where archived.finished_at >= operation.at_day::timestamp at time zone 'UTC'
                and archived.finished_at < (operation.at_day + 1)::timestamp at time zone 'UTC'
                and (operation.at_id is null or archived.id > operation.at_id)
            order by archived.id
            limit most
        );
        operation := penstock.replay_matching(operation, looked);
    else
        if operation.at_id is null then
            operation.postponed := 0;
        end if;
        looked := array(
            select job.id from penstock.queued_jobs as job
            where operation.at_id is null or job.id > operation.at_id
            order by job.id
            limit most
        );
        operation := penstock.cancel_matching(operation, looked, moment);
    end if;
    operation.looked_at := operation.looked_at + cardinality(looked);
    operation.at_id := looked[cardinality(looked)];
    if cardinality(looked) < most then
        -- The end of a day of the archive, or of a pass over the queue.
        operation.at_id := null;
        if operation.kind = 'replay' and operation.at_day < last then
            operation.at_day := operation.at_day + 1;
        elsif operation.postponed = 0 then
            operation.state := 'finished';
        end if;
    end if;
    update penstock.operations
    set state = operation.state,
        updated_at = greatest(clock_timestamp(), moment),
        finished_at = case when operation.state = 'finished' then moment end,
        looked_at = operation.looked_at,
        done = operation.done,
        skipped = operation.skipped,
        failed = operation.failed,
        postponed = operation.postponed,
        at_day = operation.at_day,
        at_id = operation.at_id,
        error = operation.error
    where id = operation.id
    returning * into operation;
    return operation;
end
$$;
comment on function penstock.advance_operation(integer) is
    'Does the next batch of an operation, which looks at up to p_limit jobs, in one transaction: of the one whose last batch is the oldest. Returns it, or null when none is to be advanced now. The maintenance of every worker calls it.';
