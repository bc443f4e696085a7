-- The archive: how jobs get there. Two functions write it, and each removes the jobs from the queue in the statement that archives them.
--
-- archive_succeeded is the hot path: the fence is in its statement, and it takes payload and times as they are, which the worker that
-- succeeded has read. archive_unsuccessful archives all others, also what no worker has read, so that every client can read the archive: that
-- costs a call for each payload, several microseconds a job.

create or replace function penstock.archive_succeeded(
    p_ids uuid[], p_attempts smallint[], p_leases bigint[], p_outcomes text[], p_results jsonb[], p_moment timestamptz,
    out ids uuid[], out leases bigint[], out jobs integer[], out awaited boolean
)
language plpgsql
as $$
declare
    ended penstock.ended_job[];
begin
    with settled as (
        delete from penstock.queued_jobs as job
        using unnest(p_ids, p_attempts, p_leases, p_outcomes, p_results) as given (id, attempt, lease, outcome, result)
        where job.id = given.id
            and job.status = 'in-progress'
            and job.attempt = given.attempt
            and job.lease = given.lease
            and (given.outcome is null or given.outcome = 'succeeded')
        returning
            job.id, job.created_at, job.run_after, job.expires_at, job.attempt, job.max_attempts, job.priority, job.name, job.key,
            job.unique_key, job.data, job.errors, job.replay_of, job.message, job.options, job.snoozes, job.log, job.lease, given.result,
            job.awaited, job.workflow
    ),
    -- A batch has few leases, which are looked up once.
    held as materialized (
        select leases.id, leases.started_at, leases.keep, leases.worker from penstock.leases where leases.id = any (p_leases)
    ),
    archived as (
        insert into penstock.archived_jobs (
            id, finished_at, created_at, run_after, started_at, expires_at, status, attempt, max_attempts, priority, keep,
            name, worker, key, unique_key, data, errors, result, replay_of, message, options, snoozes, log, workflow
        )
        select
            settled.id, p_moment, settled.created_at, settled.run_after, lease.started_at, settled.expires_at, 'succeeded',
            settled.attempt, settled.max_attempts, settled.priority,
            coalesce(lease.keep, penstock.class_of_type(settled.name), 0::smallint), settled.name, lease.worker,
            settled.key, settled.unique_key, settled.data, settled.errors, settled.result, settled.replay_of, settled.message,
            settled.options, settled.snoozes, settled.log, settled.workflow
        from settled
        left join held as lease on lease.id = settled.lease
        -- In the order of the ids, so that the index of the primary key grows at its end: otherwise its pages are split in their middle.
        order by settled.id
    ),
    closing as (
        select settled.lease, count(*)::integer as jobs
        from settled
        group by settled.lease
        order by settled.lease
    )
    select
        coalesce(array_agg(settled.id), '{}'),
        array_agg(row(settled.id, settled.workflow, settled.awaited, 'succeeded')::penstock.ended_job)
            filter (where settled.awaited or settled.workflow is not null),
        (select array_agg(closing.lease) from closing),
        (select array_agg(closing.jobs) from closing)
    from settled
    into ids, ended, leases, jobs;
    awaited := ended is not null;
    if awaited then
        perform penstock.note_ends(ended);
    end if;
end
$$;
comment on function penstock.archive_succeeded(uuid[], smallint[], bigint[], text[], jsonb[], timestamptz) is
    'Part of settle and finish: archives those of the jobs that are held under these attempts and leases and whose outcome is succeeded (or null). Returns their ids, how many jobs are to be taken off which leases, and whether a workflow waits for some of them. Call ensure_archive before.';

create or replace function penstock.with_error(p_errors jsonb, p_error jsonb)
returns jsonb
language sql
immutable
parallel safe
as $$
    select case
        when p_error is null then p_errors
        -- The signature is a column of the archive.
        else coalesce(p_errors, '[]') || jsonb_build_array(case jsonb_typeof(p_error) when 'object' then p_error - 'signature' else p_error end)
    end
$$;
comment on function penstock.with_error(jsonb, jsonb) is 'The errors of a job with one more; null: with none more.';

create or replace function penstock.signature_of(p_error jsonb)
returns text
language sql
immutable
parallel safe
as $$
    select case
        when p_error ->> 'signature' ~ '^[0-9a-f]{16}$' then p_error ->> 'signature'
        -- What Python makes of the type and an empty message.
        else left(md5(coalesce(p_error ->> 'type', 'Error') || chr(10)), 16)
    end
$$;
comment on function penstock.signature_of(jsonb) is
    'The signature of an error: the one that came with it, which the Python package makes of its type and of its message without what varies; otherwise, and when the message is encrypted, of its type alone.';

create or replace function penstock.archive_unsuccessful(
    p_ids uuid[], p_statuses penstock.archived_job_status[], p_reasons text[], p_errors jsonb[], p_moment timestamptz
)
returns integer
language plpgsql
as $$
declare
    archived integer;
    ends penstock.ended_job[];
begin
    with ended as (
        delete from penstock.queued_jobs as job
        using unnest(p_ids, p_statuses, p_reasons, p_errors) as given (id, status, reason, error)
        where job.id = given.id
        returning job.*, given.status as ended_as, given.reason, given.error
    ),
    archived as (
        insert into penstock.archived_jobs (
            id, finished_at, created_at, run_after, started_at, expires_at, status, reason, attempt, max_attempts, priority, keep,
            name, worker, signature, key, unique_key, data, errors, replay_of, message, options, snoozes, log, workflow
        )
        select
            -- A worker that is taken for dead may have claimed since the caller looked at the clock.
            ended.id, greatest(p_moment, lease.started_at), penstock.shown_time(ended.created_at), penstock.shown_time(ended.run_after), lease.started_at,
            penstock.shown_time(ended.expires_at), ended.ended_as, ended.reason,
            -- The attempt of a queued job has not begun, unless it was suspended in it.
            ended.attempt - case when ended.status = 'queued' and ended.waits_for is null then 1 else 0 end, ended.max_attempts, ended.priority,
            penstock.retention_class(type.keep_failed), ended.name, lease.worker,
            case ended.ended_as when 'failed' then penstock.signature_of(coalesce(ended.error, ended.errors -> -1)) end,
            ended.key, ended.unique_key,
            penstock.readable(ended.id, ended.data, p_moment), penstock.with_error(ended.errors, ended.error), ended.replay_of, ended.message,
            ended.options, ended.snoozes, ended.log, ended.workflow
        from ended
        left join penstock.jobs as type on type.name = ended.name
        left join penstock.leases as lease on lease.id = ended.lease
    )
    select
        count(*),
        array_agg(row(ended.id, ended.workflow, ended.awaited, ended.ended_as)::penstock.ended_job)
            filter (where ended.awaited or ended.workflow is not null)
    from ended
    into archived, ends;
    if ends is not null then
        perform penstock.note_ends(ends);
        perform penstock.tell_all('workflows', '');
    end if;
    if exists (select from penstock.job_groups as job_group where job_group.gathered_by = any (p_ids) and job_group.finished_at is null) then
        perform penstock.stop_gathered(p_ids, p_moment);
    end if;
    return archived;
end
$$;
comment on function penstock.archive_unsuccessful(uuid[], penstock.archived_job_status[], text[], jsonb[], timestamptz) is
    'Part of end_attempts and archive_waiting: archives jobs, queued or in progress, which the caller has locked, each with its status, its reason and one more of its errors (null: none). Call ensure_archive before. Returns how many.';

create or replace function penstock.archive_waiting(
    p_ids uuid[], p_status penstock.archived_job_status, p_reason text, p_error jsonb, p_moment timestamptz
)
returns integer
language sql
as $$
    select
        case
            -- Each worker looks for expired jobs every second, and mostly finds none.
            when coalesce(cardinality(p_ids), 0) = 0 then 0
            else
                penstock.archive_unsuccessful(
                    p_ids, array_fill(p_status, array[cardinality(p_ids)]), array_fill(p_reason, array[cardinality(p_ids)]),
                    array_fill(p_error, array[cardinality(p_ids)]), p_moment
                )
        end
$$;
comment on function penstock.archive_waiting(uuid[], penstock.archived_job_status, text, jsonb, timestamptz) is
    'Part of what ends jobs that wait (expire, cancel, quarantine, operations, the drop of types and of subscribers'' queues): archives queued jobs, which the caller has locked, all with one status, reason and error (null: none). Call ensure_archive before. Returns how many.';
