-- Operations on all jobs that match a filter: preview, start and advance; functions/operations/ending.sql ends them on request.
-- tables/0012_operations.sql says how they go.
--
-- Every batch looks at a bounded number of jobs by the primary key, so that its time does not depend on how many of them match; for a
-- workflow by the index of its jobs, so that it does not read the queue.

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
        select count(*), count(*) < p_limit, (array_agg(found.id order by found.id))[:10]
        from (
            select job.id from penstock.archived_jobs as job
            where job.finished_at >= coalesce((filter ->> 'since')::timestamptz, '-infinity') and penstock.matches_finished(job, filter, moment)
            limit p_limit
        ) as found;
    else
        return query
        select count(*), count(*) < p_limit, (array_agg(found.id order by found.id))[:10]
        from (
            select job.id from penstock.queued_jobs as job where penstock.matches_waiting(job, p_kind, filter, moment)
            union all
            select job.id from penstock.waiting_jobs as job
            where penstock.matches_dependent(job, p_kind, filter, moment)
            limit p_limit
        ) as found;
    end if;
end
$$;
comment on function penstock.preview_operation(text, jsonb, integer) is
    'How many jobs match an operation now, at most p_limit (whole: there are no more), and the first ten of them by id. It changes nothing. Kinds and filters: see start_operation.';

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
            raise exception 'operation % is another one', p_id
                using errcode = 'PS409', hint = 'Take a new UUID for each operation.';
        end if;
    end if;
    return started;
end
$$;
comment on function penstock.start_operation(text, jsonb, uuid) is
    'Starts an operation on all jobs that match now. Kinds: cancel (queued jobs, and jobs that wait for others, are archived as cancelled, running ones are told), replay (finished jobs, by default those that failed, are enqueued again, unless a replay of them waits, runs or has succeeded), purge (the same, with the reason purged, and running ones are left), run-now (jobs that wait for their time or for a further attempt are due at once), set-priority (jobs that wait get the priority new_priority, a further text in the filter; jobs of pools have none). The filter has at least one of name, status, key, workflow (a job group), since, until (when enqueued; of replay: finished), and for replay reason and error (type of the last error). Workers do it in batches. p_id: so that a repeated call starts one.';

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
    reason constant text := case operation.kind
        when 'purge' then 'purged'
        else penstock.reason_of_group((operation.filter ->> 'workflow')::uuid)
    end;
    chosen record;
begin
    -- Those that wait for others first: what is released meanwhile is found in the queue.
    chosen := penstock.lock_dependents(operation, p_looked);
    operation.done := operation.done + penstock.end_waiting(
        chosen.locked, 'cancelled', array_fill(reason, array[cardinality(chosen.locked)]), null, p_moment
    );
    operation.postponed := operation.postponed + (select count(*) from penstock.waiting_jobs as job where job.id = any (chosen.matching));
    chosen := penstock.lock_queued(operation, p_looked);
    operation.done := operation.done + penstock.cancel_rows(chosen.locked, reason, p_moment);
    -- What is gone or has changed meanwhile matches no more; what is left of the others is locked by another transaction.
    operation.postponed := operation.postponed + (
        select count(*) from penstock.queued_jobs as job
        where job.id = any (chosen.matching) and job.id <> all (chosen.locked)
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

create or replace function penstock.has_lakes_left(p_operation uuid)
returns boolean
language sql
stable
as $$
    select exists (
        select from penstock.lakes
        join penstock.erasures on erasures.operation = p_operation
        where lakes.name <> all (erasures.lakes)
    )
$$;
comment on function penstock.has_lakes_left(uuid) is 'Part of advance_operation: whether there are lakes from which an erasure has not erased yet.';

create or replace function penstock.next_unfinished(p_after uuid, p_limit integer, p_workflow uuid default null)
returns uuid[]
language plpgsql
stable
as $$
begin
    if p_workflow is not null then
        return array(
            select known.id
            from (
                (
                    select job.id from penstock.queued_jobs as job
                    where job.workflow = p_workflow and job.id >= coalesce(p_after, '00000000-0000-0000-0000-000000000000')
                        and job.id is distinct from p_after
                    order by job.id
                    limit p_limit
                )
                union
                (
                    select job.id from penstock.waiting_jobs as job
                    where job.workflow = p_workflow and job.id >= coalesce(p_after, '00000000-0000-0000-0000-000000000000')
                        and job.id is distinct from p_after
                    order by job.id
                    limit p_limit
                )
            ) as known
            order by known.id
            limit p_limit
        );
    end if;
    return array(
        select known.id
        from (
            (
                select job.id from penstock.queued_jobs as job
                where p_after is null or job.id > p_after
                order by job.id
                limit p_limit
            )
            union
            (
                select job.id from penstock.waiting_jobs as job
                where p_after is null or job.id > p_after
                order by job.id
                limit p_limit
            )
        ) as known
        order by known.id
        limit p_limit
    );
end
$$;
comment on function penstock.next_unfinished(uuid, integer, uuid) is
    'Part of advance_operation: the next ids, in their order, of jobs that are queued, run or wait for others; with p_workflow only of its jobs. p_after null: from the first on.';

create or replace function penstock.do_batch(p_operation penstock.operations, p_limit integer, p_moment timestamptz)
returns penstock.operations
language plpgsql
as $$
declare
    operation penstock.operations := p_operation;
    most integer := p_limit;
    last date;
    looked uuid[];
begin
    if operation.kind = 'erase' then
        return penstock.advance_erasure(operation, p_limit, p_moment);
    elsif operation.kind = 'replay' then
        -- A replay costs as much as several cancellations.
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
        looked := penstock.next_unfinished(operation.at_id, most, (operation.filter ->> 'workflow')::uuid);
        operation := case operation.kind
            when 'set-priority' then penstock.prioritise_matching(operation, looked, p_moment)
            when 'run-now' then penstock.make_due_matching(operation, looked, p_moment)
            else penstock.cancel_matching(operation, looked, p_moment)
        end;
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
    return operation;
end
$$;
comment on function penstock.do_batch(penstock.operations, integer, timestamptz) is
    'Part of advance_operation: the next batch of an operation, whose row the caller has locked. Returns the operation as it is then, which is not written yet.';

create or replace function penstock.advance_operation(p_limit integer default 1000)
returns penstock.operations
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    operation penstock.operations;
    failing uuid[] := '{}';
begin
    perform penstock.check_limit(p_limit, 10000);
    loop
        -- One that has to wait for other transactions looks again after a second.
        select * into operation
        from penstock.operations
        where state = 'running' and (postponed = 0 or at_id is not null or updated_at < moment - interval '1 second' or updated_at > moment)
            -- An erasure waits for those who reach the lakes, and own the tables.
            and (phase is null or phase <> 'vacuum' and (phase <> 'lake' or not penstock.has_lakes_left(id)))
            and id <> all (failing)
        order by updated_at
        limit 1
        for update skip locked;
        if not found then
            return null;
        end if;
        perform pg_current_xact_id();
        perform penstock.ensure_archive(moment);
        if operation.error like 'the batch fails: %' then
            operation.error := null;
        end if;
        begin
            operation := penstock.do_batch(operation, p_limit, moment);
            exit;
        exception
            when transaction_rollback or lock_not_available or insufficient_resources or operator_intervention then
                raise;
            when others then
                -- It holds up no other one, and is tried again when these have had their batch.
                failing := failing || operation.id;
                update penstock.operations
                set updated_at = greatest(clock_timestamp(), moment), error = left(format('the batch fails: %s (SQLSTATE %s)', sqlerrm, sqlstate), 1000)
                where id = operation.id;
        end;
    end loop;
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
        error = operation.error,
        filter = operation.filter,
        phase = operation.phase,
        counts = operation.counts
    where id = operation.id
    returning * into operation;
    return operation;
end
$$;
comment on function penstock.advance_operation(integer) is
    'Does the next batch of an operation, which looks at up to p_limit jobs, in one transaction: of the one whose last batch is the oldest. Returns it, or null when none is to be advanced now. One whose batch raises an error notes that in its column error, and is passed over. The maintenance of every worker calls it.';
