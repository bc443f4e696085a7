-- The end of job types and pools. What is archived stays, and so does what is in a lake.
--
-- A call refuses what would cost work: jobs that wait, unless it is forced, and jobs that run. It cannot see the jobs of other transactions
-- that are not committed yet, and an enqueue locks nothing of its type that a drop could wait for. So the name of a dropped type stays in
-- dropped_types, and maintenance archives as cancelled what is enqueued by transactions that saw the type before, unless it has been created
-- again. It looks each time for an hour, and until each transaction that wrote before has ended; then at intervals that double, for a
-- transaction that read before the drop and writes for the first time that late. By the same row a declaration that is no more than a part of
-- an enqueue knows that the type is not to be created again, and the error says so. It is forgotten after a year.

create or replace function penstock.refuse_drop(p_name text)
returns void
language plpgsql
as $$
declare
    job_type constant penstock.jobs := penstock.require_type(p_name);
    forwarding text;
begin
    if job_type.topic is not null then
        raise exception '% is the queue of a subscriber of topic %', p_name, job_type.topic
            using errcode = 'PS409', hint = 'End the subscription: the queue goes with it.';
    end if;
    if exists (select from penstock.schedules where schedules.name = p_name) then
        raise exception '% is the job type of a schedule', p_name
            using errcode = 'PS409',
                  hint = format('Take the schedule out of the code and drop it first: penstock schedules drop %s, or select penstock.drop_schedule(%L);', p_name, p_name);
    end if;
    select subscriptions.topic into forwarding from penstock.subscriptions where subscriptions.queue = p_name limit 1;
    if found then
        raise exception 'topic % has a subscription that forwards to %', forwarding, p_name
            using errcode = 'PS409', hint = 'End the subscription first.';
    end if;
end
$$;
comment on function penstock.refuse_drop(text) is
    'Part of drop_job_type and drop_pool: raises PS409 for a type that something else needs, PS404 when there is none.';

create or replace function penstock.lock_jobs_of(p_name text, p_limit integer)
returns uuid[]
language sql
as $$
    -- Through each index of its own: the ready jobs, those of pools, and the deferred ones.
    select (
        array(
            select job.id from penstock.queued_jobs as job
            where job.name = p_name and job.seq is not null and job.slot is null
            limit p_limit
            for update skip locked
        )
        || array(
            select job.id from penstock.queued_jobs as job
            where job.name = p_name and job.seq is not null and job.slot is not null
            limit p_limit
            for update skip locked
        )
        || array(
            select job.id from penstock.queued_jobs as job
            where job.name = p_name and job.seq is null
            limit p_limit
            for update skip locked
        )
    )[:p_limit]
$$;
comment on function penstock.lock_jobs_of(text, integer) is
    'Part of drop_type and end_dropped_types: up to p_limit jobs of a type, whatever they wait for, without those that another transaction has locked.';

create or replace function penstock.has_jobs(p_name text)
returns boolean
language sql
stable
as $$
    select exists (select from penstock.queued_jobs as job where job.name = p_name and job.seq is not null and job.slot is null)
        or exists (select from penstock.queued_jobs as job where job.name = p_name and job.seq is not null and job.slot is not null)
        or exists (select from penstock.queued_jobs as job where job.name = p_name and job.seq is null)
        or exists (select from penstock.waiting_jobs as job where job.name = p_name)
$$;
comment on function penstock.has_jobs(text) is 'Part of drop_type and end_dropped_types: whether a type has jobs that have not ended.';

create or replace function penstock.drop_type(p_name text, p_force boolean)
returns void
language plpgsql
-- A transaction that holds the type up is waited for for a short time only.
set lock_timeout = '3s'
as $$
declare
    most constant integer := 10000;
    moment constant timestamptz := penstock.clock();
    jobs uuid[];
    waiting uuid[];
begin
    perform from penstock.jobs where name = p_name for update;
    perform penstock.refuse_drop(p_name);
    jobs := penstock.lock_jobs_of(p_name, most + 1);
    waiting := penstock.lock_waiting_of(p_name, most + 1);
    if (cardinality(waiting) > 0 or exists (select from penstock.queued_jobs as job where job.id = any (jobs) and job.status = 'queued'))
        and p_force is not true
    then
        raise exception 'jobs of % wait', p_name
            using errcode = 'PS409',
                  hint = 'Let workers finish them, cancel or purge them, or force the drop (p_force => true, force=True, --force): it cancels them.';
    end if;
    if cardinality(jobs) + cardinality(waiting) > most then
        raise exception 'more than % jobs of % wait or run', most, p_name
            using errcode = 'PS409',
                  hint = format('Purge them first: penstock jobs purge --type %s, or select penstock.start_operation(''purge'', %L);', p_name, jsonb_build_object('name', p_name));
    end if;
    perform penstock.ensure_archive(moment);
    perform penstock.archive_waiting(
        array(select job.id from penstock.queued_jobs as job where job.id = any (jobs) and job.status = 'queued'), 'cancelled', 'dropped',
        null, moment
    );
    perform penstock.end_waiting(
        waiting, 'cancelled', array_fill('dropped'::text, array[cardinality(waiting)]), null, moment
    );
    -- Those that run, and those that another transaction has locked, such as a claim.
    if penstock.has_jobs(p_name) then
        raise exception 'jobs of % run, or other transactions work with them', p_name
            using errcode = 'PS409', hint = 'Pause it, stop what enqueues for it, wait for the jobs that run or cancel them, and drop it then.';
    end if;
    delete from penstock.leases where name = p_name;
    delete from penstock.type_priorities where name = p_name;
    delete from penstock.large_payloads where name = p_name;
    delete from penstock.rate_windows where name = p_name;
    delete from penstock.place_waiters where name = p_name;
    delete from penstock.handlers where name = p_name and kind in ('job', 'pool');
    delete from penstock.jobs where name = p_name;
    insert into penstock.dropped_types (name, xid, dropped_at, look_at) values (p_name, pg_current_xact_id(), moment, moment)
    on conflict (name) do update set xid = excluded.xid, dropped_at = excluded.dropped_at, look_at = excluded.look_at;
    raise log 'penstock: job type % was dropped by %', p_name, session_user;
end
$$;
comment on function penstock.drop_type(text, boolean) is
    'Part of drop_job_type and drop_pool: the type and its jobs. 55P03 when another transaction holds the type up for 3 seconds.';

create or replace function penstock.drop_job_type(p_name text, p_force boolean default false)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.lock_kind(p_name);
    if exists (select from penstock.pools where name = p_name) then
        raise exception '% is a pool', p_name
            using errcode = 'PS409', hint = format('Drop the pool, and its job type with it: penstock pools drop %s, or select penstock.drop_pool(%L);', p_name, p_name);
    end if;
    perform penstock.drop_type(p_name, p_force);
end
$$;
comment on function penstock.drop_job_type(text, boolean) is
    'Drops a job type. PS409 while jobs of it wait, unless p_force (then up to 10,000 are archived as cancelled with the reason dropped), while they run, and for the queue of a subscriber, the type of a schedule, and pools. What is archived stays. A worker that declares the type creates it again when it starts, and an enqueue does not. The log of the server says who did it.';

create or replace function penstock.drop_pool(p_name text, p_force boolean default false)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.lock_kind(p_name);
    perform penstock.require_pool(p_name);
    perform penstock.lock_group(p_name);
    if exists (select from penstock.members where group_name = p_name and not penstock.is_silent(members, penstock.clock())) then
        raise exception 'pool % has workers', p_name
            using errcode = 'PS409', hint = 'Stop them first.';
    end if;
    if p_force is not true and exists (select from penstock.standing_jobs where name = p_name) then
        raise exception 'pool % has standing jobs', p_name
            using errcode = 'PS409', hint = 'Stop them, or force the drop (p_force => true, force=True, --force): it removes them.';
    end if;
    perform penstock.drop_type(p_name, p_force);
    delete from penstock.standing_jobs where name = p_name;
    delete from penstock.paused_keys where name = p_name;
    delete from penstock.key_weights where name = p_name;
    delete from penstock.pools where name = p_name;
    perform penstock.forget_group(p_name);
end
$$;
comment on function penstock.drop_pool(text, boolean) is
    'Drops a pool with its job type, as drop_job_type does, and with its keys. PS409 also while it has live workers, and while it has standing jobs, unless p_force.';

create or replace function penstock.end_dropped_types(p_moment timestamptz, p_limit integer default 1000)
returns void
language plpgsql
as $$
declare
    dropped penstock.dropped_types;
    late uuid[];
    waiting uuid[];
begin
    for dropped in
        select * from penstock.dropped_types where look_at <= p_moment order by look_at limit p_limit for update skip locked
    loop
        -- A transaction that creates the type again holds this lock: until it ends, the type is neither there nor gone.
        continue when not pg_try_advisory_xact_lock(hashtext('penstock.kind'), hashtext(dropped.name));
        if exists (select from penstock.jobs where jobs.name = dropped.name) then
            delete from penstock.dropped_types where name = dropped.name;
            continue;
        end if;
        late := penstock.lock_jobs_of(dropped.name, p_limit);
        waiting := penstock.lock_waiting_of(dropped.name, p_limit);
        if cardinality(late) + cardinality(waiting) > 0 then
            delete from penstock.leases where name = dropped.name;
            perform penstock.archive_waiting(late, 'cancelled', 'dropped', null, p_moment);
            perform penstock.end_waiting(waiting, 'cancelled', array_fill('dropped'::text, array[cardinality(waiting)]), null, p_moment);
        elsif dropped.xid < pg_snapshot_xmin(pg_current_snapshot()) and dropped.dropped_at < p_moment - interval '1 hour'
            and not penstock.has_jobs(dropped.name)
        then
            if dropped.dropped_at < p_moment - interval '1 year' then
                delete from penstock.dropped_types where name = dropped.name;
            else
                -- The older the drop, the rarer the look: about thirteen in a year.
                update penstock.dropped_types set look_at = p_moment + (p_moment - dropped.dropped_at) where name = dropped.name;
            end if;
        end if;
    end loop;
end
$$;
comment on function penstock.end_dropped_types(timestamptz, integer) is
    'Part of recover: archives as cancelled what was enqueued while its type was dropped, and forgets the name after a year. Call ensure_archive before.';
