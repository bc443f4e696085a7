-- Why a job waits: the one thing that has to change first for it to start.
--
-- The order of the questions is the order in which the conditions have to be met. The time of the job comes first: until then nothing
-- else matters. Then whether any worker may start it at all (the type is paused, no worker has it, its key is quarantined), then the
-- jobs before it in its key, then the limits of the type, then the jobs before it in the queue. Each question is one look into an index,
-- and counts end at 1,000.

-- Long, since it is one list of questions, in the order above, each of a few lines.
create or replace function penstock.why_of(job penstock.queued_jobs)
returns table (
    reason text,
    message text,
    since timestamptz,
    until timestamptz,
    by_job uuid,
    worker text,
    used bigint,
    most bigint,
    ahead bigint
)
language plpgsql
stable
as $$
declare
    moment constant timestamptz := penstock.clock();
    job_type penstock.jobs;
    pool penstock.pools;
    place penstock.slots;
    head record;
    waited record;
    seconds double precision;
    first_seq bigint;
    key_id text;
begin
    select * into job_type from penstock.jobs where name = job.name;
    select * into pool from penstock.pools where name = job.name;
    if job.status = 'in-progress' then
        reason := 'running';
        select leases.started_at, leases.worker, leases.expires_at into since, worker, until
        from penstock.leases where leases.id = job.lease;
        if pool.key_concurrency = 1 and job.slot is not null then
            -- A worker claims jobs of a key ahead, and starts them one after another.
            select min(earlier.seq), count(*) into first_seq, ahead
            from (
                select earlier.seq
                from penstock.queued_jobs as earlier
                where earlier.name = job.name and earlier.slot = job.slot and earlier.key collate "C" = job.key and earlier.seq < job.seq
                    and earlier.status = 'in-progress'
                limit 1000
            ) as earlier;
            if ahead > 0 then
                reason := 'key-busy';
                select earlier.id into by_job
                from penstock.queued_jobs as earlier
                where earlier.name = job.name and earlier.slot = job.slot and earlier.key collate "C" = job.key and earlier.seq = first_seq;
                message := format('%s has claimed it, and starts it after another job of its key.', worker);
                return next;
                return;
            end if;
            ahead := null;
        end if;
        message := format('It runs on %s.', worker);
        return next;
        return;
    end if;
    if job.expires_at <= moment then
        reason := 'expired';
        until := penstock.shown_time(job.expires_at);
        message := 'It expired before it started; the next claim archives it as expired.';
        return next;
        return;
    end if;
    if penstock.is_suspended(job) then
        select step.kind, step.at, penstock.shown_time(step.due) as due, job_group.id, job_group.name, children.added, children.ended
        into waited
        from penstock.job_steps as step
        left join penstock.job_groups as job_group on job_group.id = step.job_group
        left join lateral penstock.count_children(job_group.id) as children on true
        where step.job = job.id and step.name = job.waits_for;
        reason := case waited.kind when 'wait' then 'signal' when 'gather' then 'children' else 'sleep' end;
        since := waited.at;
        until := waited.due;
        by_job := waited.id;
        used := waited.ended;
        most := waited.added;
        message := case waited.kind
            when 'wait' then format(
                'Its handler waits for the signal %s: penstock jobs signal %s %s.', job.waits_for, job.id, penstock.shell_word(job.waits_for)
            )
            when 'gather' then format('Its handler waits for %s children, the job group %s, of which %s have ended.', waited.added, waited.name, waited.ended)
            else format('Its handler sleeps in the step %s.', job.waits_for)
        end;
        return next;
        return;
    end if;
    if job.crashes < 2 and job.run_after > moment then
        reason := case when job.snoozed_at is not null then 'snoozed' when job.errors is null then 'deferred' else 'retry' end;
        since := job.snoozed_at;
        until := penstock.shown_time(job.run_after);
        message := case
            when job.snoozed_at is not null then 'Its handler put it off; it runs again at its time.'
            when job.errors is null then 'It is deferred until its time.'
            else format('Attempt %s of %s failed; the next one comes after a delay.', job.attempt - 1, job.max_attempts)
        end;
        return next;
        return;
    end if;
    if job_type.paused_at is not null or job_type.concurrency = 0 then
        reason := 'paused';
        since := job_type.paused_at;
        message := case when job_type.paused_at is null
            then format('The job type %s has concurrency 0; give it a limit: penstock types change %s --set concurrency=10.', job.name, job.name)
            else format('The job type %s is paused; resume it: penstock resume %s.', job.name, job.name) end;
        return next;
        return;
    end if;

    if pool.name is not null and job.slot is not null then
        select * into place from penstock.slots where group_name = job.name and slot = job.slot;
        if place.error is not null then
            reason := 'quarantined-key';
            since := place.failed_at;
            message := format('Its key is quarantined, since the rule of the pool fails for it: %s', left(place.error, 200));
            return next;
            return;
        end if;
        select paused_at into since from penstock.paused_keys where name = job.name and key = job.key;
        if found then
            reason := 'paused-key';
            message := format('Its key is paused; resume it: penstock pools resume-key %s %s.', job.name, penstock.shell_word(job.key));
            return next;
            return;
        end if;
        if not exists (select from penstock.members where group_name = job.name) then
            reason := case when penstock.is_locked(job, null, null) then 'no-key' else 'no-worker' end;
            message := case reason
                when 'no-key' then format('The pool %s is encrypted, and no live worker of it has a key: give them one (PENSTOCK_KEYS).', job.name)
                else format('No worker of the pool %s lives; start one: penstock worker MODULE:APP.', job.name)
            end;
            return next;
            return;
        end if;
        if place.owner is null or place.owner is distinct from place.target then
            since := place.changed_at;
            worker := place.owner;
            if place.owner is null and place.target is null then
                reason := 'unplaced';
                message := 'No worker has its key: the rule of the pool gives it to no worker now, or no worker takes part.';
            else
                reason := 'moving';
                message := format('Its key moves from %s to %s.', coalesce(place.owner, 'no worker'), coalesce(place.target, 'no worker'));
            end if;
            return next;
            return;
        end if;
    elsif not exists (
            select from penstock.workers
            where workers.state = 'running' and job.name = any (workers.names) and workers.seen_at > moment - workers.dead_after
        )
        -- Clients that claim by SQL or over HTTP are not registered: they are seen by a row in listeners, or by a lease.
        and not exists (
            select from penstock.listeners
            where listeners.kind = 'jobs' and job.name = any (listeners.names) and listeners.until > clock_timestamp()
        )
        and not exists (select from penstock.leases where leases.name = job.name and leases.expires_at > moment)
    then
        reason := 'no-worker';
        message := format('No live worker has the job type %s; start one: penstock worker MODULE:APP.', job.name);
        return next;
        return;
    end if;
    if job_type.encrypted_at is not null then
        key_id := penstock.key_of_envelope(coalesce(penstock.payload(job.message), job.data));
        if (key_id is not null or job_type.encrypted) and penstock.is_locked(job, key_id, place.owner) then
            reason := 'no-key';
            worker := place.owner;
            message := case
                when key_id is null then format('The job type %s is encrypted, and no live worker of it has a key: give them one (PENSTOCK_KEYS).', job.name)
                when place.owner is not null then penstock.why_locked(job.name, key_id, place.owner, 'It')
                else format('It is encrypted with the key %s, which no live worker of %s has: give it to them (PENSTOCK_KEYS).', key_id, job.name)
            end;
            return next;
            return;
        end if;
    end if;

    if pool.name is not null and job.slot is not null and job.seq is not null then
        -- The first job of its key; when that is the job itself, no job of its key holds it.
        select earlier.*, penstock.is_suspended(earlier) as suspended into head
        from penstock.queued_jobs as earlier
        where earlier.name = job.name and earlier.slot = job.slot and earlier.seq is not null and earlier.key collate "C" = job.key
        order by earlier.seq
        limit 1;
        select count(*) into ahead
        from (
            select from penstock.queued_jobs as earlier
            where earlier.name = job.name and earlier.slot = job.slot and earlier.key collate "C" = job.key and earlier.seq < job.seq
            limit 1000
        ) as before;
        if head.id <> job.id and head.status = 'queued' and head.run_after <= moment and job_type.encrypted_at is not null then
            key_id := penstock.key_of_envelope(coalesce(penstock.payload(head.message), head.data));
        end if;
        if head.id <> job.id and key_id is not null and penstock.is_locked(job, key_id, place.owner) and pool.key_concurrency = 1 then
            by_job := head.id;
            worker := place.owner;
            reason := 'no-key';
            message := penstock.why_locked(job.name, key_id, place.owner, 'A job before it, which holds its key,');
        elsif head.id <> job.id and head.status = 'queued' and head.crashes = 2 then
            by_job := head.id;
            reason := 'key-alone';
            message := 'A job of its key before it waits to run alone, since workers were lost that held it.';
        elsif head.id <> job.id and head.suspended and head.run_after > moment and pool.on_retry = 'block' then
            by_job := head.id;
            reason := 'key-suspended';
            select step.kind, step.at, penstock.shown_time(step.due) as due into waited
            from penstock.job_steps as step
            where step.job = head.id and step.name = head.waits_for;
            since := waited.at;
            until := waited.due;
            message := format(
                'Its key is held by a job whose handler %s.',
                case waited.kind
                    when 'wait' then format('waits for the signal %s', head.waits_for)
                    when 'gather' then format('waits for its children in the step %s', head.waits_for)
                    else format('sleeps in the step %s', head.waits_for)
                end
            );
        elsif head.id <> job.id and head.status = 'queued' and head.run_after > moment and pool.on_retry = 'block' then
            by_job := head.id;
            reason := case when head.snoozed_at is not null then 'key-snoozed' else 'key-retry' end;
            since := head.snoozed_at;
            until := penstock.shown_time(head.run_after);
            message := case
                when head.snoozed_at is not null then 'Its key is held by a job that its handler put off.'
                else format('Its key is held by a job that failed and is retried: attempt %s of %s comes next.', head.attempt, head.max_attempts)
            end;
        elsif pool.key_concurrency = 1 then
            select earlier.id, leases.started_at, leases.worker, leases.expires_at into by_job, since, worker, until
            from (
                select earlier.id, earlier.lease
                from penstock.queued_jobs as earlier
                where earlier.name = job.name and earlier.slot = job.slot and earlier.key collate "C" = job.key and earlier.seq is not null
                    and earlier.status = 'in-progress'
                order by earlier.seq
                limit 1
            ) as earlier
            left join penstock.leases on leases.id = earlier.lease;
            if by_job is not null then
                reason := 'key-busy';
                message := format('Another job of its key runs on %s.', worker);
            end if;
        else
            select count(*) into used
            from (
                select from penstock.queued_jobs as earlier
                where earlier.name = job.name and earlier.slot = job.slot and earlier.key collate "C" = job.key and earlier.seq is not null
                    and earlier.status = 'in-progress'
                limit pool.key_concurrency
            ) as running;
            if used >= pool.key_concurrency then
                reason := 'key-busy';
                most := pool.key_concurrency;
                message := format('%s of %s jobs of its key run, the most at once.', used, most);
            else
                used := null;
            end if;
        end if;
        if reason is not null then
            return next;
            return;
        end if;
        if pool.key_rate_limit is not null then
            select sum(started), min(ends_at) + pool.key_rate_period into used, until
            from penstock.rate_windows
            where rate_windows.name = job.name and rate_windows.key = job.key and ends_at > moment - pool.key_rate_period;
            if used >= pool.key_rate_limit then
                reason := 'key-rate';
                most := pool.key_rate_limit;
                message := format('The rate limit of its key is used up: %s starts in %s.', used, pool.key_rate_period);
                return next;
                return;
            end if;
            used := null;
            until := null;
        end if;
    end if;

    if job.crashes = 2 then
        reason := 'alone';
        since := penstock.shown_time(job.updated_at);
        message := case
            when job.trial is not null
                then 'Workers were lost while they held it, so it waits until one runs nothing but it and others that were in flight with it.'
            when job.lone_crashes > 0 then format(
                'Workers were lost while they held it, %s of them while they ran nothing else%s, so it waits until one runs it alone.',
                job.lone_crashes, coalesce(format(' (%s convict it)', job_type.max_crashes), '')
            )
            else 'Workers were lost while they held it, so it waits until one runs nothing else and runs it alone.'
        end;
        return next;
        return;
    end if;
    if job_type.concurrency is not null then
        select sum(open_jobs) into used from penstock.leases where leases.name = job.name;
        if used >= job_type.concurrency then
            reason := 'concurrency';
            most := job_type.concurrency;
            message := format('The concurrency limit of the job type is full: %s of %s.', used, most);
            return next;
            return;
        end if;
        used := null;
    end if;
    if job_type.rate_limit is not null then
        seconds := penstock.next_place(job_type, 0, moment);
        if seconds is not null then
            reason := 'rate';
            most := job_type.rate_limit;
            until := moment + make_interval(secs => seconds);
            message := format('The rate limit of the job type is used up: %s starts in %s.', most, job_type.rate_period);
            return next;
            return;
        end if;
    end if;
    if job.seq is null then
        reason := 'ready';
        message := 'Its time has just come; it joins the queue in a moment.';
        return next;
        return;
    end if;

    if job.slot is null then
        -- Of each priority, the last before this job: those at the front may be dead entries.
        select count(*) into ahead
        from (
            select
            from penstock.type_priorities
            cross join lateral (
                select before.status
                from penstock.queued_jobs as before
                where before.name = job.name
                    and before.priority = type_priorities.priority
                    and before.slot is null
                    and before.seq is not null
                    and (type_priorities.priority < job.priority or before.seq < job.seq)
                order by before.seq desc
                limit 1000
            ) as before
            where type_priorities.name = job.name and type_priorities.priority <= job.priority and before.status = 'queued'
            limit 1000
        ) as waiting;
    end if;
    reason := case when ahead > 0 then 'behind' else 'ready' end;
    message := case when ahead = 0 then 'Nothing holds it; the next claim takes it.'
        when pool.name is not null then format('%s of its key come first.', case when ahead = 1000 then '1,000 jobs or more' else ahead || ' job(s)' end)
        else format('%s of its type come first.', case when ahead = 1000 then '1,000 jobs or more' else ahead || ' job(s)' end) end;
    return next;
end
$$;
comment on function penstock.why_of(penstock.queued_jobs) is 'Part of why and key_state: the first thing that has to change for a job to start.';
