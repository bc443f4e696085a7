-- Maintenance: what every worker does for the whole database at intervals: promote due jobs, expire jobs and recover
-- lost jobs. (retention.sql has prune.) All functions here may run in many processes at once.

create or replace function penstock.try_maintenance(p_name text)
returns boolean
language plpgsql
as $$
begin
    perform from penstock.maintenance where name = p_name for update skip locked;
    return found;
end
$$;
comment on function penstock.try_maintenance(text) is 'Part of recover and maintain_topics: whether this transaction may do the work; until it ends, no other one may.';

create or replace function penstock.promote(p_limit integer default 1000)
returns table (promoted integer, next_due timestamptz)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    promoted_type record;
begin
    perform penstock.check_limit(p_limit, 100000);
    promoted := 0;
    if exists (select from penstock.queued_jobs where seq is null and run_after <= moment) then
        perform pg_current_xact_id();
        for promoted_type in
            with due as (
                update penstock.queued_jobs as job
                set seq = nextval('penstock.job_seq')
                where job.ctid = any (array(
                    select waiting.ctid
                    from penstock.queued_jobs as waiting
                    where waiting.seq is null and waiting.run_after <= moment
                    order by waiting.run_after
                    limit p_limit
                    for update skip locked
                ))
                returning job.name
            )
            select due.name, count(*)::integer as jobs from due group by due.name
        loop
            promoted := promoted + promoted_type.jobs;
            perform penstock.wake_claimers(promoted_type.name, promoted_type.jobs);
        end loop;
    end if;
    select penstock.shown_time(min(run_after)) into next_due from penstock.queued_jobs where seq is null;
    return next;
end
$$;
comment on function penstock.promote(integer) is
    'Puts up to p_limit deferred jobs whose time has come into the ready queue. Returns how many, and when the next one is due.';

create or replace function penstock.expire(p_limit integer default 1000)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
begin
    perform penstock.check_limit(p_limit, 100000);
    perform penstock.ensure_archive(moment);
    if exists (select from penstock.waiting_jobs where expires_at <= moment) then
        perform penstock.end_waiting(
            array(
                select due.id
                from penstock.waiting_jobs as due
                where due.expires_at <= moment
                order by due.expires_at
                limit p_limit
                for update skip locked
            ),
            'expired', null, null, moment
        );
    end if;
    return penstock.archive_waiting(
        array(
            select due.id
            from penstock.queued_jobs as due
            where due.expires_at <= moment and due.status = 'queued'
            order by due.expires_at
            limit p_limit
            for update skip locked
        ),
        'expired', null, null, moment
    );
end
$$;
comment on function penstock.expire(integer) is 'Archives up to p_limit queued jobs whose expires_at has passed, and as many that wait for others. Returns how many queued ones.';

create or replace function penstock.jobs_of_lease(lease penstock.leases)
returns setof penstock.queued_jobs
language plpgsql
stable
as $$
begin
    if lease.jobs is not null then
        return query
        select job.*
        from unnest(lease.jobs) as held (id)
        join penstock.queued_jobs as job on job.id = held.id
        where job.lease = lease.id and job.status = 'in-progress';
    else
        return query
        select job.*
        from penstock.queued_jobs as job
        where job.name = lease.name
            and job.priority = lease.priority
            and job.seq between lease.first_seq and lease.last_seq
            and job.slot is null
            and job.lease = lease.id
            and job.status = 'in-progress';
    end if;
end
$$;
comment on function penstock.jobs_of_lease(penstock.leases) is 'The jobs that a lease still holds.';

create or replace function penstock.free_jobs_of_lease(p_lease penstock.leases)
returns setof penstock.queued_jobs
language plpgsql
as $$
begin
    return query
    select job.*
    from penstock.queued_jobs as job
    where job.id = any (array(select held.id from penstock.jobs_of_lease(p_lease) as held))
        and job.lease = p_lease.id
        and job.status = 'in-progress'
    for update of job skip locked;
end
$$;
comment on function penstock.free_jobs_of_lease(penstock.leases) is
    'Part of recover and release_unknown: locks the jobs that a lease still holds, and returns them, without those that another transaction has locked, such as one that finishes its job: its end decides what becomes of the job.';

create or replace function penstock.recover_leases(p_leases bigint[], p_error jsonb, p_moment timestamptz, p_orderly boolean default false)
returns integer
language plpgsql
as $$
declare
    holder text;
    lost penstock.leases;
    closed bigint[];
    held record;
    ids uuid[];
    attempts smallint[];
    of_leases bigint[];
    recovered integer := 0;
begin
    -- All jobs of a holder at once: which of them can have ended it depends on all.
    for holder in
        select distinct leases.worker from penstock.leases where leases.id = any (p_leases) order by leases.worker
    loop
        ids := '{}';
        attempts := '{}';
        of_leases := '{}';
        closed := '{}';
        for lost in
            select * from penstock.leases where leases.id = any (p_leases) and leases.worker = holder order by leases.id for update skip locked
        loop
            closed := closed || lost.id;
            select array_agg(job.id) as ids, array_agg(job.attempt) as attempts into held from penstock.free_jobs_of_lease(lost) as job;
            if held.ids is not null then
                ids := ids || held.ids;
                attempts := attempts || held.attempts;
                of_leases := of_leases || array_fill(lost.id, array[cardinality(held.ids)]);
            end if;
        end loop;
        if cardinality(ids) > 0 then
            recovered := recovered + penstock.end_lost(
                holder, ids, attempts, of_leases, p_error, not p_orderly and penstock.speaks_of(holder), p_moment
            );
        end if;
        -- A job that another transaction has locked keeps its lease, which the next call looks at again.
        delete from penstock.leases where leases.id = any (closed) and not exists (select from penstock.jobs_of_lease(leases));
    end loop;
    return recovered;
end
$$;
comment on function penstock.recover_leases(bigint[], jsonb, timestamptz, boolean) is
    'Part of recover and unregister_worker: ends the attempts of leases as lost, to be retried at once from their place in the queue. p_orderly: their worker left, which says nothing about its jobs.';

create or replace function penstock.recover_dead_workers(p_moment timestamptz)
returns integer
language plpgsql
as $$
declare
    dead text[];
    recovered integer := 0;
begin
    -- One check never suffices to take a process for dead: see the head of tables/0003_workers.sql.
    update penstock.workers
    set suspected_at = p_moment
    where id = any (array(
        select id
        from penstock.workers
        where state <> 'dead' and penstock.is_to_be_suspected(seen_at, dead_after, suspected_at, p_moment)
        order by id
        for update skip locked
    ));
    with gone as (
        update penstock.workers
        set state = 'dead'
        where id = any (array(
            select id
            from penstock.workers
            where state = 'dead' or ended_at is not null or penstock.is_dead(seen_at, dead_after, suspected_at, p_moment)
            order by id
            for update skip locked
        ))
        returning id
    )
    select array_agg(gone.id) into dead from gone;
    if dead is not null then
        perform penstock.note_losses(dead, p_moment);
        delete from penstock.listeners where kind = 'jobs' and channel = any (array(select 'penstock_' || unnest(dead)));
        recovered := penstock.recover_leases(
            array(select id from penstock.leases where worker = any (dead)),
            jsonb_build_object('type', 'WorkerLost', 'message', 'the worker died or lost contact while it held the job'),
            p_moment
        );
        -- The next call recovers leases that another transaction has locked now.
        delete from penstock.workers
        where id = any (dead) and not exists (select from penstock.leases where leases.worker = workers.id);
        -- The promise of a holder outlives it until none of its leases can be left; likewise that of one which never registered.
        delete from penstock.holders
        where since < p_moment - interval '1 hour'
            and not exists (select from penstock.workers where workers.id = holders.id)
            and not exists (select from penstock.members where members.id = holders.id)
            and not exists (select from penstock.leases where leases.worker = holders.id);
    end if;
    return recovered;
end
$$;
comment on function penstock.recover_dead_workers(timestamptz) is
    'Part of recover: suspects silent workers, and ends the attempts of those that are dead. Returns how many.';

create or replace function penstock.recover(p_limit integer default 100)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    recovered integer;
begin
    perform penstock.check_limit(p_limit, 10000);
    -- One process at a time is enough; the others do not wait for it.
    if not penstock.try_maintenance('recover') then
        return 0;
    end if;
    -- The partition of tomorrow too, long before it is needed: a query that was planned while a partition is attached does not see it.
    perform penstock.ensure_archive(moment);
    perform penstock.ensure_archive(moment + interval '1 day');
    perform penstock.forget_listeners();
    perform penstock.forget_producers(moment);
    if (select true from penstock.finished_jobs order by finished_jobs.id limit 1) then
        perform penstock.fold_finished(null);
    end if;
    perform penstock.end_unique_periods(moment);
    perform penstock.end_dropped_types(moment);
    delete from penstock.place_waiters
    where ctid = any (array(
        select waiter.ctid
        from penstock.place_waiters as waiter
        where waiter.since < clock_timestamp() - interval '10 minutes'
        order by waiter.name, waiter.worker
        for update skip locked
    ));
    recovered := penstock.recover_dead_workers(moment);
    recovered := recovered + penstock.recover_leases(
        array(
            select ended.id
            from penstock.leases as ended
            where ended.expires_at < moment
                -- Whether the loss of a silent worker says anything is known when it is dead.
                and not (
                    ended.on_trial is not null
                    and exists (
                        select from penstock.workers
                        where penstock.process_of(workers.id) = penstock.process_of(ended.worker) and workers.seen_at + workers.dead_after * 0.6 < moment
                    )
                )
            order by ended.expires_at
            limit p_limit
        ),
        jsonb_build_object('type', 'LeaseExpired', 'message', 'the visibility timeout ended before the job was settled'),
        moment
    );
    perform penstock.release_suspects(moment);
    return recovered;
end
$$;
comment on function penstock.recover(integer) is
    'Ends the attempts of dead workers and of up to p_limit leases whose time is up, so that others can take the jobs. Returns how many jobs.';
