-- Leases: what a worker holds, and until when. The head of tables/0002_jobs.sql explains them.

create or replace function penstock.open_lease(
    p_lease bigint, p_name text, p_worker text, p_priority smallint, p_moment timestamptz, p_for interval, p_first_seq bigint,
    p_last_seq bigint, p_jobs bigint, p_ids uuid[]
)
returns bigint
language plpgsql
as $$
begin
    insert into penstock.leases (id, first_seq, last_seq, started_at, expires_at, open_jobs, priority, name, worker, jobs)
    values (p_lease, p_first_seq, p_last_seq, p_moment, p_moment + p_for, p_jobs, p_priority, p_name, p_worker, p_ids);
    return p_lease;
end
$$;
comment on function penstock.open_lease(bigint, text, text, smallint, timestamptz, interval, bigint, bigint, bigint, uuid[]) is
    'Part of claim, claim_alone and claim_keys: opens the lease of jobs that a worker holds from p_moment on, for p_for. p_ids: in a pool, the jobs. Returns its number.';

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
    insert into penstock.leases (
        id, first_seq, last_seq, started_at, expires_at, open_jobs, priority, name, worker, cancelled, jobs, renews
    )
    select new_lease, p_first_seq, p_last_seq, old.started_at, p_expires_at, cardinality(p_ids), old.priority, old.name, p_worker,
        old.cancelled, case when old.jobs is not null then p_ids end, p_renews
    from penstock.leases as old
    where old.id = p_lease;
    update penstock.queued_jobs set lease = new_lease, updated_at = p_moment where queued_jobs.id = any (p_ids);
    perform penstock.close_leases(array[p_lease], array[cardinality(p_ids)]);
    return new_lease;
end
$$;
comment on function penstock.split_lease(bigint, uuid[], bigint, bigint, text, timestamptz, bigint, timestamptz) is
    'Part of extend and leave_to_callback: gives these jobs of a lease, which the caller has locked, a lease of their own, of p_worker, until p_expires_at. p_renews: the lease that the caller of a repeated call knows. Returns the number of the new lease.';
