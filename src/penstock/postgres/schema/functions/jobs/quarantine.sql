-- Quarantine: archives jobs that cannot be read, whichever client wrote them.
--
-- A claim fails as a whole when one of its jobs cannot be converted to text (a document of more than 1 GiB), and its answer fails as a
-- whole when the client cannot read one of the rows. So that one job does not block all others, a client that gets such an error calls
-- quarantine_unreadable, which checks the next jobs of the queue one by one; and it reads each of held_jobs, which it holds without
-- knowing, on its own.
--
-- A quarantined job is archived as failed with the reason quarantined. A payload that no client can read goes to
-- quarantined_payloads, and times out of range become the nearest ones in range, so that every client can read the archive.

create or replace function penstock.readable(p_id uuid, p_data jsonb, p_moment timestamptz)
returns jsonb
language plpgsql
as $$
begin
    if penstock.shown(p_data) is not null then
        return p_data;
    end if;
    insert into penstock.quarantined_payloads (id, data, quarantined_at) values (p_id, p_data, p_moment) on conflict (id) do nothing;
    return 'null';
end
$$;
comment on function penstock.readable(uuid, jsonb, timestamptz) is
    'Part of what archives jobs: the payload, or null in its place when it cannot be read, and it is kept in quarantined_payloads.';

create or replace function penstock.quarantine(p_ids uuid[], p_message text)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    error constant jsonb := jsonb_build_object('type', 'Quarantined', 'message', left(coalesce(p_message, 'it cannot be read'), 2000));
    job penstock.queued_jobs;
    done integer := 0;
begin
    perform penstock.check_size(cardinality(p_ids), 10000, 'jobs');
    perform penstock.ensure_archive(moment);
    for job in
        select * from penstock.queued_jobs where id = any (p_ids) order by id for update skip locked
    loop
        if job.errors is not null and penstock.shown(job.errors) is null then
            -- A list of errors that no client can read would make the archive unreadable.
            update penstock.queued_jobs set errors = null where id = job.id;
        end if;
        if job.status = 'in-progress' then
            perform penstock.end_attempts(
                array[job.id], array[job.attempt], array[job.lease], array['quarantined'], array[error], null, moment
            );
        else
            perform penstock.archive_waiting(array[job.id], 'failed', 'quarantined', error, moment);
        end if;
        done := done + 1;
    end loop;
    return done;
end
$$;
comment on function penstock.quarantine(uuid[], text) is
    'Archives jobs that are queued or in progress as failed with the reason quarantined, p_message being the error. Returns how many.';

create or replace function penstock.quarantine_unreadable(p_names text[], p_limit integer default 10000)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    job record;
    problem text;
    done integer := 0;
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'job types');
    perform penstock.check_limit(p_limit, 100000);
    for job in
        select waiting.*
        from (select distinct given from unnest(p_names) as given) as wanted (name)
        cross join lateral (
            select queued.id, queued.data, queued.message
            from penstock.queued_jobs as queued
            where queued.name = wanted.name and queued.seq is not null and queued.status = 'queued'
            order by queued.priority, queued.seq
            limit p_limit
        ) as waiting
    loop
        problem := case
            when penstock.shown(coalesce(penstock.payload(job.message), job.data)) is null
                then 'its payload is larger than 4 MiB as text'
        end;
        if problem is not null then
            done := done + penstock.quarantine(array[job.id], problem);
        end if;
    end loop;
    return done;
end
$$;
comment on function penstock.quarantine_unreadable(text[], integer) is
    'Quarantines those of the first p_limit ready jobs of each type that no client can read. To be called when a claim fails for what it reads. Returns how many.';

create or replace function penstock.held_jobs(p_worker text, p_known bigint[])
returns table (id uuid, attempt smallint, lease bigint)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(cardinality(p_known), 100000, 'leases');
    select job.id, job.attempt, job.lease
    from penstock.leases as lease
    cross join lateral penstock.jobs_of_lease(lease) as job
    where lease.worker = p_worker and lease.id <> all (p_known)
$$;
comment on function penstock.held_jobs(text, bigint[]) is
    'The jobs that a worker holds under other leases than those that it knows: what an answer that it could not read brought.';

create or replace function penstock.read_held(p_worker text, p_id uuid)
returns table (
    id uuid, name text, attempt smallint, max_attempts smallint, priority smallint, key text, data text,
    created_at timestamptz, run_after timestamptz, seq bigint, lease bigint
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        job.id, job.name, job.attempt, job.max_attempts, job.priority, job.key, penstock.shown(coalesce(penstock.payload(job.message), job.data)),
        penstock.shown_time(job.created_at), penstock.shown_time(job.run_after), job.seq, job.lease
    from penstock.queued_jobs as job
    join penstock.leases as lease on lease.id = job.lease
    where job.id = p_id and lease.worker = p_worker
$$;
comment on function penstock.read_held(text, uuid) is 'One job that a worker holds, as claim gives it out. data is null when its text is too large.';

create or replace function penstock.quarantined_in(p_xid xid8)
returns table (name text, jobs bigint)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select job.name, count(*)
    from penstock.archived_jobs as job
    where job.xid = p_xid and job.reason = 'quarantined'
    group by job.name
$$;
comment on function penstock.quarantined_in(xid8) is
    'How many jobs of each type a transaction has quarantined: for the metrics of the process that called recover or quarantine_unreadable.';

create or replace function penstock.recently_quarantined()
returns table (name text, jobs bigint, latest uuid)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select job.name, count(*), (array_agg(job.id order by job.finished_at desc))[1]
    from (
        select archived.name, archived.id, archived.finished_at
        from penstock.archived_jobs as archived
        where archived.status <> 'succeeded'
            and archived.finished_at > penstock.clock() - interval '1 day'
            and archived.reason = 'quarantined'
        order by archived.finished_at desc
        limit 1000
    ) as job
    group by job.name
    order by count(*) desc, job.name
$$;
comment on function penstock.recently_quarantined() is
    'The job types of which jobs were quarantined within a day, the most first: how many of the latest 1,000, and the latest of them.';
