-- Job types: create, change, declare, pause, resume.

create or replace function penstock.check_type(job_type penstock.jobs)
returns void
language plpgsql
immutable
as $$
declare
    problem text;
    advice text;
begin
    perform penstock.check_name(job_type.name);
    case
        when num_nulls(
            job_type.delivery_strategy, job_type.max_attempts, job_type.visibility_timeout, job_type.backoff_base,
            job_type.backoff_factor, job_type.backoff_cap, job_type.backoff_jitter, job_type.keep_result, job_type.encrypted
        ) > 0 then
            problem := 'only concurrency, time_limit, rate_limit, rate_period, keep_succeeded, keep_failed, max_waiting and max_crashes may be null';
            advice := 'Leave an option out to keep it as it is.';
        when job_type.max_attempts < 1 then
            problem := format('max_attempts must be at least 1, not %s', job_type.max_attempts);
            advice := 'A job that may start only once has max_attempts 1.';
        when job_type.delivery_strategy = 'at_most_once' and job_type.max_attempts > 1 then
            problem := format('an at_most_once type has 1 attempt, not %s', job_type.max_attempts);
            advice := 'Set max_attempts to 1, or use at_least_once.';
        when job_type.concurrency < 0 then
            problem := format('concurrency must not be negative, not %s', job_type.concurrency);
            advice := 'null means no limit, 0 pauses the type.';
        when job_type.visibility_timeout < interval '1 second' or job_type.visibility_timeout > interval '30 days' then
            problem := format('visibility_timeout must be between 1 second and 30 days, not %s', job_type.visibility_timeout);
            advice := 'Choose a little more than the longest run of a handler, or extend the lease while it runs.';
        when job_type.time_limit <= interval '0' or job_type.time_limit > interval '30 days' then
            problem := format('time_limit must be positive and at most 30 days, not %s', job_type.time_limit);
            advice := 'null means a little less than the visibility timeout.';
        when job_type.backoff_base < interval '0' or job_type.backoff_cap < job_type.backoff_base
            or job_type.backoff_cap > interval '366 days' then
            problem := format('backoff must have 0 <= base <= cap <= 366 days, not base %s and cap %s', job_type.backoff_base, job_type.backoff_cap);
            advice := 'The default is base 2 seconds and cap 1 hour.';
        when not (job_type.backoff_factor >= 1 and job_type.backoff_factor <= 100) then
            problem := format('backoff_factor must be between 1 and 100, not %s', job_type.backoff_factor);
            advice := '2 doubles the delay with each retry.';
        when not (job_type.backoff_jitter >= 0 and job_type.backoff_jitter <= 1) then
            problem := format('backoff_jitter must be between 0 and 1, not %s', job_type.backoff_jitter);
            advice := '0.1 varies the delay by 10 % up or down.';
        when (job_type.rate_limit is null) <> (job_type.rate_period is null) then
            problem := 'rate_limit and rate_period go together';
            advice := 'Set both, or neither.';
        when job_type.rate_limit < 1 or job_type.rate_period < interval '10 milliseconds' or job_type.rate_period > interval '31 days' then
            problem := format('a rate must be at least 1 in a period of 10 ms to 31 days, not %s in %s', job_type.rate_limit, job_type.rate_period);
            advice := 'To stop a type, pause it.';
        when least(job_type.keep_succeeded, job_type.keep_failed) <= interval '0'
            or greatest(job_type.keep_succeeded, job_type.keep_failed) > interval '365 days' then
            problem := format(
                'keep must be positive and at most 365 days, not %s',
                case
                    when job_type.keep_succeeded <= interval '0' or job_type.keep_succeeded > interval '365 days' then job_type.keep_succeeded
                    else job_type.keep_failed
                end
            );
            advice := 'null means as long as the settings of the workers say. For longer keep a lake: penstock history run.';
        when job_type.max_crashes < 1 then
            problem := format('max_crashes must be at least 1, not %s', job_type.max_crashes);
            advice := 'null means that no number of crashes ends a job.';
        when job_type.max_waiting < 1 then
            problem := format('max_waiting must be at least 1, not %s', job_type.max_waiting);
            advice := 'null means no limit. To stop a type, pause it.';
        when job_type.max_waiting is not null and job_type.topic is not null then
            problem := 'the queue of a subscriber has no max_waiting';
            advice := 'Each subscriber gets each message: limit what is published.';
        else
            return;
    end case;
    raise exception 'invalid job type %: %', job_type.name, problem
        using errcode = 'PS400', hint = advice;
end
$$;
comment on function penstock.check_type(penstock.jobs) is 'Raises PS400 unless the options of a type are valid together.';

create or replace function penstock.with_options(job_type penstock.jobs, p_options jsonb)
returns penstock.jobs
language plpgsql
stable
as $$
declare
    known constant text[] := array[
        'delivery_strategy', 'max_attempts', 'concurrency', 'visibility_timeout', 'time_limit', 'backoff_base',
        'backoff_factor', 'backoff_cap', 'backoff_jitter', 'rate_limit', 'rate_period', 'keep_result', 'encrypted', 'max_waiting',
        'keep_succeeded', 'keep_failed', 'max_crashes'
    ];
begin
    perform penstock.check_options(p_options, known, '{"max_attempts": 3, "concurrency": 10}');
    perform penstock.check_encrypted_option('job type ' || job_type.name, p_options);
    begin
        job_type := jsonb_populate_record(job_type, p_options);
    exception
        when data_exception or check_violation then
            raise exception 'invalid options %: %', left(p_options::text, 200), sqlerrm
                using errcode = 'PS400', hint = 'Spans of time are intervals such as "90 seconds", the rest numbers, true or false.';
    end;
    perform penstock.check_type(job_type);
    if job_type.encrypted and job_type.encrypted_at is null then
        job_type.encrypted_at := penstock.clock();
    end if;
    return job_type;
end
$$;
comment on function penstock.with_options(penstock.jobs, jsonb) is 'The type with the given options changed and checked.';

create or replace function penstock.new_type(p_name text, p_options jsonb)
returns penstock.jobs
language plpgsql
stable
as $$
begin
    return penstock.with_options(
        jsonb_populate_record(null::penstock.jobs, jsonb_build_object(
            'name', p_name,
            'delivery_strategy', 'at_least_once',
            'max_attempts', case when p_options ->> 'delivery_strategy' = 'at_most_once' then 1 else 5 end,
            'visibility_timeout', interval '5 minutes',
            'backoff_base', interval '2 seconds',
            'backoff_factor', 2,
            'backoff_cap', interval '1 hour',
            'backoff_jitter', 0.1,
            'keep_result', false,
            'encrypted', false,
            'max_crashes', 3,
            'created_at', penstock.clock(),
            'updated_at', penstock.clock()
        )),
        p_options
    );
end
$$;
comment on function penstock.new_type(text, jsonb) is 'Part of create_job_type and subscribe: a type with its defaults and the given options, checked, not yet written.';

create or replace function penstock.lock_kind(p_name text)
returns void
language sql
as $$
    select pg_advisory_xact_lock(hashtext('penstock.kind'), hashtext(p_name))
$$;
comment on function penstock.lock_kind(text) is
    'Part of what creates, converts and drops job types and pools: one transaction at a time decides whether a name is a job type, a pool, or free.';

create or replace function penstock.create_job_type(p_name text, p_options jsonb default '{}')
returns penstock.jobs
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    job_type penstock.jobs;
begin
    perform penstock.check_name(p_name);
    job_type := penstock.new_type(p_name, p_options);
    perform penstock.lock_kind(p_name);
    insert into penstock.jobs select job_type.* on conflict (name) do nothing;
    if not found then
        raise exception 'job type % exists', p_name
            using errcode = 'PS409', hint = format('Change it: penstock types change %s --set ..., or select penstock.change_job_type(%L, ...);', p_name, p_name);
    end if;
    insert into penstock.type_priorities values (p_name, 0);
    if job_type.encrypted then
        perform penstock.guard_staged_jobs();
    end if;
    return job_type;
end
$$;
comment on function penstock.create_job_type(text, jsonb) is
    'Creates a job type. Options: delivery_strategy, max_attempts, concurrency, visibility_timeout, time_limit, backoff_base, backoff_factor, backoff_cap, backoff_jitter, rate_limit, rate_period, keep_succeeded, keep_failed, keep_result, encrypted, max_waiting, max_crashes. PS409 when it exists.';

create or replace function penstock.change_job_type(p_name text, p_options jsonb)
returns penstock.jobs
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    job_type penstock.jobs;
begin
    perform penstock.require_type(p_name);
    select * into job_type from penstock.jobs where name = p_name for update;
    job_type := penstock.with_options(job_type, p_options);
    update penstock.jobs
    set delivery_strategy = job_type.delivery_strategy,
        max_attempts = job_type.max_attempts,
        concurrency = job_type.concurrency,
        visibility_timeout = job_type.visibility_timeout,
        time_limit = job_type.time_limit,
        backoff_base = job_type.backoff_base,
        backoff_factor = job_type.backoff_factor,
        backoff_cap = job_type.backoff_cap,
        backoff_jitter = job_type.backoff_jitter,
        rate_limit = job_type.rate_limit,
        rate_period = job_type.rate_period,
        keep_succeeded = job_type.keep_succeeded,
        keep_failed = job_type.keep_failed,
        keep_result = job_type.keep_result,
        encrypted = job_type.encrypted,
        max_waiting = job_type.max_waiting,
        max_crashes = job_type.max_crashes,
        encrypted_at = job_type.encrypted_at,
        updated_at = penstock.clock()
    where name = p_name
    returning * into job_type;
    if p_options ? 'encrypted' then
        perform penstock.check_queues(p_queue => p_name);
    end if;
    if job_type.encrypted then
        perform penstock.guard_staged_jobs();
    end if;
    perform penstock.wake_claimers(p_name, 8);
    return job_type;
end
$$;
comment on function penstock.change_job_type(text, jsonb) is 'Changes the given options of a job type; takes effect with the next claim. PS404 when there is none.';

create or replace function penstock.declare_job_type(p_name text, p_options jsonb default '{}', p_again boolean default true)
returns penstock.jobs
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    job_type penstock.jobs;
    declared jsonb;
begin
    perform penstock.check_name(p_name);
    if jsonb_typeof(p_options) is distinct from 'object' then
        raise exception 'the options of % are no object: %', p_name, coalesce(left(p_options::text, 100), 'null')
            using errcode = 'PS400', hint = 'For example: {"max_attempts": 3}.';
    end if;
    perform penstock.check_encrypted_option('job type ' || p_name, p_options);
    select * into job_type from penstock.jobs where name = p_name;
    if found and job_type.declaration is not distinct from p_options then
        return job_type;
    end if;
    if not found then
        if p_again is not true and exists (select from penstock.dropped_types where name = p_name) then
            -- It raises the error for a type that is not there.
            perform penstock.require_type(p_name);
        end if;
        begin
            job_type := penstock.create_job_type(p_name, p_options);
        exception
            -- Another process declared it in the meantime.
            when sqlstate 'PS409' then
                null;
        end;
    end if;
    select declaration into declared from penstock.jobs where name = p_name for update;
    if declared is distinct from p_options then
        -- An older application does not know that the type is encrypted: a declaration turns encryption on, and never off.
        job_type := penstock.change_job_type(p_name, case when p_options -> 'encrypted' = 'true' then p_options else p_options - 'encrypted' end);
        update penstock.jobs set declaration = p_options where name = p_name returning * into job_type;
    else
        select * into job_type from penstock.jobs where name = p_name;
    end if;
    return job_type;
end
$$;
comment on function penstock.declare_job_type(text, jsonb, boolean) is
    'What an application does at start: creates the type, or changes it when the declaration differs from the last one. Changes made by hand in between stay. It turns encryption on, and never off: for that there is change_job_type. p_again false: a type that was dropped is not created again (PS404).';

create or replace function penstock.pause(p_name text)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.require_type(p_name);
    update penstock.jobs set paused_at = penstock.clock() where name = p_name and paused_at is null;
end
$$;
comment on function penstock.pause(text) is 'No job of the type is claimed until resume; running jobs go on. Idempotent.';

create or replace function penstock.resume(p_name text)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    job_type penstock.jobs;
begin
    job_type := penstock.require_type(p_name);
    if job_type.concurrency = 0 then
        raise exception 'job type % has concurrency 0', p_name
            using errcode = 'PS409',
                  hint = format('Give it a limit: select penstock.change_job_type(%L, ''{"concurrency": 10}'');', p_name);
    end if;
    update penstock.jobs set paused_at = null where name = p_name and paused_at is not null;
    perform penstock.wake_claimers(p_name, 8);
end
$$;
comment on function penstock.resume(text) is 'Ends a pause. PS409 when concurrency 0 is what holds the type.';
