-- Due work: the one look of an idle process.
--
-- What workers do for the whole database is due seldom: a worker is lost, a job expires, a job for which others wait has ended. Each of the
-- functions that do it finds out by itself that there is nothing to do, but a worker that asked each of them once a second would send a dozen
-- statements for nothing, some of which write. So a process promotes and asks in one statement, and calls the others when they are due.
--
-- The answer may say too much, never too little: what it names looks again, under its locks. What no condition here knows (rows that are kept
-- for a while and then go) is done by a call of each at long intervals.
--
-- Each condition is a walk along an index that stops at the first row, also for a table of six rows. "order by ... limit 1" has the planner
-- take the index where it would otherwise read the table, or compile what a profile made dear.

create or replace function penstock.due_work(p_limit integer default 1000)
returns table (promoted integer, due_in_s double precision, due text[])
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
begin
    select done.promoted, extract(epoch from done.next_due - penstock.clock())::double precision
    into promoted, due_in_s
    from penstock.promote(p_limit) as done;
    due := array_remove(
        array[
            case
                when (
                        select true from penstock.workers
                        where workers.state = 'dead'
                            or workers.ended_at is not null
                            or penstock.is_to_be_suspected(workers.seen_at, workers.dead_after, workers.suspected_at, moment)
                            or penstock.is_dead(workers.seen_at, workers.dead_after, workers.suspected_at, moment)
                        order by workers.id
                        limit 1
                    )
                    or (select true from penstock.leases where leases.expires_at < moment order by leases.expires_at limit 1)
                    or (select true from penstock.finished_jobs order by finished_jobs.id limit 1)
                    or (select true from penstock.unique_periods as period where period.look_at <= moment order by period.look_at limit 1)
                    or (select true from penstock.dropped_types where dropped_types.look_at <= moment order by dropped_types.look_at limit 1)
                    or (select true from penstock.stranded_suspects(moment) limit 1)
                then 'recover'
            end,
            case
                when (
                        select true from penstock.queued_jobs as job
                        where job.expires_at <= moment and job.status = 'queued'
                        order by job.expires_at
                        limit 1
                    )
                    or (select true from penstock.waiting_jobs as job where job.expires_at <= moment order by job.expires_at limit 1)
                then 'expire'
            end,
            case
                when (select true from penstock.workflow_ticks as tick order by tick.id limit 1)
                    or (select true from penstock.job_dependencies as dependency where not dependency.linked order by dependency.id limit 1)
                then 'workflows'
            end,
            case
                when (
                    select true from penstock.operations
                    where operations.state = 'running' and operations.phase is distinct from 'vacuum'
                    order by operations.updated_at
                    limit 1
                )
                then 'operations'
            end,
            case
                when (
                    select true from penstock.operations
                    where operations.state = 'running' and operations.phase = 'vacuum'
                    order by operations.updated_at
                    limit 1
                )
                then 'vacuum'
            end,
            case
                when (select true from penstock.subscriptions where subscriptions.ttl is not null order by subscriptions.topic limit 1)
                    or (select true from penstock.ended_queues where ended_queues.look_at <= moment order by ended_queues.look_at limit 1)
                then 'topics'
            end,
            case
                when (
                    select true from penstock.queued_jobs as job
                    where job.run_after = penstock.isolation_time()
                    order by job.name, job.seq
                    limit 1
                )
                then 'apart'
            end,
            case when (select true from penstock.streams order by streams.name limit 1) then 'streams' end,
            case when (select true from penstock.retired_segments order by retired_segments.table_name limit 1) then 'retired' end
        ],
        null
    );
    return next;
end
$$;
comment on function penstock.due_work(integer) is
    'Promotes up to p_limit due jobs, and says what else is due: recover, expire, workflows (resolve_workflows), operations (advance_operation), vacuum (the last phase of an erasure), topics (maintain_topics), apart (claim_alone), streams (streams_to_maintain, every few seconds), retired (drop_retired). due_in_s: seconds until the next deferred job is due; null: none is deferred. An idle worker calls it once a second; others are called when it names them, and each of them twice a minute or so in any case.';
