-- Crashes: which jobs have begun, and the trials of suspects, which run beside nothing else. The head of tables/0002_jobs.sql explains
-- them.

create or replace function penstock.isolation_time()
returns timestamptz
language sql
immutable
parallel safe
as $$
    select timestamptz '9999-01-01 00:00:00+00'
$$;
comment on function penstock.isolation_time() is 'The run_after of a suspect, a job that waits for its trial.';

create or replace function penstock.promise_to_begin(p_holder text, p_kind text default 'worker')
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_worker(p_holder);
    if p_kind is null or p_kind not in ('worker', 'dispatcher') then
        raise exception 'unknown kind of holder: %', coalesce(quote_literal(left(p_kind, 100)), 'null')
            using errcode = 'PS400', hint = 'A holder is a worker or a dispatcher.';
    end if;
    insert into penstock.holders (id, kind, since)
    values (p_holder, p_kind, penstock.clock())
    on conflict (id) do update set kind = excluded.kind, since = excluded.since;
end
$$;
comment on function penstock.promise_to_begin(text, text) is
    'A worker or member promises to call begin_jobs before it starts an at_most_once job (a dispatcher: any job). What it had not begun when it is lost goes back as if it had not been claimed.';

create or replace function penstock.begin_jobs(p_ids uuid[], p_leases bigint[])
returns setof uuid
language sql
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(greatest(cardinality(p_ids), cardinality(p_leases)), 100000, 'jobs');
    update penstock.queued_jobs as job
    set begun = true
    from unnest(p_ids, p_leases) as given (id, lease)
    where job.id = given.id and job.lease = given.lease and job.status = 'in-progress'
    returning job.id
$$;
comment on function penstock.begin_jobs(uuid[], bigint[]) is
    'Notes that claimed jobs have begun and returns those that may be started now: a job that is missing belongs to another worker. May be repeated.';

create or replace function penstock.has_isolated_jobs(p_names text[], p_keys text[] default null)
returns boolean
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(greatest(cardinality(p_names), cardinality(p_keys)), 10000, 'job types or keys');
    select exists (
        select
        from unnest(p_names) as wanted (name)
        join penstock.jobs on jobs.name = wanted.name and (not jobs.encrypted or p_keys is not null)
        cross join lateral (
            select from penstock.queued_jobs as job
            where job.name = wanted.name and job.crashes = 2 and job.run_after = penstock.isolation_time()
                and (job.slot is null or not exists (select from penstock.paused_keys as paused where paused.name = job.name and paused.key = job.key))
                and (jobs.encrypted_at is null or penstock.has_key_for(job.data, job.message, p_keys))
            limit 1
        ) as waiting
    )
$$;
comment on function penstock.has_isolated_jobs(text[], text[]) is 'Whether suspects of these types wait for their trial, for a worker with these keys of encrypted payloads (see claim).';

create or replace function penstock.next_alone(p_names text[], p_slots integer[] default null, p_keys text[] default null)
returns uuid
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(greatest(cardinality(p_names), cardinality(p_keys)), 10000, 'job types or keys');
    select penstock.check_size(cardinality(p_slots), 1000000, 'slots');
    select waiting.id
    from penstock.jobs
    cross join lateral (
        select job.id, job.lone_crashes, job.updated_at
        from penstock.queued_jobs as job
        where job.name = jobs.name
            and job.crashes = 2
            and job.run_after = penstock.isolation_time()
            and (p_slots is null or job.slot = any (p_slots))
            and (jobs.encrypted_at is null or penstock.has_key_for(job.data, job.message, p_keys))
        order by coalesce(job.lone_crashes, 0), job.updated_at, job.id
        limit 1
    ) as waiting
    where jobs.name = any (p_names) and jobs.paused_at is null and jobs.concurrency is distinct from 0
        and (not jobs.encrypted or p_keys is not null)
    order by coalesce(waiting.lone_crashes, 0), waiting.updated_at, waiting.id
    limit 1
$$;
comment on function penstock.next_alone(text[], integer[], text[]) is
    'Which job of these types (of a pool: in these slots) waits for its trial and comes first, those of paused types left out; null: none. While it stays the same, no worker proceeds. p_keys: as in claim.';

create or replace function penstock.isolate(p_worker text, p_begin boolean, p_idle boolean default false)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    others integer;
    workers integer;
begin
    if p_begin then
        -- Of the workers that have to become empty for it one in four at a time, and of the idle ones all but one, so that ordinary jobs
        -- continue; silent workers do not count.
        perform pg_advisory_xact_lock(hashtext('penstock.isolate'));
        select
            count(*) filter (where isolates and id <> p_worker and seen_at > penstock.clock() - dead_after * 0.6), count(*)
        into others, workers
        from penstock.workers
        where state <> 'dead' and ended_at is null;
        if others >= greatest(1, case when p_idle then workers - 1 else workers / 4 end) then
            return false;
        end if;
    end if;
    update penstock.workers set isolates = p_begin where id = p_worker and isolates <> p_begin;
    return true;
end
$$;
comment on function penstock.isolate(text, boolean, boolean) is
    'A worker asks to empty itself and run trials (true; p_idle: it is empty), or is ordinary again (false). False when enough others do so.';

-- Long, since it is a whole claim: checks, ownership, limits, choice, lease, rate and answer.
create or replace function penstock.claim_alone(
    p_holder text,
    p_names text[],
    p_slots integer[] default null,
    p_epochs bigint[] default null,
    p_keys text[] default null
)
returns table (
    id uuid, name text, attempt smallint, max_attempts smallint, priority smallint, key text, data text,
    created_at timestamptz, run_after timestamptz, seq bigint, lease bigint, lease_s double precision, time_limit_s double precision, snoozes integer,
    traceparent text, at_slot integer
)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    most constant integer := 500;
    moment timestamptz;
    owned integer[];
    places integer;
    in_all integer := 0;
    ids uuid[];
    first record;
    job_type penstock.jobs;
    new_lease bigint;
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'job types');
    perform penstock.check_size(greatest(cardinality(p_slots), cardinality(p_epochs)), 1000000, 'slots');
    perform penstock.check_size(cardinality(p_keys), 1000, 'keys');
    perform penstock.check_worker(p_holder);
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'claim_alone needs the isolation level read committed'
            using errcode = 'PS409', hint = 'Claim in a transaction of its own with the default isolation level.';
    end if;
    if not penstock.has_isolated_jobs(p_names, p_keys) then
        return;
    end if;
    -- Two at a time would divide a trial between them.
    perform pg_advisory_xact_lock(hashtext('penstock.claim_alone'));
    if p_slots is not null then
        -- While this row is locked, no transaction can take slots of this member away and end the jobs that are claimed here.
        perform from penstock.members where group_name = p_names[1] and members.id = p_holder for key share;
        if not found then
            return;
        end if;
        owned := penstock.still_owned(p_names[1], p_holder, p_slots, p_epochs);
    end if;
    perform penstock.lock_limits(p_names);
    moment := penstock.clock();
    for first in
        select waiting.*
        from penstock.jobs
        cross join lateral (
            select job.id, job.name, job.trial, job.lone_crashes, job.updated_at
            from penstock.queued_jobs as job
            where job.name = jobs.name
                and job.run_after = penstock.isolation_time()
                and penstock.may_be_tried(job, jobs, owned, p_slots is not null, p_keys, moment)
            order by coalesce(job.lone_crashes, 0), job.updated_at, job.id
            limit 1
        ) as waiting
        where jobs.name = any (p_names) and jobs.paused_at is null and jobs.concurrency is distinct from 0
            and (not jobs.encrypted or p_keys is not null)
        order by coalesce(waiting.lone_crashes, 0), waiting.updated_at, waiting.id
    loop
        -- Of the jobs that have crashed alone one at a time over all workers, so that two do not excuse each other.
        continue when first.lone_crashes > 0 and exists (
            select from penstock.leases as other
            cross join lateral penstock.jobs_of_lease(other) as tried
            where other.on_trial = 1 and tried.lone_crashes > 0
        );
        for job_type in
            select jobs.* from penstock.jobs where jobs.name = any (p_names) order by jobs.name <> first.name, jobs.name
        loop
            exit when in_all >= most or (first.trial is null and job_type.name <> first.name);
            continue when job_type.paused_at is not null or job_type.concurrency = 0 or (job_type.encrypted and p_keys is null);
            select array_agg(chosen.id) into ids
            from (
                select job.id
                from penstock.queued_jobs as job
                where job.name = job_type.name
                    and job.run_after = penstock.isolation_time()
                    and penstock.may_be_tried(job, job_type, owned, p_slots is not null, p_keys, moment)
                    and case when first.trial is null then job.id = first.id else job.trial = first.trial end
                order by job.seq nulls first, job.id
                limit most - in_all
                for update skip locked
            ) as chosen;
            continue when ids is null;
            places := penstock.admit(job_type, cardinality(ids), moment);
            continue when places <= 0;
            ids := ids[:places];
            in_all := in_all + cardinality(ids);
            new_lease := nextval('penstock.lease_id');
            update penstock.queued_jobs as job
            set status = 'in-progress', lease = new_lease, crashes = 3, run_after = moment, updated_at = moment, coalesces = false
            where job.id = any (ids);
            perform penstock.open_lease(
                new_lease, job_type.name, p_holder, 0::smallint, penstock.clock(), moment + job_type.visibility_timeout, 0, 0, cardinality(ids),
                ids, penstock.retention_class(job_type.keep_succeeded), null, null, null, cardinality(ids)
            );
            if job_type.rate_limit is not null then
                perform penstock.note_starts(job_type.name, '', cardinality(ids), job_type.rate_period);
            end if;
            return query
            select
                job.id, job.name, job.attempt, job.max_attempts, job.priority, job.key,
                coalesce(penstock.payload(job.message), job.data)::text, penstock.shown_time(job.created_at), moment,
                coalesce(job.seq, 0), new_lease, extract(epoch from job_type.visibility_timeout)::double precision,
                (job.options ->> 'time_limit')::double precision, coalesce(job.snoozes, 0), job.options ->> 'traceparent', job.slot
            from penstock.queued_jobs as job
            where job.id = any (ids)
            order by job.seq, job.id;
        end loop;
        exit when in_all > 0;
    end loop;
end
$$;
comment on function penstock.claim_alone(text, text[], integer[], bigint[], text[]) is
    'Claims the jobs of one trial, 500 at most, for a worker that runs nothing else and claims nothing else before it has settled them. With slots and epochs: of the pool p_names[1], from slots that the member has; of a key those at its head. When the worker is lost meanwhile those that are left are tried again, in smaller trials; a job that was alone counts the loss. p_keys: as in claim.';

create or replace function penstock.may_be_tried(
    job penstock.queued_jobs, job_type penstock.jobs, p_owned integer[], p_in_pool boolean, p_keys text[], p_moment timestamptz
)
returns boolean
language sql
stable
as $$
    select job.crashes = 2
        and job.status = 'queued'
        and job.run_after = penstock.isolation_time()
        and (job.expires_at is null or job.expires_at > p_moment)
        and (job_type.encrypted_at is null or penstock.has_key_for(job.data, job.message, p_keys))
        and (case when p_in_pool then job.slot = any (p_owned) else job.slot is null end)
        and (job.slot is null or not exists (select from penstock.paused_keys as paused where paused.name = job.name and paused.key = job.key))
        and (
            job.seq is null
            or job.slot is null
            or not exists (
                select from penstock.queued_jobs as earlier
                where earlier.name = job.name
                    and earlier.slot = job.slot
                    and earlier.key collate "C" = job.key
                    and earlier.seq < job.seq
                    -- Those of its own trial that come before it start before it, on the same worker.
                    and (earlier.crashes <> 2 or earlier.status <> 'queued' or earlier.trial is distinct from job.trial or job.trial is null)
            )
        )
$$;
comment on function penstock.may_be_tried(penstock.queued_jobs, penstock.jobs, integer[], boolean, text[], timestamptz) is
    'Part of claim_alone: whether a job is a suspect whose trial may begin on a member with these slots, or in a plain queue.';
