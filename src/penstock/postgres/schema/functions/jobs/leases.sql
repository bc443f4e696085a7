-- Leases: what a worker holds, and until when. The head of tables/0002_jobs.sql explains them.

create or replace function penstock.open_lease(
    p_lease bigint, p_name text, p_worker text, p_priority smallint, p_started_at timestamptz, p_expires_at timestamptz, p_first_seq bigint,
    p_last_seq bigint, p_jobs bigint, p_ids uuid[], p_keep smallint, p_cancelled uuid[] default null,
    p_renews bigint default null, p_origin bigint default null, p_on_trial integer default null
)
returns bigint
language plpgsql
as $$
begin
    insert into penstock.leases (
        id, first_seq, last_seq, started_at, expires_at, open_jobs, priority, keep, name, worker, jobs, cancelled, renews, origin,
        on_trial
    )
    values (
        p_lease, p_first_seq, p_last_seq, p_started_at, p_expires_at, p_jobs, p_priority, p_keep, p_name, p_worker, p_ids, p_cancelled,
        p_renews, p_origin, p_on_trial
    );
    return p_lease;
end
$$;
comment on function penstock.open_lease(
    bigint, text, text, smallint, timestamptz, timestamptz, bigint, bigint, bigint, uuid[], smallint, uuid[], bigint, bigint, integer
) is
    'Part of claim, claim_alone, claim_keys and split_lease: opens the lease of jobs that a worker holds until p_expires_at. p_ids: in a pool, the jobs. p_keep: the retention class of those that will succeed; null: settle looks it up. p_cancelled, p_renews, p_origin, p_on_trial: as in the table. Returns its number.';

create or replace function penstock.split_lease(
    p_lease bigint, p_ids uuid[], p_first_seq bigint, p_last_seq bigint, p_worker text, p_expires_at timestamptz, p_renews bigint,
    p_moment timestamptz
)
returns bigint
language plpgsql
as $$
declare
    new_lease constant bigint := nextval('penstock.lease_id');
begin
    perform penstock.open_lease(
        new_lease, old.name, p_worker, old.priority, old.started_at, p_expires_at, p_first_seq, p_last_seq, cardinality(p_ids),
        case when old.jobs is not null then p_ids end, old.keep, old.cancelled, p_renews,
        coalesce(old.origin, old.id), old.on_trial
    )
    from penstock.leases as old
    where old.id = p_lease;
    update penstock.queued_jobs set lease = new_lease, updated_at = p_moment where queued_jobs.id = any (p_ids);
    perform penstock.close_leases(array[p_lease], array[cardinality(p_ids)]);
    return new_lease;
end
$$;
comment on function penstock.split_lease(bigint, uuid[], bigint, bigint, text, timestamptz, bigint, timestamptz) is
    'Part of extend and leave_to_callback: gives these jobs of a lease, which the caller has locked, a lease of their own, of p_worker, until p_expires_at. p_renews: the lease that the caller of a repeated call knows. Returns the number of the new lease.';

create or replace function penstock.extend(
    p_ids uuid[],
    p_attempts smallint[],
    p_leases bigint[] default null,
    p_for interval default null
)
returns table (id uuid, lease bigint)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment constant timestamptz := penstock.clock();
    held record;
    new_lease bigint;
begin
    perform penstock.check_size(greatest(cardinality(p_ids), cardinality(p_attempts), cardinality(p_leases)), 100000, 'jobs');
    perform penstock.check_lists(array[array_dims(p_ids), array_dims(p_attempts), array_dims(p_leases)]);
    if coalesce(cardinality(p_ids), 0) > 0 and (p_leases is null or array_position(p_leases, null) is not null) then
        raise exception 'a job is to be extended without its lease'
            using errcode = 'PS400', hint = 'Give the lease that claim or extend returned for each job.';
    end if;
    if p_for <= interval '0' or p_for > interval '30 days' then
        raise exception 'cannot extend a lease by %', p_for
            using errcode = 'PS400', hint = 'Extend by more than nothing and at most 30 days; null means the visibility timeout of the type.';
    end if;
    for held in
        with locked as (
            select job.id, job.lease, job.seq
            from unnest(p_ids, p_attempts, p_leases) as given (id, attempt, lease)
            join penstock.queued_jobs as job on job.id = given.id
            where job.status = 'in-progress'
                and job.attempt = given.attempt
                and (
                    given.lease is null
                    or job.lease = given.lease
                    or exists (select from penstock.leases as held where held.id = job.lease and held.renews = given.lease)
                )
            for update of job
        )
        select
            locked.lease,
            array_agg(distinct locked.id) as ids,
            min(locked.seq) as first_seq,
            max(locked.seq) as last_seq,
            count(distinct locked.id)::integer as jobs
        from locked
        group by locked.lease
        order by locked.lease
    loop
        select penstock.split_lease(
            old.id, held.ids, held.first_seq, held.last_seq, old.worker, moment + coalesce(p_for, jobs.visibility_timeout),
            -- For a repeated extend: the lease that the caller knows.
            coalesce((select max(given) from unnest(p_leases) as given where given = old.renews), old.id), moment
        )
        into new_lease
        from penstock.leases as old
        join penstock.jobs on jobs.name = old.name
        where old.id = held.lease;
        return query select extended, new_lease from unnest(held.ids) as extended;
    end loop;
end
$$;
comment on function penstock.extend(uuid[], smallint[], bigint[], interval) is
    'Makes jobs belong to their worker for p_for from now (default: the visibility timeout). Returns each job extended with its new lease; a job that is missing no longer belongs to the caller. May be repeated with the same arguments when an answer was lost.';
