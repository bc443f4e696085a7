-- Resolve: what follows from the ends of jobs for which others wait. The head of tables/0013_workflows.sql has the whole.
--
-- Only the transaction that has the advisory lock releases waiting jobs and deletes ticks. So two ends of which a job was waiting for both
-- are folded one after the other, and the second sees what the first did. It never waits for a row: what another transaction has locked is
-- postponed, in a tick of its own, until the next call.

create or replace function penstock.link_dependencies(p_limit integer)
returns integer
language plpgsql
as $$
declare
    unlinked bigint[];
    wanted uuid[];
    waiting uuid[];
    marked uuid[];
    more uuid[];
    busy uuid[] := '{}';
    gone uuid[];
    linked integer;
begin
    -- Again while there are jobs that another transaction has locked: with dependencies on others in the place of those on them.
    loop
        select array_agg(found.id), array_agg(distinct found.after) into unlinked, wanted
        from (
            select dependency.id, dependency.after from penstock.job_dependencies as dependency
            where not dependency.linked and dependency.after <> all (busy)
            order by dependency.id
            limit p_limit
            -- What is locked goes with its job, or is linked by a later call.
            for update skip locked
        ) as found;
        if unlinked is null then
            return 0;
        end if;
        -- Each a statement of its own, in the order in which a job goes through the tables.
        waiting := array(select job.id from penstock.waiting_jobs as job where job.id = any (wanted))
            || array(select job_group.id from penstock.job_groups as job_group where job_group.id = any (wanted) and job_group.finished_at is null);
        marked := array(
            select job.id from penstock.queued_jobs as job
            where job.id = any (wanted) and job.id <> all (waiting)
            for update skip locked
        );
        more := array(
            select job.id from penstock.queued_jobs as job
            where job.id = any (wanted) and job.id <> all (waiting) and job.id <> all (marked)
        );
        exit when cardinality(more) = 0;
        busy := busy || more;
    end loop;
    update penstock.queued_jobs as job set awaited = true where job.id = any (marked) and job.awaited is null;
    gone := array(select id from unnest(wanted) as id where id <> all (waiting) and id <> all (marked));
    if cardinality(gone) > 0 then
        -- The status of a job whose day was pruned is null: it is not known how it ended.
        perform penstock.note_ends(array(
            select row(
                ended.id, null, true,
                coalesce(
                    (select job_group.status from penstock.job_groups as job_group where job_group.id = ended.id),
                    (select job.status from penstock.archived_jobs as job where job.id = ended.id order by job.finished_at desc limit 1)
                )
            )::penstock.ended_job
            from unnest(gone) as ended (id)
        ));
    end if;
    update penstock.job_dependencies as dependency
    set linked = true
    where dependency.id = any (unlinked);
    get diagnostics linked = row_count;
    return linked;
end
$$;
comment on function penstock.link_dependencies(integer) is
    'Part of resolve_workflows: marks up to p_limit jobs for which others wait, and writes a tick for those that have ended. Returns how many dependencies it linked.';

create or replace function penstock.requeue_released(p_ids uuid[])
returns void
language plpgsql
-- The key may be that of a job which another transaction is about to enqueue.
set lock_timeout = '100ms'
as $$
begin
    perform penstock.requeue(p_ids);
exception
    when unique_violation or lock_not_available then
        return;
end
$$;
comment on function penstock.requeue_released(uuid[]) is
    'Part of release_waiting: jobs that have a unique key coalesce from now on, unless another job has it.';

-- Long, since all that another transaction may have locked is in one block: it is done for all of these jobs, or for none, or for the halves.
create or replace function penstock.release_of_type(
    p_name text, p_ids uuid[], p_keys text[], p_priorities smallint[], p_groups uuid[], p_moment timestamptz,
    inout tries integer, out kept uuid[]
)
language plpgsql
-- Another transaction may be about to enqueue the same id, or have locked the slots of the pool.
set lock_timeout = '50ms'
as $$
declare
    half constant integer := cardinality(p_ids) / 2;
    slots integer[];
    placed boolean := false;
    queued uuid[];
    known uuid[];
    problem text;
begin
    begin
        perform penstock.require_type(p_name);
        slots := penstock.slots_for(p_name, p_keys, p_priorities);
    exception
        when sqlstate 'PS400' or sqlstate 'PS404' or sqlstate 'PS409' then
            -- The type was dropped, or is a pool since, and the job has no key.
            get stacked diagnostics problem = message_text;
            perform penstock.end_waiting(
                p_ids, 'cancelled', array_fill('dropped'::text, array[cardinality(p_ids)]),
                array_fill(jsonb_build_object('type', 'NotReleased', 'message', problem), array[cardinality(p_ids)]), p_moment
            );
            kept := '{}';
            return;
    end;
    placed := true;
    with ready as (
        delete from penstock.waiting_jobs as job
        using unnest(p_ids, slots) with ordinality as given (id, slot, place)
        where job.id = given.id
        returning job.*, given.slot as slot_now, given.place
    ),
    inserted as (
        insert into penstock.queued_jobs (
            seq, message, run_after, expires_at, created_at, updated_at, snoozed_at, id, slot, attempt, max_attempts, priority, crashes,
            snoozes, coalesces, name, key, unique_key, data, errors, progress, options, log, replay_of, workflow, awaited
        )
        select
            case when ready.run_after <= p_moment then nextval('penstock.job_seq') end, ready.message,
            greatest(ready.run_after, p_moment), ready.expires_at, ready.created_at, p_moment, ready.snoozed_at, ready.id, ready.slot_now,
            ready.attempt, ready.max_attempts, ready.priority, ready.crashes, ready.snoozes, false, ready.name, ready.key, ready.unique_key,
            ready.data, ready.errors, ready.progress, ready.options, ready.log, ready.replay_of,
            ready.workflow,
            (select true from penstock.job_dependencies as dependency where dependency.after = ready.id limit 1)
        from ready
        order by ready.place
        on conflict (id) do nothing
        returning id
    )
    select coalesce(array_agg(inserted.id), '{}') into queued from inserted;
    -- An id that has a job already, which an enqueue under repeatable read may not have seen, is that job: this one was not added.
    known := penstock.known_before(p_ids);
    delete from penstock.queued_jobs as job where job.id = any (known) and job.id = any (queued);
    known := known || array(select id from unnest(p_ids) as id where id <> all (queued));
    if cardinality(known) > 0 and p_groups is not null then
        insert into penstock.workflow_ticks (workflow, added)
        select given.workflow, -count(*)
        from unnest(p_ids, p_groups) as given (id, workflow)
        where given.id = any (known) and given.workflow is not null
        group by given.workflow;
    end if;
    update penstock.job_dependencies as dependency set linked = false where dependency.after = any (known);
    if exists (select from penstock.queued_jobs as job where job.id = any (queued) and job.unique_key is not null) then
        perform penstock.requeue_released(queued);
    end if;
    perform penstock.wake_claimers(p_name, cardinality(queued), slots);
    kept := '{}';
exception
    when lock_not_available then
        tries := tries - 1;
        kept := p_ids;
        if not placed or half = 0 or tries <= 0 then
            return;
        end if;
        -- One of them is in the way of all: the halves by themselves.
        select part.* into tries, kept
        from penstock.release_of_type(
            p_name, p_ids[:half], p_keys[:half], p_priorities[:half], p_groups[:half], p_moment, tries
        ) as part (tries_left, kept_too);
        if tries <= 0 then
            kept := kept || p_ids[half + 1:];
            return;
        end if;
        select part.tries_left, kept || part.kept_too into tries, kept
        from penstock.release_of_type(
            p_name, p_ids[half + 1:], p_keys[half + 1:], p_priorities[half + 1:], p_groups[half + 1:], p_moment, tries
        ) as part (tries_left, kept_too);
end
$$;
comment on function penstock.release_of_type(text, uuid[], text[], smallint[], uuid[], timestamptz, integer) is
    'Part of release_waiting: moves waiting jobs of one type to their queues. Returns those that it had to leave, since another transaction has locked something of them, and how often it may still meet such a lock.';

create or replace function penstock.release_waiting(p_ids uuid[], p_moment timestamptz)
returns uuid[]
language plpgsql
as $$
declare
    of_type record;
    kept uuid[] := '{}';
    tries integer := 20;
begin
    for of_type in
        select
            job.name, array_agg(job.id order by job.created_at, job.id) as ids, array_agg(job.key order by job.created_at, job.id) as keys,
            array_agg(job.priority order by job.created_at, job.id) as priorities,
            array_agg(job.workflow order by job.created_at, job.id) as groups
        from penstock.waiting_jobs as job
        where job.id = any (p_ids)
        group by job.name
        order by job.name
    loop
        select part.tries_left, kept || part.kept_too into tries, kept
        from penstock.release_of_type(
            of_type.name, of_type.ids, of_type.keys, of_type.priorities, of_type.groups, p_moment, tries
        ) as part (tries_left, kept_too);
    end loop;
    return kept;
end
$$;
comment on function penstock.release_waiting(uuid[], timestamptz) is
    'Part of resolve_workflows: moves these waiting jobs, which the caller has locked and which wait for nothing any more, to their queues. Returns those that it had to leave, since another transaction has locked something of them.';

-- Long, since the dependents of one end are decided together, under the locks that could be had: which are cancelled, which are ready, and
-- which are left for the next call.
create or replace function penstock.end_dependencies(
    p_jobs uuid[], p_statuses penstock.archived_job_status[], p_limit integer, p_moment timestamptz, p_since timestamptz,
    out handled integer, out postponed boolean
)
language plpgsql
as $$
declare
    found record;
    locked uuid[];
    busy uuid[];
    cancelled record;
    ready uuid[];
    kept uuid[] := '{}';
    left_over record;
begin
    handled := 0;
    postponed := false;
    select
        array_agg(dependency.id) as ids, array_agg(dependency.job) as jobs, array_agg(dependency.after) as after,
        array_agg(dependency.status) as statuses, array_agg(dependency.at_any_end or coalesce(dependency.status = 'succeeded', false)) as met
    into found
    from (
        select dependency.*, ended.status
        from unnest(p_jobs, p_statuses) as ended (job, status)
        join penstock.job_dependencies as dependency on dependency.after = ended.job
        order by dependency.id
        limit p_limit
    ) as dependency;
    if found.ids is null then
        return;
    end if;
    locked := array(
        select job.id from penstock.waiting_jobs as job where job.id = any (found.jobs) for update skip locked
    );
    busy := array(select job.id from penstock.waiting_jobs as job where job.id = any (found.jobs) and job.id <> all (locked));

    select array_agg(given.job) as jobs, array_agg(penstock.not_succeeded(given.after, given.status)) as errors into cancelled
    from (
        select distinct on (given.job) given.job, given.after, given.status
        from unnest(found.jobs, found.after, found.statuses, found.met) as given (job, after, status, met)
        where not given.met and given.job = any (locked)
        order by given.job, given.after
    ) as given;
    if cancelled.jobs is not null then
        perform penstock.end_waiting(
            cancelled.jobs, 'cancelled', array_fill('dependency'::text, array[cardinality(cancelled.jobs)]), cancelled.errors, p_moment
        );
    end if;
    -- With those of jobs that are not waiting any more.
    delete from penstock.job_dependencies as dependency
    where dependency.id = any (found.ids) and dependency.job <> all (busy);
    ready := array(
        select job.id
        from penstock.waiting_jobs as job
        where job.id = any (locked)
            and (select 1 from penstock.job_dependencies as dependency where dependency.job = job.id limit 1) is null
    );
    if cardinality(ready) > 0 then
        kept := penstock.release_waiting(ready, p_moment);
        -- They wait on, for an end that has been: the tick below brings them back.
        insert into penstock.job_dependencies (job, after, at_any_end, linked)
        select distinct on (given.job) given.job, given.after, true, true
        from unnest(found.jobs, found.after) as given (job, after)
        where given.job = any (kept)
        order by given.job, given.after;
    end if;
    -- What other transactions have locked, and what is beyond the limit.
    select array_agg(ended.job) as jobs, array_agg(ended.status) as statuses into left_over
    from unnest(p_jobs, p_statuses) as ended (job, status)
    where (select 1 from penstock.job_dependencies as dependency where dependency.after = ended.job limit 1) is not null;
    if left_over.jobs is not null then
        perform penstock.note_ends(
            array(
                select row(given.job, null, true, given.status)::penstock.ended_job
                from unnest(left_over.jobs, left_over.statuses) as given (job, status)
            ),
            p_since
        );
        postponed := true;
    end if;
    handled := (select count(*) from unnest(found.jobs) as given where given <> all (busy) and given <> all (kept));
end
$$;
comment on function penstock.end_dependencies(uuid[], penstock.archived_job_status[], integer, timestamptz, timestamptz) is
    'Part of resolve_workflows: releases or cancels what waited for these jobs, which have ended so. Returns how many dependencies were handled, and whether some are left, for which it wrote a tick.';

create or replace function penstock.resolve_workflows(p_limit integer default 1000, p_if_due boolean default false)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment timestamptz;
    linked integer;
    folded record;
    ticks bigint[];
    ended record;
    closed record;
    outcome record;
    resumed uuid[];
begin
    perform penstock.check_limit(p_limit, 10000);
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'resolve_workflows needs the isolation level read committed'
            using errcode = 'PS409', hint = 'Call it in a transaction of its own with the default isolation level.';
    end if;
    if not exists (select from penstock.workflow_ticks)
        and not exists (select from penstock.job_dependencies as dependency where not dependency.linked)
    then
        return 0;
    end if;
    -- A look without writes, and without the lock: what is due later is told with a tick of its own.
    if p_if_due and not penstock.has_due_ticks() then
        return 0;
    end if;
    if not pg_try_advisory_xact_lock(hashtext('penstock.resolve_workflows')) then
        return null;
    end if;
    perform pg_current_xact_id();
    linked := penstock.link_dependencies(p_limit);
    select * into folded from penstock.fold_ticks(p_limit, penstock.clock());
    ticks := folded.ticks;
    if cardinality(ticks) = 0 then
        return linked;
    end if;
    select coalesce(array_agg(one.job), '{}') as jobs, coalesce(array_agg(one.status), '{}') as statuses into ended
    from (
        select distinct on (each.job) each.job, each.status
        from penstock.workflow_ticks as tick
        cross join lateral unnest(tick.jobs, tick.statuses) as each (job, status)
        where tick.id = any (ticks)
        order by each.job
    ) as one;
    resumed := array(
        select each.job
        from penstock.workflow_ticks as tick
        cross join lateral unnest(tick.resumed) as each (job)
        where tick.id = any (ticks)
    );
    delete from penstock.workflow_ticks as tick where tick.id = any (ticks);
    -- Groups that these jobs have left open: fold_ticks looks at each, under its lock, in the next call.
    insert into penstock.workflow_ticks (workflow, noted_at)
    select job_group.id, folded.since
    from penstock.job_groups as job_group
    where job_group.filled_by = any (ended.jobs) and job_group.sealed_at is null and job_group.cancelled_at is null
        and job_group.finished_at is null;
    -- Behind the ticks that it has read: what is released, cancelled or ended comes after what it waited for, by the clock too.
    moment := penstock.clock();
    perform penstock.ensure_archive(moment);
    -- In the same pass: what waits for a group starts with the last of its children.
    select * into closed from penstock.end_groups(folded.groups, moment, folded.since);
    select * into outcome
    from penstock.end_dependencies(
        ended.jobs || array(select each.id from unnest(closed.ended) as each),
        ended.statuses || array(select each.status from unnest(closed.ended) as each),
        p_limit * 10, moment, folded.since
    );
    resumed := resumed || array(
        select job_group.gathered_by
        from unnest(closed.ended) as each
        join penstock.job_groups as job_group on job_group.id = each.id
        where job_group.gathered_by is not null
    );
    if cardinality(resumed) > 0 and not penstock.resume_jobs(resumed, moment, folded.since) then
        folded.postponed := folded.postponed + 1;
    end if;
    return linked + cardinality(closed.ended) + outcome.handled + cardinality(ticks) - folded.postponed - closed.postponed
        - outcome.postponed::integer;
end
$$;
comment on function penstock.resolve_workflows(integer, boolean) is
    'Does what follows from the ends of jobs for which others wait: releases these to their queues, or cancels them, ends job groups, and lets suspended jobs go on for which a signal has come or whose children have ended. Every worker calls it after a settlement that ended such jobs, and at intervals. Returns how much it did; call it again until that is 0. Null: another transaction is doing it, look again in a moment. Done twice is once. p_if_due: ticks from which nothing follows but the numbers of children, as almost all of a large job group, are left for a later call, which costs less than to fold those of each settlement. A caller that sets it makes a call without it about once a second.';
