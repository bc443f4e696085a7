-- How job groups end: their ticks are folded, those that are complete end, and in the end they are forgotten. Parts of resolve_workflows and
-- prune. The head of tables/0013_workflows.sql has the whole.

create or replace function penstock.is_left(p_gatherer uuid)
returns boolean
language sql
stable
as $$
    select (select 1 from penstock.waiting_jobs as job where job.id = p_gatherer) is null
        and (select 1 from penstock.queued_jobs as job where job.id = p_gatherer) is null
        -- What a job that succeeded did not wait for goes on.
        and (select 1 from penstock.archived_jobs as job where job.id = p_gatherer and job.status = 'succeeded' limit 1) is null
$$;
comment on function penstock.is_left(uuid) is
    'Part of fold_ticks: whether the job that gathered the children of a group has ended without success, or is gone, so that they are to be cancelled.';

create or replace function penstock.stop_folded(p_ticks bigint[], p_groups uuid[], p_moment timestamptz, p_since timestamptz)
returns integer
language plpgsql
as $$
declare
    late uuid[];
    stopped uuid;
    left_open boolean;
    its_then uuid;
    done boolean;
    postponed integer := 0;
begin
    -- Children whose enqueue has committed after the cancellation of their group.
    late := array(
        select job_group.id
        from penstock.job_groups as job_group
        where job_group.id = any (p_groups) and job_group.cancelled_at is not null and job_group.finished_at is null
            and job_group.added > job_group.succeeded + job_group.failed + job_group.cancelled + job_group.expired
            and job_group.id in (select tick.workflow from penstock.workflow_ticks as tick where tick.id = any (p_ticks) and tick.added > 0)
    );
    insert into penstock.operations (id, kind, filter, started_at, updated_at)
    select penstock.new_id(), 'cancel', jsonb_build_object('workflow', id), penstock.clock(), p_moment from unnest(late) as id;
    -- With what stop_group could not lock.
    late := late || array(
        select tick.workflow from penstock.workflow_ticks as tick
        where tick.id = any (p_ticks) and tick.workflow = any (p_groups)
            and tick.added + tick.succeeded + tick.failed + tick.cancelled + tick.expired = 0
    );
    for stopped, left_open, its_then in
        select job_group.id, job_group.id = any (late) and penstock.is_left_open(job_group), job_group.then_job
        from penstock.job_groups as job_group
        where job_group.id = any (p_groups) and job_group.finished_at is null
            and case
                when job_group.cancelled_at is not null then job_group.id = any (late)
                -- Its gatherer has ended, and stop_gathered could not lock the group.
                when job_group.id = any (late) and job_group.gathered_by is not null then penstock.is_left(job_group.gathered_by)
                when job_group.id = any (late) and penstock.is_left_open(job_group) then true
                else job_group.on_failure = 'cancel' and job_group.failed + job_group.expired > 0
            end
    loop
        done := case
            when left_open then penstock.stop_left_group(stopped, its_then, p_moment, p_since)
            else penstock.stop_group(stopped, p_moment, p_since)
        end;
        postponed := postponed + (not done)::integer;
    end loop;
    return postponed;
end
$$;
comment on function penstock.stop_folded(bigint[], uuid[], timestamptz, timestamptz) is
    'Part of fold_ticks: cancels those of the groups, which it has locked, in which a child failed, whose job has ended that waited for them or filled them, or that gained children after they were cancelled. Returns how many ticks it wrote for what others have locked.';

create or replace function penstock.fold_ticks(
    p_limit integer, p_moment timestamptz, out ticks bigint[], out groups uuid[], out since timestamptz, out postponed integer
)
language plpgsql
as $$
declare
    wanted uuid[];
    more uuid[];
    busy uuid[] := '{}';
begin
    postponed := 0;
    groups := '{}';
    -- Again while there are groups that another transaction has locked, which cancels or seals them: with ticks of the others in their place.
    loop
        ticks := array(
            select tick.id from penstock.workflow_ticks as tick
            where tick.workflow is null or tick.workflow <> all (busy)
            order by tick.id
            limit p_limit
        );
        since := (select min(tick.noted_at) from penstock.workflow_ticks as tick where tick.id = any (ticks));
        wanted := array(
            select distinct tick.workflow from penstock.workflow_ticks as tick where tick.id = any (ticks) and tick.workflow is not null
        );
        if cardinality(wanted) = 0 then
            groups := '{}';
            return;
        end if;
        groups := array(
            select job_group.id from penstock.job_groups as job_group
            where job_group.id = any (wanted)
            order by job_group.id
            for no key update skip locked
        );
        more := array(select job_group.id from penstock.job_groups as job_group where job_group.id = any (wanted) and job_group.id <> all (groups));
        exit when cardinality(more) = 0;
        busy := busy || more;
    end loop;
    update penstock.job_groups as job_group
    set changed_at = p_moment,
        added = job_group.added + sums.added,
        succeeded = job_group.succeeded + sums.succeeded,
        failed = job_group.failed + sums.failed,
        cancelled = job_group.cancelled + sums.cancelled,
        expired = job_group.expired + sums.expired
    from (
        select
            tick.workflow, sum(tick.added) as added, sum(tick.succeeded) as succeeded, sum(tick.failed) as failed,
            sum(tick.cancelled) as cancelled, sum(tick.expired) as expired
        from penstock.workflow_ticks as tick
        where tick.id = any (ticks) and tick.workflow = any (groups)
        group by tick.workflow
        having bool_or(tick.added + tick.succeeded + tick.failed + tick.cancelled + tick.expired <> 0)
    ) as sums
    where job_group.id = sums.workflow;
    postponed := penstock.stop_folded(ticks, groups, p_moment, since);
end
$$;
comment on function penstock.fold_ticks(integer, timestamptz) is
    'Part of resolve_workflows: adds up to p_limit ticks in the rows of their job groups, and cancels the children of groups in which one failed. Returns the ticks, without those of groups that another transaction has locked, which the caller deletes; their groups, which are locked now; when the oldest tick was written; and how many new ones it wrote for what is left.';

create or replace function penstock.end_groups(
    p_groups uuid[], p_moment timestamptz, p_since timestamptz, out ended penstock.ended_job[], out postponed integer
)
language plpgsql
as $$
declare
    complete uuid[];
    free uuid[];
begin
    complete := array(
        select job_group.id
        from penstock.job_groups as job_group
        where job_group.id = any (p_groups) and job_group.finished_at is null and job_group.sealed_at is not null
            and job_group.added = job_group.succeeded + job_group.failed + job_group.cancelled + job_group.expired
    );
    -- Without those to which a transaction that goes on adds children: a tick brings them back.
    free := array(select job_group.id from penstock.job_groups as job_group where job_group.id = any (complete) for update skip locked);
    insert into penstock.workflow_ticks (workflow, noted_at)
    select late.id, p_since from unnest(complete) as late (id) where late.id <> all (free);
    get diagnostics postponed = row_count;
    -- A statement of its own: what was added before the lock is seen.
    with done as (
        update penstock.job_groups as job_group
        -- Not when the pass began: the last child may have ended since.
        set finished_at = greatest(p_moment, penstock.clock()),
            ended_xid = case when job_group.graph is not null then pg_current_xact_id() end,
            status = (
                case
                    when job_group.failed > 0 then 'failed'
                    when job_group.cancelled > 0 or job_group.cancelled_at is not null then 'cancelled'
                    when job_group.expired > 0 then 'expired'
                    else 'succeeded'
                end
            )::penstock.archived_job_status
        where job_group.id = any (free)
            and (select 1 from penstock.workflow_ticks as tick where tick.workflow = job_group.id limit 1) is null
        returning job_group.id, job_group.parent, job_group.status
    )
    select coalesce(array_agg(row(done.id, done.parent, null, done.status)::penstock.ended_job), '{}') into ended from done;
    -- What waits for them is looked for by the caller; the groups around them count them.
    perform penstock.note_ends(array(select each from unnest(ended) as each where each.workflow is not null));
end
$$;
comment on function penstock.end_groups(uuid[], timestamptz, timestamptz) is
    'Part of resolve_workflows: ends those of these job groups, which the caller has locked and whose ticks it has deleted, that are sealed and whose children have all ended. Returns them, and for how many it wrote a tick since another transaction adds children to them.';

create or replace function penstock.cancel_unsealed(p_before timestamptz)
returns void
language plpgsql
as $$
declare
    unsealed uuid;
begin
    for unsealed in
        select job_group.id
        from penstock.job_groups as job_group
        where job_group.finished_at is null and job_group.sealed_at is null and job_group.changed_at < p_before
            and job_group.added = job_group.succeeded + job_group.failed + job_group.cancelled + job_group.expired
            and (select 1 from penstock.workflow_ticks as tick where tick.workflow = job_group.id limit 1) is null
        order by job_group.created_at
        limit 100
        for update skip locked
    loop
        perform penstock.cancel_group(unsealed);
    end loop;
end
$$;
comment on function penstock.cancel_unsealed(timestamptz) is
    'Part of prune: cancels up to 100 job groups that were never sealed, have no open children, and have had none since.';

create or replace function penstock.forget_groups(p_before timestamptz)
returns void
language sql
as $$
    delete from penstock.job_groups as forgotten
    where forgotten.id = any (array(
        select job_group.id
        from penstock.job_groups as job_group
        where job_group.finished_at < p_before
            and (select 1 from penstock.job_groups as inner_group where inner_group.parent = job_group.id and inner_group.finished_at is null limit 1) is null
            and (select 1 from penstock.job_dependencies as dependency where dependency.after = job_group.id limit 1) is null
            and (select 1 from penstock.workflow_ticks as tick where tick.workflow = job_group.id limit 1) is null
            -- A step of a run that has not ended.
            and (
                select 1
                from penstock.graph_steps as step
                join penstock.job_groups as run on run.id = step.run
                where step.job = job_group.id and run.finished_at is null
                limit 1
            ) is null
            -- A run that a lake is still to have, as it is with days of the archive.
            and (
                select 1 from penstock.lakes
                where job_group.ended_xid is not null and lakes.guards
                    and (lakes.seen = '' or not pg_visible_in_snapshot(job_group.ended_xid, nullif(lakes.seen, '')::pg_snapshot))
                limit 1
            ) is null
            -- Its gatherer finds its children by the group when it runs again.
            and (job_group.gathered_by is null or (select 1 from penstock.queued_jobs as job where job.id = job_group.gathered_by) is null)
        limit 10000
    ))
$$;
comment on function penstock.forget_groups(timestamptz) is 'Part of prune: deletes up to 10,000 job groups that ended before, whose names are free then.';
