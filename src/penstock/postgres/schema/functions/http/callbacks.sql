-- Callbacks: a downstream service that was sent a job says what became of it. It knows how many attempts are left, and no lease.

-- Long, since a callback may come before the claim of its job, during it or after: the function locks the jobs, takes those that wait,
-- tells those that hold the others, and settles all, under the same locks.
create or replace function penstock.settle_attempts(
    p_names text[],
    p_ids uuid[],
    p_attempts_left smallint[],
    p_outcomes text[],
    p_details jsonb[] default null
)
returns table (ordinal integer, outcome text, wait_s double precision, run_s double precision)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment timestamptz;
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
    places integer[];
    ids uuid[];
    leases bigint[];
    attempts smallint[];
    outcomes text[];
    details jsonb[];
    waits numeric[];
    runs numeric[];
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
    -- Behind the locks: a job may have been released meanwhile.
    moment := penstock.clock();

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

        -- Locked above, so these are the leases until the end. One that was opened here knows nothing of when the job began.
        select
            array_agg(given.place order by given.place),
            array_agg(job.id order by given.place),
            array_agg(job.lease order by given.place),
            array_agg(job.attempt order by given.place),
            array_agg(p_outcomes[given.place] order by given.place),
            array_agg(
                case
                    when p_outcomes[given.place] <> 'succeeded' or (select keep_result from penstock.jobs where jobs.name = job.name)
                        then p_details[given.place]
                end
                order by given.place
            ),
            array_agg(
                extract(epoch from lease.started_at - greatest(penstock.shown_time(job.run_after), job.created_at)) order by given.place
            ),
            -- Without a claim there is no duration, which greatest() would make zero.
            array_agg(
                extract(epoch from case when lease.started_at is not null then greatest(moment - lease.started_at, interval '0') end)
                order by given.place
            )
        into places, ids, leases, attempts, outcomes, details, waits, runs
        from unnest(good) as given (place)
        join penstock.queued_jobs as job on job.id = p_ids[given.place]
        left join penstock.leases as lease on lease.id = job.lease and lease.id is distinct from new_lease;
        select jsonb_object_agg(coalesce(result.id::text, ''), result.outcome) into settled
        from penstock.settle(ids, attempts, leases, outcomes, details) as result;
        if settled ? '' then
            perform penstock.tell_all('workflows', '');
        end if;

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
        end,
        timed.wait::double precision,
        timed.run::double precision
    from unnest(p_ids) with ordinality as given (id, place)
    left join unnest(places, waits, runs) as timed (place, wait, run) on timed.place = given.place;
end
$$;
comment on function penstock.settle_attempts(text[], uuid[], smallint[], text[], jsonb[]) is
    'Settles jobs by the number of their attempts that are left, this one included, for a client that got the job without its lease (the callback of a downstream service, as Rickover counts). Each id at most once in a call. Outcomes in order: succeeded, retried, failed, cancelled; stale when the job has another number left; unknown when no such job of that type is queued or in progress. wait_s and run_s: from when the job could run to its claim, and from there to this call, in seconds; null when no one had claimed it. The holder of the lease is told on its channel: settled ID:ATTEMPT ID:ATTEMPT ...';

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
