-- Jobs that wait for others: their end while they wait, and what people see of them.

create or replace function penstock.as_queued(job penstock.waiting_jobs)
returns penstock.queued_jobs
language sql
immutable
as $$
    select row(job.*)::penstock.queued_jobs
$$;
comment on function penstock.as_queued(penstock.waiting_jobs) is 'A waiting job in the shape of a queued one, which has the same columns.';

create or replace function penstock.after_of(p_options jsonb)
returns uuid[]
language sql
immutable
as $$
    select case
        when p_options ? 'after' then array(select after.id::uuid from jsonb_array_elements_text(p_options -> 'after') as after (id))
        else '{}'
    end
$$;
comment on function penstock.after_of(jsonb) is 'The jobs for whose end a job waits, or waited, from its options.';

create or replace function penstock.note_ends(p_ended penstock.ended_job[], p_since timestamptz default null)
returns void
language sql
as $$
    insert into penstock.workflow_ticks (workflow, succeeded, failed, cancelled, expired, jobs, statuses, noted_at)
    select
        ended.workflow, count(*) filter (where ended.status = 'succeeded'), count(*) filter (where ended.status = 'failed'),
        count(*) filter (where ended.status = 'cancelled'), count(*) filter (where ended.status = 'expired'),
        array_agg(ended.id) filter (where ended.awaited), array_agg(ended.status) filter (where ended.awaited),
        coalesce(p_since, clock_timestamp())
    from unnest(p_ended) as ended
    group by ended.workflow
$$;
comment on function penstock.note_ends(penstock.ended_job[], timestamptz) is
    'Part of all that ends jobs: one tick for each job group of a batch, and one for the jobs outside of groups for whose end others wait. p_since: since when what is postponed waits; null: now.';

create or replace function penstock.not_succeeded(p_job uuid, p_status penstock.archived_job_status)
returns jsonb
language sql
stable
as $$
    select jsonb_build_object(
        'type', 'DependencyNotSucceeded',
        'message', format(
            'it was to run after %s, which %s',
            coalesce(
                (
                    select format('job group %s, of whose %s children %s succeeded', job_group.name, job_group.added, job_group.succeeded)
                    from penstock.job_groups as job_group
                    where job_group.id = p_job
                ),
                format(
                    'job %s%s', p_job,
                    ' of ' || (select job.name from penstock.archived_jobs as job where job.id = p_job order by job.finished_at desc limit 1)
                )
            ),
            case p_status
                when 'failed' then 'failed' when 'cancelled' then 'was cancelled' when 'expired' then 'expired'
                else 'is not in the archive any more'
            end
        ),
        'job', p_job
    )
$$;
comment on function penstock.not_succeeded(uuid, penstock.archived_job_status) is
    'Part of resolve_workflows: the error of a job that is cancelled since a job for which it waited did not succeed.';

create or replace function penstock.end_waiting(
    p_ids uuid[], p_status penstock.archived_job_status, p_reasons text[], p_errors jsonb[], p_moment timestamptz
)
returns integer
language plpgsql
as $$
declare
    ended uuid[];
    ends penstock.ended_job[];
begin
    if coalesce(cardinality(p_ids), 0) = 0 then
        return 0;
    end if;
    with gone as (
        delete from penstock.waiting_jobs as job
        using unnest(p_ids, p_reasons, p_errors) as given (id, reason, error)
        where job.id = given.id
        returning job.*, given.reason, given.error
    ),
    archived as (
        insert into penstock.archived_jobs (
            id, finished_at, created_at, run_after, expires_at, status, reason, attempt, max_attempts, priority, keep, name, key, unique_key,
            data, errors, replay_of, message, options, snoozes, log, workflow
        )
        select
            gone.id, p_moment, penstock.shown_time(gone.created_at), penstock.shown_time(gone.run_after), penstock.shown_time(gone.expires_at),
            p_status, gone.reason, gone.attempt - 1, gone.max_attempts, gone.priority, penstock.retention_class(type.keep_failed), gone.name,
            gone.key, gone.unique_key, penstock.readable(gone.id, gone.data, p_moment), penstock.with_error(gone.errors, gone.error),
            gone.replay_of, gone.message, gone.options, gone.snoozes, gone.log, gone.workflow
        from gone
        left join penstock.jobs as type on type.name = gone.name
    )
    select coalesce(array_agg(gone.id), '{}'), array_agg(row(gone.id, gone.workflow, true, p_status)::penstock.ended_job)
    into ended, ends
    from gone;
    delete from penstock.job_dependencies where job = any (ended);
    -- Always with a tick: another transaction may add a dependency on one of them that is not visible here.
    if ends is not null then
        perform penstock.note_ends(ends);
        perform penstock.tell_all('workflows', '');
    end if;
    return cardinality(ended);
end
$$;
comment on function penstock.end_waiting(uuid[], penstock.archived_job_status, text[], jsonb[], timestamptz) is
    'Part of what ends jobs that wait for others: archives those of these jobs, which the caller has locked, that are in waiting_jobs, each with its reason and its error (null: none). Call ensure_archive before. Returns how many.';

create or replace function penstock.forget_waiting(p_ids uuid[])
returns void
language plpgsql
as $$
declare
    ends penstock.ended_job[];
begin
    with gone as (
        delete from penstock.waiting_jobs where id = any (p_ids) returning id, workflow
    )
    select array_agg(row(gone.id, gone.workflow, true, 'cancelled')::penstock.ended_job) from gone into ends;
    delete from penstock.job_dependencies where job = any (p_ids);
    delete from penstock.job_signals where job = any (p_ids);
    -- Always with a tick, as in end_waiting.
    if ends is not null then
        perform penstock.note_ends(ends);
        perform penstock.tell_all('workflows', '');
    end if;
end
$$;
comment on function penstock.forget_waiting(uuid[]) is
    'Part of erasures: deletes these jobs, which wait for others and which the caller has locked. What waits for them is cancelled.';

create or replace function penstock.lock_waiting_of(p_name text, p_limit integer)
returns uuid[]
language sql
as $$
    select array(select job.id from penstock.waiting_jobs as job where job.name = p_name limit p_limit for update skip locked)
$$;
comment on function penstock.lock_waiting_of(text, integer) is
    'Part of drop_type and end_dropped_types: up to p_limit jobs of a type that wait for others, without those that another transaction has locked.';

create or replace function penstock.stuck_dependencies()
returns table (job uuid, name text, after uuid)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select oldest.job, job.name, oldest.after
    from (
        select * from penstock.job_dependencies as dependency where dependency.linked order by dependency.id limit 10000
    ) as oldest
    left join penstock.waiting_jobs as job on job.id = oldest.job
    where (select 1 from penstock.waiting_jobs as other where other.id = oldest.after) is null
        and (select 1 from penstock.queued_jobs as other where other.id = oldest.after and other.awaited) is null
        and (select 1 from penstock.job_groups as other where other.id = oldest.after and other.finished_at is null) is null
        -- What has just ended is released in a moment.
        and (
            select 1 from penstock.archived_jobs as other
            where other.id = oldest.after and other.finished_at > penstock.clock() - interval '1 minute'
            limit 1
        ) is null
        and (
            select 1 from penstock.job_groups as other
            where other.id = oldest.after and other.finished_at > penstock.clock() - interval '1 minute'
        ) is null
        and (select 1 from penstock.workflow_ticks as tick where oldest.after = any (tick.jobs) limit 1) is null
    order by oldest.id
    limit 10
$$;
comment on function penstock.stuck_dependencies() is
    'Part of penstock doctor: of the 10,000 oldest dependencies up to ten for whose end nothing will be noted, since the other job has ended or is gone. There are none.';

create or replace function penstock.endless_waits(p_before timestamptz)
returns table (kind text, id uuid, name text, waits_for text, since timestamptz)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    (
        select 'signal', job.id, job.name, job.waits_for, step.at
        from (
            -- The oldest, since their ids begin with their time.
            select each.id, each.name, each.waits_for, each.run_after
            from penstock.queued_jobs as each where each.waits_for is not null order by each.id limit 10000
        ) as job
        join penstock.job_steps as step on step.job = job.id and step.name = job.waits_for
        where job.run_after = penstock.without_time() and step.kind = 'wait' and step.due is null and step.at < p_before
        order by step.at
        limit 1000
    )
    union all
    (
        select 'group', open.id, open.name, null, open.changed_at
        from (
            select each.id, each.name, each.sealed_at, each.changed_at
            from penstock.job_groups as each where each.finished_at is null order by each.created_at, each.id limit 10000
        ) as open
        where open.sealed_at is null and open.changed_at < p_before
        order by open.changed_at
        limit 1000
    )
$$;
comment on function penstock.endless_waits(timestamptz) is
    'Part of penstock doctor: of the 10,000 oldest each up to 1,000 jobs that have waited since before this time for a signal without a timeout (kind signal), and job groups that are not sealed and have not changed since (kind group).';

create or replace function penstock.count_children(p_group uuid, out added bigint, out ended bigint)
language sql
stable
as $$
    select
        job_group.added + coalesce(sum(tick.added), 0)::bigint,
        job_group.succeeded + job_group.failed + job_group.cancelled + job_group.expired
            + coalesce(sum(tick.succeeded + tick.failed + tick.cancelled + tick.expired), 0)::bigint
    from penstock.job_groups as job_group
    left join penstock.workflow_ticks as tick on tick.workflow = job_group.id
    where job_group.id = p_group
    group by job_group.id
$$;
comment on function penstock.count_children(uuid) is
    'Part of why: how many children a job group has, and how many of these have ended, also those whose ticks are not folded yet.';

create or replace function penstock.why_waiting(p_id uuid)
returns table (reason text, message text, since timestamptz, by_job uuid, ahead bigint, expires_at timestamptz)
language sql
stable
as $$
    select
        'dependencies',
        format(
            'It waits for the end of %s: %s.',
            case when open.jobs = 1 then 'a job' else open.jobs || ' jobs, first' end,
            coalesce(
                (
                    select format(
                        'job group %s, of whose %s children %s have ended%s', other.name, children.added, children.ended,
                        case when other.sealed_at is null then ' and more may come' else '' end
                    )
                    from penstock.job_groups as other
                    cross join lateral penstock.count_children(other.id) as children
                    where other.id = open.first and other.finished_at is null
                ),
                (select format('%s of %s, which waits for others', other.id, other.name) from penstock.waiting_jobs as other where other.id = open.first),
                (
                    select format('%s of %s, which is %s', other.id, other.name, penstock.shown_status(other))
                    from penstock.queued_jobs as other where other.id = open.first
                ),
                format('%s, which has ended: it is released in a moment', open.first)
            )
        ),
        penstock.shown_time(job.created_at), open.first, open.jobs, penstock.shown_time(job.expires_at)
    from penstock.waiting_jobs as job
    cross join lateral (
        select count(*) as jobs, (array_agg(dependency.after order by dependency.id))[1] as first
        from penstock.job_dependencies as dependency
        where dependency.job = job.id
    ) as open
    where job.id = p_id
$$;
comment on function penstock.why_waiting(uuid) is 'Part of why: for which jobs a job waits; no row when it waits for none.';
