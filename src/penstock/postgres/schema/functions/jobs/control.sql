-- Control: what a person or a program does with single jobs: cancel, run now and replay.

create or replace function penstock.cancel(p_id uuid)
returns text
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    job penstock.queued_jobs;
    finished penstock.archived_job_status;
    holder text;
begin
    perform from penstock.waiting_jobs where id = p_id for update;
    if found then
        perform penstock.ensure_archive(moment);
        perform penstock.end_waiting(array[p_id], 'cancelled', null, null, moment);
        return 'cancelled';
    end if;
    select * into job from penstock.queued_jobs where id = p_id for update;
    if not found then
        select status into finished from penstock.archived_jobs where id = p_id order by finished_at desc limit 1;
        if not found then
            raise exception 'no such job: %', p_id
                using errcode = 'PS404', hint = 'Its day may have been pruned from the archive.';
        end if;
        return finished::text;
    end if;
    if job.status = 'in-progress' then
        update penstock.queued_jobs set cancel_requested_at = coalesce(cancel_requested_at, moment) where id = p_id;
        update penstock.leases
        set cancelled = array_append(cancelled, p_id)
        where id = job.lease and p_id <> all (coalesce(cancelled, '{}'))
        returning worker into holder;
        if holder is not null then
            perform penstock.tell(holder, 'cancel', p_id::text);
        end if;
        return 'cancelling';
    end if;
    perform penstock.ensure_archive(moment);
    perform penstock.archive_waiting(array[p_id], 'cancelled', null, null, moment);
    return 'cancelled';
end
$$;
comment on function penstock.cancel(uuid) is
    'Cancels a job: one that is queued or waits for others at once (cancelled), of a running one the handler is told (cancelling); for a finished one returns its status. PS404 when there is none.';

create or replace function penstock.is_deferred(job penstock.queued_jobs)
returns boolean
language sql
immutable
as $$
    select job.status = 'queued' and job.seq is null and job.crashes <> 2 and job.waits_for is null
$$;
comment on function penstock.is_deferred(penstock.queued_jobs) is
    'Whether a job waits for its time, or for a further attempt; not one in isolation or a suspended one.';

create or replace function penstock.run_now(p_ids uuid[])
returns setof uuid
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
begin
    if cardinality(p_ids) > 10000 then
        raise exception 'too many jobs at once: %', cardinality(p_ids)
            using errcode = 'PS413', hint = 'Name at most 10,000 jobs in one call.';
    end if;
    return query
        update penstock.queued_jobs as job
        set run_after = least(job.run_after, moment), updated_at = moment
        where job.id = any (p_ids) and penstock.is_deferred(job)
        returning job.id;
    if found then
        perform penstock.promote(10000);
    end if;
end
$$;
comment on function penstock.run_now(uuid[]) is
    'Makes deferred jobs, those that wait for their time or for a further attempt, due at once, and returns them. Other jobs are left as they are, also suspended ones. At most 10,000.';

create or replace function penstock.replays_of(p_id uuid)
returns table (id uuid, status text)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select id, status::text from penstock.queued_jobs where replay_of = p_id
    union all
    select id, status::text from penstock.archived_jobs where replay_of = p_id
$$;
comment on function penstock.replays_of(uuid) is 'The jobs that repeat a job, with their statuses.';

create or replace function penstock.replay(p_id uuid, p_new_id uuid default null, p_data jsonb default null, p_force boolean default false)
returns uuid
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    original record;
    enqueued record;
    new_id uuid := coalesce(p_new_id, penstock.new_id());
    problem text;
    earlier record;
begin
    -- Two replays of one job that are made at the same time see each other.
    perform pg_advisory_xact_lock(hashtext('penstock.replay'), hashtext(p_id::text));
    if exists (select from penstock.waiting_jobs where id = p_id) then
        raise exception 'job % waits for others', p_id
            using errcode = 'PS409', hint = 'It has not run yet: wait for it, or cancel it first.';
    end if;
    select name, coalesce(penstock.payload(message), data) as data, key, priority, expires_at, options, status::text into original
    from penstock.queued_jobs
    where id = p_id;
    if found and original.status = 'queued' then
        raise exception 'job % is queued', p_id
            using errcode = 'PS409', hint = 'It has not run yet: wait for it, or cancel it first.';
    end if;
    if not found then
        select name, coalesce(penstock.payload(message), data) as data, key, priority, expires_at, options, status::text into original
        from penstock.archived_jobs
        where id = p_id
        order by finished_at desc
        limit 1;
        if not found then
            raise exception 'no such job: %', p_id
                using errcode = 'PS404', hint = 'Its day may have been pruned from the archive.';
        end if;
    end if;
    if not p_force then
        select replays.id, replays.status into earlier
        from penstock.replays_of(p_id) as replays
        where replays.id <> new_id and replays.status in ('queued', 'in-progress', 'succeeded')
        limit 1;
        if found then
            raise exception 'job % was replayed already as %, which is %', p_id, earlier.id, earlier.status
                using errcode = 'PS409', hint = 'Force it (p_force => true, force=True, --force) to run the job once more.';
        end if;
    end if;
    if p_data is null then
        select penstock.problem_of(kept.data) into problem from penstock.quarantined_payloads as kept where kept.id = p_id;
        if found then
            raise exception 'the payload of job % %', p_id, coalesce(problem, 'cannot be read')
                using errcode = 'PS409', hint = 'Replay it with another one: select penstock.replay(id, p_data => ''{"n": 1}''); the old one is in penstock.quarantined_payloads.';
        end if;
    end if;
    select * into enqueued from penstock.enqueue_many(
        original.name, array[coalesce(p_data, original.data)], array[new_id],
        case when original.key is not null then array[original.key] end,
        array[original.priority], null,
        case when original.expires_at = penstock.shown_time(original.expires_at) then array[original.expires_at] end,
        null, p_id,
        -- The copy belongs to the trace in which it is replayed, and waits for nothing.
        case
            when original.options - array['traceparent', 'after', 'when'] <> '{}'
                then array[original.options - array['traceparent', 'after', 'when']]
        end
    );
    -- Only what is not simply queued is reported: then the new id was used before, by an earlier try of this call.
    if enqueued.id is not null and not exists (select from penstock.replays_of(p_id) as replays where replays.id = new_id) then
        raise exception 'the id % belongs to another job', new_id
            using errcode = 'PS409', hint = 'Every replay needs an id of its own. Leave the id out to get a new one.';
    end if;
    return new_id;
end
$$;
comment on function penstock.replay(uuid, uuid, jsonb, boolean) is
    'Enqueues a copy of a running or finished job under a new id (p_new_id, so that a retried call replays once) and returns that; p_data: with another payload. The copy has the options that the job had of its own. PS409 while an earlier replay of the job waits, runs or has succeeded, unless p_force is true; also while the job is queued, or when its payload cannot be read and p_data is null, PS404 when there is none.';
