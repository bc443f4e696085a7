-- Crashes: which jobs have begun, and jobs that run alone. The head of tables/0002_jobs.sql explains them.

create or replace function penstock.isolation_time()
returns timestamptz
language sql
immutable
parallel safe
as $$
    select timestamptz '9999-01-01 00:00:00+00'
$$;
comment on function penstock.isolation_time() is 'The run_after of a job that waits to run alone.';

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
comment on function penstock.has_isolated_jobs(text[], text[]) is 'Whether jobs of these types wait to run alone, for a worker with these keys of encrypted payloads (see claim).';

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
        select job.id, job.updated_at
        from penstock.queued_jobs as job
        where job.name = jobs.name
            and job.crashes = 2
            and job.run_after = penstock.isolation_time()
            and (p_slots is null or job.slot = any (p_slots))
            and (jobs.encrypted_at is null or penstock.has_key_for(job.data, job.message, p_keys))
        order by job.seq nulls first, job.updated_at, job.id
        limit 1
    ) as waiting
    where jobs.name = any (p_names) and jobs.paused_at is null and jobs.concurrency is distinct from 0
        and (not jobs.encrypted or p_keys is not null)
    order by waiting.updated_at, waiting.id
    limit 1
$$;
comment on function penstock.next_alone(text[], integer[], text[]) is
    'Which job of these types (of a pool: in these slots) waits to run alone and comes first, those of paused types left out; null: none. While it stays the same, no worker proceeds. p_keys: as in claim.';

create or replace function penstock.isolate(p_worker text, p_begin boolean)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    if p_begin then
        -- One worker in four at a time, so that the others continue with ordinary jobs; silent workers do not count.
        perform pg_advisory_xact_lock(hashtext('penstock.isolate'));
        if (
            select count(*) from penstock.workers
            where isolates and id <> p_worker and state <> 'dead' and seen_at > penstock.clock() - dead_after * 0.6
        ) >= (select greatest(1, count(*) / 4) from penstock.workers where state <> 'dead')
        then
            return false;
        end if;
    end if;
    update penstock.workers set isolates = p_begin where id = p_worker and isolates <> p_begin;
    return true;
end
$$;
comment on function penstock.isolate(text, boolean) is
    'A worker asks to empty itself and run jobs alone (true), or is ordinary again (false). False when enough others do so.';

-- Long, since it is a whole claim, of one job: checks, ownership, limits, choice, lease, rate and answer.
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
    moment timestamptz;
    owned integer[];
    job_type penstock.jobs;
    chosen penstock.queued_jobs;
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
    if p_slots is not null then
        -- While this row is locked, no transaction can take slots of this member away and end the job that is claimed here.
        perform from penstock.members where group_name = p_names[1] and members.id = p_holder for key share;
        if not found then
            return;
        end if;
        owned := penstock.still_owned(p_names[1], p_holder, p_slots, p_epochs);
    end if;
    perform penstock.lock_limits(p_names);
    moment := penstock.clock();
    for job_type in
        select jobs.*
        from penstock.jobs
        where jobs.name = any (p_names) and jobs.paused_at is null and jobs.concurrency is distinct from 0
            and (not jobs.encrypted or p_keys is not null)
        order by random()
    loop
        continue when penstock.admit(job_type, 1, moment) <= 0;
        select job.* into chosen
        from penstock.queued_jobs as job
        where job.name = job_type.name
            and job.crashes = 2
            and job.status = 'queued'
            and job.run_after = penstock.isolation_time()
            and (job.expires_at is null or job.expires_at > moment)
            and (job_type.encrypted_at is null or penstock.has_key_for(job.data, job.message, p_keys))
            and (case when p_slots is null then job.slot is null else job.slot = any (owned) end)
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
                )
            )
        order by job.seq nulls first, job.updated_at, job.id
        limit 1
        for update skip locked;
        continue when not found;

        lease := nextval('penstock.lease_id');
        update penstock.queued_jobs as job
        set status = 'in-progress', lease = claim_alone.lease, crashes = 3, run_after = moment, updated_at = moment, coalesces = false
        where job.id = chosen.id;
        perform penstock.open_lease(
            lease, chosen.name, p_holder, chosen.priority, penstock.clock(), moment + job_type.visibility_timeout, coalesce(chosen.seq, 0),
            coalesce(chosen.seq, 0), 1, array[chosen.id], penstock.retention_class(job_type.keep_succeeded)
        );
        if job_type.rate_limit is not null then
            perform penstock.note_starts(job_type.name, '', 1, job_type.rate_period);
        end if;
        id := chosen.id;
        name := chosen.name;
        attempt := chosen.attempt;
        max_attempts := chosen.max_attempts;
        priority := chosen.priority;
        key := chosen.key;
        data := coalesce(penstock.payload(chosen.message), chosen.data)::text;
        created_at := chosen.created_at;
        run_after := moment;
        seq := coalesce(chosen.seq, 0);
        lease_s := extract(epoch from job_type.visibility_timeout);
        time_limit_s := (chosen.options ->> 'time_limit')::double precision;
        snoozes := coalesce(chosen.snoozes, 0);
        traceparent := chosen.options ->> 'traceparent';
        at_slot := chosen.slot;
        return next;
        return;
    end loop;
end
$$;
comment on function penstock.claim_alone(text, text[], integer[], bigint[], text[]) is
    'Claims one job that waits to run alone, for a worker that runs nothing else and claims nothing else before it has settled it. With slots and epochs: of the pool p_names[1], from slots that the member has. When the worker is lost meanwhile the job is archived as failed with the reason quarantined. p_keys: as in claim.';
