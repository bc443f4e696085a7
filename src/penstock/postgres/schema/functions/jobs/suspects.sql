-- Suspects: jobs that were in flight when workers were lost, and the end of what a lost worker held. The head of tables/0002_jobs.sql
-- explains them. jobs/crashes.sql has the claim of a trial.

create or replace function penstock.split_suspects(p_ids uuid[], p_moment timestamptz)
returns void
language plpgsql
as $$
declare
    suspects integer;
    again boolean;
    parts integer;
    trials bigint[];
begin
    select count(*), bool_or(job.trial is not null) into suspects, again
    from penstock.queued_jobs as job
    where job.id = any (p_ids) and job.status = 'queued' and job.crashes = 2;
    if suspects = 0 then
        return;
    end if;
    -- Side by side over all workers, in halves at least, in quarters when a trial has shown that one of them ends its workers, and not
    -- more in one than a worker claims at once.
    parts := greatest(
        least(
            suspects,
            greatest(case when again then 4 else 2 end, least(16, (select count(*) from penstock.workers where state <> 'dead' and seen_at > p_moment - dead_after * 0.6)))
        ),
        suspects / 500 + 1
    );
    trials := array(select nextval('penstock.lease_id') from generate_series(1, parts));
    update penstock.queued_jobs as job
    set trial = case when suspects > 1 then trials[divided.part] end
    from (
        select each.id, ntile(parts) over (order by each.slot, each.key, each.seq, each.id) as part
        from penstock.queued_jobs as each
        where each.id = any (p_ids) and each.status = 'queued' and each.crashes = 2
    ) as divided
    where job.id = divided.id;
end
$$;
comment on function penstock.split_suspects(uuid[], timestamptz) is
    'Part of end_lost: divides the jobs that were in flight when a worker was lost, and are suspects now, into trials.';

create or replace function penstock.end_lost(
    p_holder text, p_ids uuid[], p_attempts smallint[], p_leases bigint[], p_error jsonb, p_speaks boolean, p_moment timestamptz
)
returns integer
language plpgsql
as $$
declare
    size constant integer := cardinality(p_ids);
    its_process constant text := penstock.process_of(p_holder);
    outcome text := case when p_speaks then 'lost' else 'moved' end;
    ended_how text;
    alone record;
    ended integer;
begin
    if p_speaks and size = 1 then
        select job.id, job.lone_crashes, type.max_crashes into alone
        from penstock.queued_jobs as job
        join penstock.jobs as type on type.name = job.name
        where job.id = p_ids[1] and job.crashes = 3;
        if found then
            outcome := case
                when (alone.lone_crashes > 0 or alone.max_crashes = 1) and penstock.lost_together(its_process) then 'moved'
                else 'lost-alone'
            end;
            if outcome = 'lost-alone' then
                update penstock.lost_workers set job = alone.id where lost_workers.process = its_process;
            end if;
        end if;
    end if;
    select lost.how into ended_how from penstock.lost_workers as lost where lost.process = its_process and lost.how is not null;
    if found then
        p_error := p_error || jsonb_build_object('message', format('the process of the worker ended while it held the job: %s', ended_how));
    end if;
    select count(*) into ended
    from penstock.end_attempts(
        p_ids, p_attempts, p_leases, array_fill(outcome, array[size]), array_fill(p_error, array[size]),
        array_fill(interval '0', array[size]), p_moment
    );
    if outcome = 'lost' then
        perform penstock.split_suspects(p_ids, p_moment);
    end if;
    return ended;
end
$$;
comment on function penstock.end_lost(text, uuid[], smallint[], bigint[], jsonb, boolean, timestamptz) is
    'Part of recover_leases and end_slots: ends the attempts that a lost worker or member held. p_speaks: whether the loss says anything about them; otherwise they go back as they were. Returns how many.';

create or replace function penstock.stranded_suspects(p_moment timestamptz)
returns setof uuid
language plpgsql
stable
as $$
begin
    if (select true from penstock.queued_jobs as job where job.run_after = penstock.isolation_time() order by job.name, job.seq limit 1) is null then
        return;
    end if;
    if (select true from penstock.leases where leases.on_trial is not null order by leases.id limit 1) then
        return;
    end if;
    return query
    select waiting.id
    from penstock.queued_jobs as waiting
    where waiting.run_after = penstock.isolation_time()
        and waiting.crashes = 2
        and waiting.trial is not null
        and waiting.updated_at < p_moment - interval '15 seconds'
        -- A suspect that is the last of its trial is alone, and what its key or its type holds back waits for that, not for a worker.
        and exists (
            select from penstock.queued_jobs as other
            where other.run_after = penstock.isolation_time() and other.trial = waiting.trial and other.id <> waiting.id
        )
    order by waiting.name, waiting.seq, waiting.id
    limit 1000;
end
$$;
comment on function penstock.stranded_suspects(timestamptz) is
    'Part of recover and due_work: suspects for whose trial no worker has been free for 15 seconds, while no other trial runs; those that are alone are left out. 1,000 at most.';

create or replace function penstock.release_suspects(p_moment timestamptz)
returns integer
language plpgsql
as $$
declare
    released integer;
begin
    -- The places in the queue of those that have no number are new.
    update penstock.queued_jobs as job
    set crashes = 1,
        trial = null,
        run_after = p_moment,
        updated_at = p_moment
    where job.id = any (array(
        select waiting.id
        from penstock.queued_jobs as waiting
        where waiting.id = any (array(select penstock.stranded_suspects(p_moment)))
            and waiting.crashes = 2
            and waiting.run_after = penstock.isolation_time()
        order by waiting.id
        for update skip locked
    ));
    get diagnostics released = row_count;
    return released;
end
$$;
comment on function penstock.release_suspects(timestamptz) is
    'Part of recover: suspects for whose trials no worker has been free go back as ordinary jobs. Their next loss makes them suspects again. Returns how many.';
