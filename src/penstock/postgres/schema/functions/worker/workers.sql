-- Workers: each has one row, which its heartbeats keep alive.

create or replace function penstock.register_worker(
    p_id text,
    p_names text[],
    p_host text default '',
    p_pid integer default 0,
    p_concurrency integer default 1,
    p_dead_after interval default '10 seconds',
    p_metadata jsonb default '{}',
    p_supervisor text default null
)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'job types');
    perform penstock.check_sender('worker', p_id, p_dead_after);
    if p_concurrency is null or p_concurrency not between 0 and 1000000 then
        raise exception 'invalid concurrency: %', coalesce(p_concurrency::text, 'null')
            using errcode = 'PS400', hint = 'A worker runs between 0 and 1,000,000 jobs at once.';
    end if;
    perform penstock.check_json(p_metadata, 'the metadata of a worker', 65536);
    if p_supervisor is not null then
        perform penstock.check_sender('supervisor', p_supervisor, p_dead_after);
    end if;
    insert into penstock.workers (id, host, pid, names, concurrency, metadata, started_at, seen_at, dead_after, supervisor)
    values (p_id, left(coalesce(p_host, ''), 255), coalesce(p_pid, 0), coalesce(p_names, '{}'), p_concurrency, coalesce(p_metadata, '{}'), moment, moment, p_dead_after, p_supervisor)
    on conflict (id) do nothing;
    if not found then
        raise exception 'worker % is registered already', p_id
            using errcode = 'PS409', hint = 'Every worker process needs an id of its own.';
    end if;
    if p_id <> penstock.process_of(p_id) then
        -- The process was silent and has not ended: what it ran alone has not ended it.
        update penstock.queued_jobs as job
        set lone_crashes = nullif(job.lone_crashes - 1, 0)
        from penstock.lost_workers as lost
        where lost.process = penstock.process_of(p_id) and lost.job = job.id and job.lone_crashes > 0;
        update penstock.lost_workers set job = null where process = penstock.process_of(p_id) and job is not null;
    end if;
end
$$;
comment on function penstock.register_worker(text, text[], text, integer, integer, interval, jsonb, text) is
    'Announces a worker. From now on it must call heartbeat or keep_alive: its jobs are recovered when it has been silent for p_dead_after, and for half of that after another process first noticed. A client that claims without registering keeps its jobs for the visibility timeout. p_supervisor: an id of the process that starts it again when it ends, the same for all that it starts.';

create or replace function penstock.heartbeat(
    p_id text,
    p_in_flight integer default 0,
    p_state text default 'running',
    out known boolean,
    out cancelled uuid[],
    out leases bigint[],
    out workers integer
)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    update penstock.workers
    set seen_at = penstock.clock(),
        in_flight = p_in_flight,
        state = p_state
    where id = p_id and state <> 'dead';
    known := found;
    select array_agg(held.id), array_agg(asked.job) filter (where asked.job is not null)
    into leases, cancelled
    from penstock.leases as held
    left join lateral unnest(held.cancelled) as asked (job) on true
    where held.worker = p_id;
    select count(*) into workers
    from (select from penstock.workers as other where other.state <> 'dead' order by other.id offset 0) as alive;
end
$$;
comment on function penstock.heartbeat(text, integer, text) is
    'Keeps a worker alive. known: false when it was declared dead, so that it must drop its jobs and register again; cancelled: jobs that it must cancel; leases: those that it holds; workers: how many there are.';

create or replace function penstock.note_halted(p_worker text, p_consumer text, p_error text)
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    update penstock.workers
    set halted = halted || jsonb_build_object(left(p_consumer, 200), left(p_error, 1000))
    where id = p_worker
        and (halted ? left(p_consumer, 200) or (select count(*) from jsonb_object_keys(halted)) < 1000)
$$;
comment on function penstock.note_halted(text, text, text) is
    'Records that a consumer (stream/group) of a worker has ended with an error, while the worker continues with its other work.';

create or replace function penstock.unregister_worker(p_id text)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    update penstock.workers set state = 'dead' where id = p_id;
    delete from penstock.listeners where kind = 'jobs' and channel = 'penstock_' || p_id;
    delete from penstock.place_waiters where worker = p_id;
    perform penstock.ensure_archive(penstock.clock());
    perform penstock.recover_leases(
        array(select id from penstock.leases where worker = p_id),
        jsonb_build_object('type', 'WorkerLost', 'message', 'the worker went away while it held the job'),
        penstock.clock(), true
    );
    -- Leases that another transaction has locked now are left to recover, which finds them by this row.
    delete from penstock.workers where id = p_id and not exists (select from penstock.leases where worker = p_id);
end
$$;
comment on function penstock.unregister_worker(text) is 'Ends a worker in order. The jobs that it still holds are recovered at once.';

create or replace function penstock.release_unknown(p_worker text, p_known bigint[])
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    lost penstock.leases;
    released integer := 0;
begin
    perform penstock.check_size(cardinality(p_known), 100000, 'leases');
    for lost in
        select *
        from penstock.leases
        where worker = p_worker
            and id <> all (coalesce(p_known, '{}'))
            -- The answer to an extend may be lost or under way: the client that knows the old lease has the jobs.
            and (renews is null or renews <> all (coalesce(p_known, '{}')))
        order by id
    loop
        released := released + (
            select count(*)
            from penstock.end_attempts(
                jobs.ids, jobs.attempts, array_fill(lost.id, array[cardinality(jobs.ids)]),
                array_fill('released'::text, array[cardinality(jobs.ids)]), null, null, penstock.clock()
            )
            where jobs.ids is not null
        )
        from (
            select array_agg(job.id) as ids, array_agg(job.attempt) as attempts
            from penstock.free_jobs_of_lease(lost) as job
        ) as jobs;
    end loop;
    return released;
end
$$;
comment on function penstock.release_unknown(text, bigint[]) is
    'Releases the jobs that a worker holds without knowing it, because the answer to its claim was lost. Returns how many jobs.';

create or replace function penstock.wait_for_jobs(p_worker text, p_names text[])
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'job types');
    perform penstock.check_worker(p_worker);
    insert into penstock.listeners (channel, kind, names, until)
    values ('penstock_' || p_worker, 'jobs', coalesce(p_names, '{}'), clock_timestamp() + interval '30 seconds')
    on conflict (channel, kind, subject) do update set names = excluded.names, until = excluded.until;
end
$$;
comment on function penstock.wait_for_jobs(text, text[]) is
    'Registers a worker as idle; it listens on the channel penstock_<worker>. Claim once more after the call, since a job may have arrived in between. The next claim that finds jobs ends the registration.';

create or replace function penstock.note_keys(p_worker text, p_key_ids text[], p_no_key jsonb)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_json(p_no_key, 'what a worker has no key for', 262144);
    perform penstock.check_key_ids('worker ' || p_worker, p_key_ids);
    perform penstock.check_key_ids(
        'worker ' || p_worker,
        array(
            select lacking.value #>> '{}'
            from jsonb_each(case when jsonb_typeof(p_no_key) = 'object' then p_no_key else '{}' end) as lacking
            where lacking.value <> 'null'
        ),
        null
    );
    update penstock.workers set key_ids = coalesce(p_key_ids, '{}'), no_key = coalesce(p_no_key, '{}') where id = p_worker;
end
$$;
comment on function penstock.note_keys(text, text[], jsonb) is
    'A worker says which keys of encrypted payloads it has, by their ids, and on which job types and pools it does not work for want of a key: {"payments": null} when it has no key at all, {"payments": "<id>"} when it lacks one that jobs wait for.';

create or replace function penstock.missing_keys(p_names text[], p_keys text[])
returns table (name text, key_id text)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(greatest(cardinality(p_names), cardinality(p_keys)), 10000, 'job types or keys');
    -- A job that no worker can claim is at the front of its queue.
    select distinct on (jobs.name) jobs.name, waiting.key_id
    from unnest(p_names) as wanted (name)
    join penstock.jobs on jobs.name = wanted.name and jobs.encrypted_at is not null
    cross join lateral (
        select penstock.key_of_envelope(coalesce(penstock.payload(front.message), front.data)) as key_id
        from (
            select ready.message, ready.data
            from penstock.queued_jobs as ready
            where ready.name = jobs.name and ready.seq is not null and ready.status = 'queued'
            limit 100
        ) as front
    ) as waiting
    where waiting.key_id <> all (coalesce(p_keys, '{}'))
    order by jobs.name, waiting.key_id
$$;
comment on function penstock.missing_keys(text[], text[]) is
    'Those of the job types in which ready jobs, of 100 that are looked at, are encrypted with a key that is none of these, and its id.';
