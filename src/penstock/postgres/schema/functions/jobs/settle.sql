-- Settle: record the outcomes of claimed jobs, many at once.
--
-- The fence. A result counts only while the job is in progress with the same attempt, under the lease under which the worker
-- held it. A worker that lost a job (its lease ended and
-- another worker recovered it) therefore changes nothing; it is told 'stale'.

create or replace function penstock.close_leases(p_leases bigint[], p_jobs integer[])
returns void
language plpgsql
as $$
declare
    closed bigint[];
begin
    if exists (select from penstock.place_waiters) then
        perform penstock.announce_places(p_leases, p_jobs);
    end if;
    with counted as (
        update penstock.leases
        set open_jobs = leases.open_jobs - settled.jobs
        from unnest(p_leases, p_jobs) as settled (lease, jobs)
        where leases.id = settled.lease and leases.open_jobs > settled.jobs
        returning leases.id
    )
    select coalesce(array_agg(counted.id), '{}') into closed from counted;
    -- A statement of its own, with a new snapshot: when the update waited for another one of the same lease, only a new
    -- snapshot shows how many jobs are left.
    delete from penstock.leases
    using unnest(p_leases, p_jobs) as settled (lease, jobs)
    where leases.id = settled.lease
        and leases.id <> all (closed)
        and leases.open_jobs <= settled.jobs;
end
$$;
comment on function penstock.close_leases(bigint[], integer[]) is 'Part of settle, confirm_finished, extend and recover: takes jobs that are settled, or have another lease, off their leases, and deletes a lease without jobs.';

create or replace function penstock.requeue(p_ids uuid[])
returns void
language plpgsql
as $$
begin
    update penstock.queued_jobs as job
    set coalesces = true
    from (
        select distinct on (waiting.name, waiting.unique_key, case when waiting.slot is not null then waiting.key end) waiting.id
        from penstock.queued_jobs as waiting
        where waiting.id = any (p_ids)
            and waiting.status = 'queued'
            and waiting.unique_key is not null
            and not waiting.coalesces
            -- A suspended job has begun with its payload.
            and waiting.waits_for is null
            and not exists (
                select from penstock.queued_jobs as other
                where other.name = waiting.name and other.unique_key = waiting.unique_key and other.coalesces
                    and (other.slot is null or other.key = waiting.key)
            )
        order by waiting.name, waiting.unique_key, case when waiting.slot is not null then waiting.key end, waiting.id
    ) as first_of_key
    where job.id = first_of_key.id;
end
$$;
comment on function penstock.requeue(uuid[]) is 'Part of settle: jobs that are queued again coalesce again, unless another job took their unique key.';

-- Long for its checks: what settles is archive_succeeded for all that succeeded, which is most, and end_attempts for the others.
create or replace function penstock.settle(
    p_ids uuid[],
    p_attempts smallint[],
    p_leases bigint[] default null,
    p_outcomes text[] default null,
    p_details jsonb[] default null,
    p_retry_after interval[] default null
)
returns table (id uuid, outcome text)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment constant timestamptz := penstock.clock();
    size constant integer := coalesce(cardinality(p_ids), 0);
    day constant text := (moment at time zone 'UTC')::date;
    unknown text;
    archived record;
begin
    if size > 100000 or size <> any (array[
        coalesce(cardinality(p_attempts), 0), coalesce(cardinality(p_leases), size), coalesce(cardinality(p_outcomes), size),
        coalesce(cardinality(p_details), size), coalesce(cardinality(p_retry_after), size)
    ]) then
        raise exception 'the arrays differ in length or have more than 100,000 elements'
            using errcode = 'PS400', hint = 'Give one id and one attempt number for each job; the other arrays may be null.';
    end if;
    if size > 0 and (p_leases is null or array_position(p_leases, null) is not null) then
        raise exception 'a job is to be settled without its lease'
            using errcode = 'PS400',
                  hint = 'Give the lease that claim or extend returned for each job. Who got a job without its lease calls penstock.settle_attempts.';
    end if;
    if p_outcomes is not null then
        select coalesce(given, 'null') into unknown
        from unnest(p_outcomes) as given
        where given is null or given not in ('succeeded', 'failed', 'failed-for-good', 'quarantined', 'cancelled', 'released', 'snoozed', 'suspended')
        limit 1;
        if unknown is not null then
            raise exception 'unknown outcome: %', left(unknown, 100)
                using errcode = 'PS400', hint = 'An outcome is succeeded, failed, failed-for-good, quarantined, cancelled, released, snoozed or suspended.';
        end if;
        if exists (select from unnest(p_outcomes, p_retry_after) as given (outcome, after) where given.outcome = 'snoozed' and given.after is null) then
            raise exception 'a job is to be snoozed without a time'
                using errcode = 'PS400', hint = 'Give the time after which it is to run again in p_retry_after.';
        end if;
    end if;
    if p_outcomes is not null and 'suspended' = any (p_outcomes) and exists (
        select from unnest(p_outcomes, p_details) as given (outcome, detail)
        where given.outcome = 'suspended' and coalesce(jsonb_typeof(given.detail -> 'step'), '') <> 'string'
    ) then
        raise exception 'a job is to be suspended without the step for which it waits'
            using errcode = 'PS400', hint = 'Give its name as the detail, {"step": "approved"}, after begin_waits has said that it is open.';
    end if;
    if interval '366 days' < any (p_retry_after) then
        raise exception 'a job cannot be retried or snoozed for %', (select max(given) from unnest(p_retry_after) as given)
            using errcode = 'PS400', hint = 'Run it again after at most 366 days; null is the backoff of its type.';
    end if;
    if interval '0' > any (p_retry_after) then
        raise exception 'a job cannot be retried or snoozed for %', (select min(given) from unnest(p_retry_after) as given)
            using errcode = 'PS400', hint = 'Run it again after no time or more; null is the backoff of its type.';
    end if;
    if p_details is not null then
        perform penstock.check_each_json(p_details, 'a result or an error');
        if penstock.any_encrypted(p_ids) then
            p_details := penstock.sealed_details(p_ids, p_details, p_outcomes);
        end if;
    end if;
    -- Once a day and session is enough: a retention class that comes into use later brings its partitions of today and tomorrow itself.
    if current_setting('penstock.archive_day', true) is distinct from day then
        perform penstock.ensure_archive(moment);
        perform set_config('penstock.archive_day', day, false);
    end if;

    archived := penstock.archive_succeeded(p_ids, p_attempts, p_leases, p_outcomes, p_details, moment);
    if archived.leases is not null then
        perform penstock.close_leases(archived.leases, archived.jobs);
    end if;
    if archived.awaited then
        return query select null::uuid, 'workflows';
    end if;
    if cardinality(archived.ids) = size then
        return;
    end if;

    if p_outcomes is not null then
        return query
        with ended as (
            select * from penstock.end_attempts(p_ids, p_attempts, p_leases, p_outcomes, p_details, p_retry_after, moment)
        )
        select ended.id, ended.outcome from ended
        union all
        select given.id, 'stale'
        from unnest(p_ids) as given (id)
        where given.id <> all (archived.ids)
            and not exists (select from ended where ended.id = given.id);
    else
        return query
        select given.id, 'stale' from unnest(p_ids) as given (id) where given.id <> all (archived.ids);
    end if;
end
$$;
comment on function penstock.settle(uuid[], smallint[], bigint[], text[], jsonb[], interval[]) is
    'Settles claimed jobs. Outcomes: succeeded (detail: the result, or null), failed (detail: the error as an object; retried while attempts are left, after p_retry_after or the backoff of the type), failed-for-good (no retry), quarantined (no retry either; archived as failed with the reason quarantined, for what cannot be read or ends its worker), cancelled, released (handed back without having used an attempt), snoozed (put off by p_retry_after without having used an attempt; a job of an at_most_once type fails instead), suspended (detail: {"step": name}; it goes on, with the same attempt, when what begin_waits began under this name is over). Without p_outcomes all succeeded. Returns only what is not plain success: id and succeeded, retried, failed, cancelled, released, snoozed, suspended, or stale when the job was no longer the caller''s and nothing changed. A row without an id, workflows, says that others wait for some of the jobs: call resolve_workflows after the commit, or leave that to the workers.';

-- Long, since what becomes of an attempt is decided in one place, row by row under their locks: outcome, reason, delay and errors follow
-- from the same facts, and the two statements below carry out what was decided.
create or replace function penstock.end_attempts(
    p_ids uuid[], p_attempts smallint[], p_leases bigint[], p_outcomes text[], p_details jsonb[], p_retry_after interval[],
    p_moment timestamptz
)
returns table (id uuid, outcome text)
language plpgsql
as $$
#variable_conflict use_column
declare
    ended_ids uuid[];
    outcomes text[];
    reasons text[];
    retries interval[];
    steps text[];
    new_errors jsonb[];
    leases bigint[];
    jobs integer[];
    blocking boolean[];
    names_back text[];
    back text;
begin
    perform pg_current_xact_id();
    -- Lock the rows, then decide the outcome of each attempt.
    with locked as (
        select job.*, given.outcome, given.detail, given.retry_after
        from unnest(p_ids, p_attempts, p_leases, p_outcomes, p_details, p_retry_after)
            as given (id, given_attempt, given_lease, outcome, detail, retry_after)
        join penstock.queued_jobs as job on job.id = given.id
        where given.outcome <> 'succeeded'
            and job.status = 'in-progress'
            and job.attempt = given.given_attempt
            and job.lease = given.given_lease
        for update of job
    ),
    decided as (
        select
            locked.id,
            locked.lease,
            case
                when locked.outcome = 'cancelled' then 'cancelled'
                when locked.cancel_requested_at is not null then 'cancelled'
                when locked.outcome in ('lost', 'lost-alone', 'moved') then case
                    -- A job that its holder had not begun was never started.
                    when holder.kind is not null and not locked.begun
                        and (type.delivery_strategy = 'at_most_once' or holder.kind = 'dispatcher') then 'released'
                    when type.delivery_strategy = 'at_most_once' then 'failed'
                    when holder.kind is distinct from 'worker' then case when locked.attempt >= locked.max_attempts then 'failed' else 'retried' end
                    when locked.outcome = 'lost-alone' and coalesce(locked.lone_crashes, 0) + 1 >= type.max_crashes then 'failed'
                    else locked.outcome
                end
                when locked.outcome = 'released' and locked.detail is null then 'released'
                when locked.outcome = 'released' and type.delivery_strategy = 'at_least_once' then 'released'
                when locked.outcome = 'snoozed' and type.delivery_strategy = 'at_least_once' then 'snoozed'
                when locked.outcome = 'suspended' and type.delivery_strategy = 'at_least_once' then 'suspended'
                when locked.outcome in ('failed-for-good', 'quarantined', 'released', 'snoozed', 'suspended') then 'failed'
                when type.delivery_strategy = 'at_most_once' or locked.attempt >= locked.max_attempts then 'failed'
                else 'retried'
            end as outcome,
            case
                when locked.cancel_requested_at is null and (
                    locked.outcome = 'quarantined'
                    or locked.outcome = 'lost-alone' and coalesce(locked.lone_crashes, 0) + 1 >= type.max_crashes
                        and holder.kind = 'worker' and type.delivery_strategy = 'at_least_once'
                ) then 'quarantined'
                when locked.cancel_requested_at is not null then penstock.reason_of_group(locked.workflow)
            end as reason,
            coalesce(
                locked.retry_after,
                least(
                    extract(epoch from type.backoff_cap),
                    extract(epoch from type.backoff_base)
                        * power(type.backoff_factor, least(locked.attempt - 1, 60))
                        * (1 + type.backoff_jitter * (2 * random() - 1))
                ) * interval '1 second'
            ) as retry_after,
            case
                when locked.outcome in ('lost', 'lost-alone', 'moved') and holder.kind is not null and not locked.begun
                    and (type.delivery_strategy = 'at_most_once' or holder.kind = 'dispatcher') then null
                when locked.outcome in ('snoozed', 'suspended') and (type.delivery_strategy = 'at_least_once' or locked.cancel_requested_at is not null)
                    then null
                when locked.outcome in ('failed', 'failed-for-good', 'quarantined', 'snoozed', 'suspended') or locked.detail is not null then
                    case
                        when locked.outcome = 'lost-alone' and coalesce(locked.lone_crashes, 0) + 1 >= type.max_crashes
                            and holder.kind = 'worker' and type.delivery_strategy = 'at_least_once'
                            then jsonb_build_object(
                                'type', 'Quarantined',
                                'message',
                                format(
                                    '%s worker(s) were lost while they ran nothing but this job, the last time: %s',
                                    coalesce(locked.lone_crashes, 0) + 1, locked.detail ->> 'message'
                                )
                            )
                        when locked.outcome in ('snoozed', 'suspended') then jsonb_build_object(
                            'type', case locked.outcome when 'snoozed' then 'Snooze' else 'Suspended' end,
                            'message',
                            format('a job of an at_most_once type cannot be %s, since it may start only once', locked.outcome)
                        )
                        else coalesce(locked.detail, '{}')
                    end || jsonb_build_object(
                        'attempt', locked.attempt,
                        'worker', lease.worker,
                        'started_at', lease.started_at,
                        'failed_at', p_moment
                    )
            end as error,
            coalesce(pool.on_retry = 'block', false) as blocks,
            locked.detail ->> 'step' as step
        from locked
        join penstock.jobs as type on type.name = locked.name
        left join penstock.pools as pool on pool.name = locked.name
        left join penstock.leases as lease on lease.id = locked.lease
        left join penstock.holders as holder on holder.id = lease.worker
    ),
    closing as (
        select decided.lease, count(distinct decided.id)::integer as jobs
        from decided
        group by decided.lease
        order by decided.lease
    )
    select
        (select array_agg(decided.id) from decided),
        (select array_agg(decided.outcome) from decided),
        (select array_agg(decided.reason) from decided),
        (select array_agg(decided.retry_after) from decided),
        (select array_agg(decided.step) from decided),
        (select array_agg(decided.error) from decided),
        (select array_agg(decided.blocks) from decided),
        (select array_agg(closing.lease) from closing),
        (select array_agg(closing.jobs) from closing)
    into ended_ids, outcomes, reasons, retries, steps, new_errors, blocking, leases, jobs;
    if ended_ids is null then
        return;
    end if;

    perform penstock.archive_unsuccessful(
        array_agg(given.id), array_agg(given.outcome::penstock.archived_job_status), array_agg(given.reason), array_agg(given.error), p_moment
    )
    from unnest(ended_ids, outcomes, reasons, new_errors) as given (id, outcome, reason, error)
    where given.outcome in ('failed', 'cancelled')
    having count(*) > 0;

    -- A released job, or one to be retried at once, keeps its place in the queue. In a pool that blocks, so does one to
    -- be retried later, snoozed or suspended, which blocks its key until then. Whether what a suspended job waits for is there already is
    -- looked at here, behind its lock: what comes later finds it suspended.
    with returned as (
        update penstock.queued_jobs as job
        set status = 'queued',
            lease = null,
            attempt = job.attempt + case when given.outcome = 'retried' then 1 else next.lost end,
            max_attempts = job.max_attempts + next.lost,
            crashes = next.crashes,
            trial = case when next.crashes = 2 then job.trial end,
            lone_crashes = case
                when given.outcome = 'lost-alone' then least(coalesce(job.lone_crashes, 0) + 1, 32767)
                when next.crashes = 2 then job.lone_crashes
            end,
            begun = false,
            seq = case
                when next.crashes = 2 and not given.blocks then null
                when given.outcome in ('released', 'moved') or next.resumed_at <= p_moment or given.blocks then job.seq
                when given.outcome <> 'suspended' and given.retry_after <= interval '0' then job.seq
            end,
            run_after = case
                when next.crashes = 2 then penstock.isolation_time()
                when given.outcome = 'released' then job.run_after
                when given.outcome = 'suspended' then next.resumed_at
                else p_moment + greatest(given.retry_after, interval '0')
            end,
            errors = penstock.with_error(job.errors, given.error),
            snoozes = case when given.outcome = 'snoozed' then least(coalesce(job.snoozes, 0) + 1, 32767) else job.snoozes end,
            snoozed_at = case when given.outcome = 'snoozed' then p_moment end,
            -- A released job goes on where it was.
            waits_for = case given.outcome when 'suspended' then given.step when 'released' then job.waits_for end,
            updated_at = p_moment
        from unnest(ended_ids, outcomes, retries, steps, new_errors, blocking)
            as given (id, outcome, retry_after, step, error, blocks)
        cross join lateral (
            select
                case
                    when given.outcome in ('lost', 'lost-alone') then least(each.crashes + 1, 2)
                    -- The job was released before its trial had ended: it waits for it again.
                    when given.outcome in ('released', 'moved') then least(each.crashes, 2)
                    when each.crashes >= 2 then 0
                    else each.crashes
                end as crashes,
                -- A job that was lost with its worker uses up none of its attempts, and its next attempt has a new number.
                case when given.outcome in ('lost', 'lost-alone', 'moved') and each.max_attempts < 32767 then 1 else 0 end as lost,
                case
                    when given.outcome = 'suspended'
                        then greatest(coalesce(penstock.resume_time(given.id, given.step, p_moment), p_moment), p_moment)
                end as resumed_at
            from penstock.queued_jobs as each
            where each.id = given.id
        ) as next
        where job.id = given.id and given.outcome in ('released', 'retried', 'snoozed', 'suspended', 'lost', 'lost-alone', 'moved')
        returning job.name, job.seq
    )
    select array_agg(distinct returned.name) into names_back from returned where returned.seq is not null;
    perform penstock.requeue(ended_ids);
    perform penstock.close_leases(leases, jobs);

    foreach back in array coalesce(names_back, '{}') loop
        if not exists (select from penstock.pools where name = back) then
            -- The jobs are below the watermarks of the workers, which must scan there again.
            perform penstock.tell_all('scan', back);
        end if;
        perform penstock.wake_claimers(back, cardinality(ended_ids));
    end loop;
    return query select * from unnest(ended_ids, outcomes);
end
$$;
comment on function penstock.end_attempts(uuid[], smallint[], bigint[], text[], jsonb[], interval[], timestamptz) is
    'Part of settle, recover, release_unknown, quarantine and end_slots: ends attempts that did not succeed. A released job with a detail had been started, which an at_most_once job may be only once: it fails.';
