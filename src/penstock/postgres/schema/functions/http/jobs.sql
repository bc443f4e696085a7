-- What the HTTP API needs beside the functions that every client uses: an enqueue that returns the rows as they are
-- stored, the callback that knows how many attempts are left and no lease, lists by page, and rates.

create or replace function penstock.put_jobs(
    p_name text,
    p_data jsonb[],
    p_ids uuid[],
    p_keys text[] default null,
    p_priorities smallint[] default null,
    p_run_after timestamptz[] default null,
    p_expires_at timestamptz[] default null,
    p_unique_keys text[] default null,
    p_options jsonb[] default null
)
returns table (
    ordinal integer, outcome text, id uuid, name text, attempt smallint, max_attempts smallint, run_after timestamptz, expires_at timestamptz,
    created_at timestamptz, updated_at timestamptz, status text, data text
)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    ids uuid[] := p_ids;
    outcomes text[] := array_fill('queued'::text, array[coalesce(cardinality(p_ids), 0)]);
    enqueued record;
begin
    if p_ids is null then
        raise exception 'ids are null'
            using errcode = 'PS400', hint = 'Give one id for each job.';
    end if;
    for enqueued in
        select * from penstock.enqueue_many(
            p_name, p_data, p_ids, p_keys, p_priorities, p_run_after, p_expires_at, p_unique_keys, null, p_options
        )
    loop
        ids[enqueued.ordinal] := enqueued.id;
        outcomes[enqueued.ordinal] := enqueued.outcome;
    end loop;
    -- A statement of its own: it sees what the one before wrote.
    return query
    select
        given.place::integer, given.outcome, given.id, job.name, job.attempt, job.max_attempts, penstock.shown_time(job.run_after),
        penstock.shown_time(job.expires_at), penstock.shown_time(job.created_at), penstock.shown_time(job.updated_at), job.status::text, case when given.outcome <> 'queued' then coalesce(penstock.shown(coalesce(penstock.payload(job.message), job.data)), 'null') end
    from unnest(ids, outcomes) with ordinality as given (id, outcome, place)
    left join penstock.queued_jobs as job on job.id = given.id;
end
$$;
comment on function penstock.put_jobs(text, jsonb[], uuid[], text[], smallint[], timestamptz[], timestamptz[], text[], jsonb[]) is
    'enqueue_many that returns each job as it is stored, in order, with its outcome. data only where it may differ from what was given (duplicate, coalesced). The columns of a job that is archived, or was by the time it was read, are null.';

-- Long, since a callback may come before the claim of its job, during it or after: the function locks the jobs, takes those that wait,
-- tells those that hold the others, and settles all, under the same locks.
create or replace function penstock.settle_attempts(
    p_names text[],
    p_ids uuid[],
    p_attempts_left smallint[],
    p_outcomes text[],
    p_details jsonb[] default null
)
returns table (ordinal integer, outcome text)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment constant timestamptz := penstock.clock();
    known_places integer[];
    known_ids uuid[];
    known_left integer[];
    known_statuses penstock.job_status[];
    known_names text[];
    good integer[];
    waiting uuid[];
    new_lease bigint;
    holder record;
    limited record;
    settled jsonb;
begin
    perform penstock.check_size(
        greatest(cardinality(p_names), cardinality(p_ids), cardinality(p_attempts_left), cardinality(p_outcomes), cardinality(p_details)),
        100000, 'jobs'
    );
    perform penstock.check_lists(array[
        array_dims(p_names), array_dims(p_ids), array_dims(p_attempts_left), array_dims(p_outcomes), array_dims(p_details)
    ]);
    if exists (select from unnest(p_outcomes) as given where given is null or given not in ('succeeded', 'failed', 'failed-for-good')) then
        raise exception 'unknown outcome in %', left(p_outcomes::text, 200)
            using errcode = 'PS400', hint = 'An outcome is succeeded, failed or failed-for-good.';
    end if;
    -- Locked in the order of the ids, so that two calls do not wait for each other.
    with locked as (
        select given.place, job.id, job.max_attempts - job.attempt + 1 as attempts_left, job.status, job.name
        from unnest(p_names, p_ids) with ordinality as given (name, id, place)
        join penstock.queued_jobs as job on job.id = given.id and job.name = given.name
        order by job.id
        for update of job
    )
    select
        array_agg(locked.place), array_agg(locked.id), array_agg(locked.attempts_left), array_agg(locked.status),
        array_agg(locked.name)
    into known_places, known_ids, known_left, known_statuses, known_names
    from locked;

    select array_agg(job.place) into good
    from unnest(known_places, known_left) as job (place, attempts_left)
    where job.attempts_left = p_attempts_left[job.place];

    if good is not null then
        select array_agg(job.id) into waiting
        from unnest(known_places, known_ids, known_statuses) as job (place, id, status)
        where job.place = any (good) and job.status = 'queued';
        if waiting is not null then
            -- The result came before the claim, or after the worker gave the job back. The attempt number says that it is
            -- this attempt's: take the job for the moment that it takes to settle it.
            new_lease := nextval('penstock.lease_id');
            perform penstock.open_lease(
                new_lease, known_names[1], 'callback', 0::smallint, moment, moment + interval '1 minute', 0, 0, cardinality(waiting), null,
                null
            );
            update penstock.queued_jobs as job
            set status = 'in-progress', lease = new_lease, coalesces = false, updated_at = moment
            where job.id = any (waiting);
        end if;

        -- The worker that waits for the callback is told once for the batch, not once for each job.
        for holder in
            select told.worker, string_agg(told.id || ':' || told.attempt, ' ') as jobs
            from (
                -- A notification holds 8,000 bytes, and a job takes up to 43.
                select lease.worker, job.id, job.attempt, (row_number() over (partition by lease.worker) - 1) / 150 as part
                from unnest(known_places, known_ids) as known (place, id)
                join penstock.queued_jobs as job on job.id = known.id
                join penstock.leases as lease on lease.id = job.lease
                where known.place = any (good) and lease.worker <> 'callback'
            ) as told
            group by told.worker, told.part
        loop
            perform penstock.tell(holder.worker, 'settled', holder.jobs);
        end loop;

        -- Locked above, so these are the leases until the end.
        with given as (
            select
                array_agg(p_ids[place] order by place) as ids,
                array_agg((select job.lease from penstock.queued_jobs as job where job.id = p_ids[place]) order by place) as leases,
                array_agg((select job.attempt from penstock.queued_jobs as job where job.id = p_ids[place]) order by place) as attempts,
                array_agg(p_outcomes[place] order by place) as outcomes,
                array_agg(
                    case
                        when p_outcomes[place] <> 'succeeded' or (select keep_result from penstock.jobs where jobs.name = p_names[place])
                            then p_details[place]
                    end
                    order by place
                ) as details
            from unnest(good) as place
        )
        select jsonb_object_agg(result.id, result.outcome) into settled
        from given, penstock.settle(given.ids, given.attempts, given.leases, given.outcomes, given.details) as result;

        -- A place became free under a limit, perhaps of a worker in another process.
        for limited in
            select known.name, count(*)::integer as jobs
            from unnest(known_places, known_names) as known (place, name)
            join penstock.jobs on jobs.name = known.name
            where known.place = any (good) and jobs.concurrency is not null
            group by known.name
        loop
            perform penstock.wake_claimers(limited.name, limited.jobs);
        end loop;
    end if;

    return query
    select
        given.place::integer,
        case
            when given.place = any (good) then coalesce(settled ->> given.id::text, 'succeeded')
            when given.place = any (known_places) then 'stale'
            else 'unknown'
        end
    from unnest(p_ids) with ordinality as given (id, place);
end
$$;
comment on function penstock.settle_attempts(text[], uuid[], smallint[], text[], jsonb[]) is
    'Settles jobs by the number of their attempts that are left, this one included, for a client that got the job without its lease (the callback of a downstream service, as Rickover counts). Each id at most once in a call. Outcomes in order: succeeded, retried, failed, cancelled; stale when the job has another number left; unknown when no such job of that type is queued or in progress. The holder of the lease is told on its channel: settled ID:ATTEMPT ID:ATTEMPT ...';

create or replace function penstock.attempts_of(p_ids uuid[])
returns table (id uuid, attempt smallint, lease bigint)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(cardinality(p_ids), 10000, 'jobs');
    select job.id, job.attempt, job.lease from penstock.queued_jobs as job where job.id = any (p_ids)
$$;
comment on function penstock.attempts_of(uuid[]) is
    'Which of these jobs are not finished, with attempt and lease: what a client that waits for many jobs looks at.';

create or replace function penstock.page_of_jobs(
    p_archived boolean,
    p_names text[] default null,
    p_status text default null,
    p_key text default null,
    p_since timestamptz default null,
    p_until timestamptz default null,
    p_limit integer default 100,
    p_before timestamptz default null,
    p_before_id uuid default null,
    p_reason text default null
)
returns table (id uuid, at timestamptz)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
begin
    if p_status is not null and (
        p_archived and p_status not in ('succeeded', 'failed', 'expired', 'cancelled')
        or not p_archived and p_status not in ('queued', 'in-progress')
    ) then
        raise exception 'unknown status: %', left(p_status, 100)
            using errcode = 'PS400',
                  hint = case when p_archived then 'A status is succeeded, failed, expired or cancelled.' else 'A status is queued or in-progress.' end;
    end if;
    perform penstock.check_size(cardinality(p_names), 10000, 'job types');
    perform penstock.check_limit(p_limit, 1000);
    if p_archived then
        return query
        select job.id, job.finished_at
        from penstock.archived_jobs as job
        where (p_names is null or job.name = any (p_names))
            and (p_status is null or job.status = p_status::penstock.archived_job_status)
            and (p_key is null or job.key = p_key)
            and (p_reason is null or job.reason = p_reason)
            and (p_since is null or job.finished_at >= p_since)
            and (p_until is null or job.finished_at < p_until)
            and (p_before is null or job.finished_at <= p_before and (job.finished_at, job.id) < (p_before, p_before_id))
        order by job.finished_at desc, job.id desc
        limit p_limit;
    else
        return query
        select job.id, penstock.shown_time(job.created_at)
        from penstock.queued_jobs as job
        where (p_names is null or job.name = any (p_names))
            and (p_status is null or job.status = p_status::penstock.job_status)
            and (p_key is null or job.key = p_key)
            and p_reason is null
            and (p_since is null or job.created_at >= p_since)
            and (p_until is null or job.created_at < p_until)
            and (p_before is null or (job.created_at, job.id) < (p_before, p_before_id))
        order by job.created_at desc, job.id desc
        limit p_limit;
    end if;
end
$$;
comment on function penstock.page_of_jobs(boolean, text[], text, text, timestamptz, timestamptz, integer, timestamptz, uuid, text) is
    'One page of jobs, latest first: archived ones by when they finished, others by when they were enqueued. The next page starts with the time and id of the last row as p_before and p_before_id. p_reason: only those archived for it.';

create or replace function penstock.job_rates(p_over interval default '1 minute')
returns table (name text, enqueued_per_s double precision, finished_per_s double precision, failed_per_s double precision)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
declare
    since timestamptz;
    seconds constant double precision := extract(epoch from p_over);
begin
    if p_over is null or p_over < interval '1 second' or p_over > interval '31 days' then
        raise exception 'cannot count over %', coalesce(p_over::text, 'null')
            using errcode = 'PS400', hint = 'Count over 1 second to 31 days.';
    end if;
    since := penstock.clock() - p_over;
    return query
    select
        jobs.name,
        (coalesce(waiting.jobs, 0) + coalesce(done.enqueued, 0)) / seconds,
        coalesce(done.finished, 0) / seconds,
        coalesce(done.failed, 0) / seconds
    from penstock.jobs
    left join (
        select job.name, count(*) as jobs
        from penstock.queued_jobs as job
        where job.created_at >= since
        group by job.name
    ) as waiting on waiting.name = jobs.name
    left join (
        select
            job.name,
            count(*) as finished,
            count(*) filter (where job.status = 'failed') as failed,
            count(*) filter (where job.created_at >= since) as enqueued
        from penstock.archived_jobs as job
        where job.finished_at >= since
        group by job.name
    ) as done on done.name = jobs.name
    order by jobs.name;
end
$$;
comment on function penstock.job_rates(interval) is
    'For each job type: jobs enqueued, finished and failed a second over the time up to now. Reads the whole queue: for people, not for loops.';

create or replace function penstock.stored_jobs(p_ids uuid[], p_log boolean default true)
returns table (
    id uuid, name text, status text, attempt smallint, max_attempts smallint, priority smallint, key text,
    unique_key text, data text, created_at timestamptz, run_after timestamptz, expires_at timestamptz,
    started_at timestamptz, finished_at timestamptz, worker text, errors text, result text, progress text,
    replay_of uuid, cancel_requested_at timestamptz, reason text, replayed_by uuid[], time_limit_s double precision, snoozes integer,
    log text, encrypted boolean, updated_at timestamptz
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select found.*, penstock.shown_time(coalesce(job.updated_at, found.finished_at))
    from penstock.find_jobs(p_ids, p_log) as found
    left join penstock.queued_jobs as job on job.id = found.id
$$;
comment on function penstock.stored_jobs(uuid[], boolean) is 'find_jobs, with the time of the last change.';

create or replace function penstock.leave_to_callback(p_ids uuid[], p_attempts smallint[], p_leases bigint[])
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    held record;
    left_alone integer := 0;
begin
    perform penstock.check_size(greatest(cardinality(p_ids), cardinality(p_attempts), cardinality(p_leases)), 100000, 'jobs');
    for held in
        with locked as (
            select job.id, job.lease, job.seq
            from unnest(p_ids, p_attempts, p_leases) as given (id, attempt, lease)
            join penstock.queued_jobs as job on job.id = given.id
            where job.status = 'in-progress' and job.attempt = given.attempt and job.lease = given.lease
            for update of job
        )
        select
            locked.lease, array_agg(locked.id) as ids, count(*)::integer as jobs, min(locked.seq) as first_seq, max(locked.seq) as last_seq
        from locked
        group by locked.lease
        order by locked.lease
    loop
        perform penstock.split_lease(
            old.id, held.ids, held.first_seq, held.last_seq, 'callback', old.expires_at, null, penstock.clock()
        )
        from penstock.leases as old
        where old.id = held.lease;
        left_alone := left_alone + held.jobs;
    end loop;
    return left_alone;
end
$$;
comment on function penstock.leave_to_callback(uuid[], smallint[], bigint[]) is
    'What a dequeuer does that goes away while a downstream service works: the jobs stay in progress until their callback, or until their leases end. Returns how many.';
