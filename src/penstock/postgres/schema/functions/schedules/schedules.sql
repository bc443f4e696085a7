-- Timers and cron schedules. The times are computed by the workers, from the expression and the clock of the database; here is
-- who runs which, and what became of it. The head of tables/0008_schedules.sql says how a slot becomes a run.

create or replace function penstock.declare_schedule(
    p_name text, p_kind text, p_spec text, p_first_at timestamptz, p_runs_as text default 'in-place'
)
returns timestamptz
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    due timestamptz;
begin
    if p_name is null or p_name !~ '^(?![.]{1,2}$)[^[:space:]/[:cntrl:]]{1,200}$' then
        raise exception 'invalid name of a schedule: %', coalesce(quote_literal(left(p_name, 100)), 'null')
            using errcode = 'PS400', hint = 'A name has 1 to 200 characters, none of them white space, "/" or a control character, and is not "." or "..".';
    end if;
    if p_runs_as is null or p_runs_as not in ('job', 'in-place', 'per-worker') then
        raise exception 'unknown way to run a schedule: %', coalesce(quote_literal(left(p_runs_as, 100)), 'null')
            using errcode = 'PS400', hint = 'Use job, in-place or per-worker.';
    end if;
    if p_first_at is null and p_runs_as <> 'per-worker' then
        raise exception 'schedule % has no first time', p_name
            using errcode = 'PS400', hint = 'Only one that runs per worker has none.';
    end if;
    insert into penstock.schedules (name, kind, spec, runs_as, next_at, updated_at, declared_at)
    values (
        p_name, p_kind, p_spec, p_runs_as, case when p_runs_as <> 'per-worker' then p_first_at end, penstock.clock(), penstock.clock()
    )
    on conflict (name) do update
    set kind = excluded.kind,
        spec = excluded.spec,
        runs_as = excluded.runs_as,
        next_at = case
            when (schedules.kind, schedules.spec) = (excluded.kind, excluded.spec) and excluded.next_at is not null
                then coalesce(schedules.next_at, excluded.next_at)
            else excluded.next_at
        end,
        updated_at = excluded.updated_at,
        declared_at = excluded.declared_at
    where (schedules.kind, schedules.spec, schedules.runs_as) <> (excluded.kind, excluded.spec, excluded.runs_as);
    select next_at into due from penstock.schedules where name = p_name;
    return due;
end
$$;
comment on function penstock.declare_schedule(text, text, text, timestamptz, text) is
    'Creates a schedule, or begins it again when its times changed. Returns when it is due next.';

create or replace function penstock.schedule_is_running(schedule penstock.schedules)
returns boolean
language sql
stable
as $$
    select (schedule.running_by is not null and schedule.running_until >= penstock.clock())
        or exists (select from penstock.queued_jobs where id = schedule.job_id)
$$;
comment on function penstock.schedule_is_running(penstock.schedules) is
    'Part of the functions about schedules: whether the last run has not ended. The job of a run that waits for a retry counts too.';

create or replace function penstock.look_at_schedule(
    p_name text, out due_at timestamptz, out now_at timestamptz, out due_in double precision, out running boolean
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
declare
    schedule penstock.schedules;
begin
    now_at := penstock.clock();
    select * into schedule from penstock.schedules where name = p_name;
    due_at := schedule.next_at;
    due_in := extract(epoch from due_at - now_at);
    running := due_at <= now_at and penstock.schedule_is_running(schedule);
end
$$;
comment on function penstock.look_at_schedule(text) is
    'When a schedule is due, and, when it is, whether the run before has not ended. due_at is null when there is no such schedule.';

create or replace function penstock.run_id(p_name text, p_at timestamptz)
returns uuid
language sql
stable
as $$
    -- A UUIDv7 of that time, whose random part is a hash.
    select (
        lpad(to_hex(floor(extract(epoch from p_at) * 1000)::bigint), 12, '0') || '7' || substr(hash, 1, 3) || '8' || substr(hash, 4, 15)
    )::uuid
    from md5(p_name || ' ' || extract(epoch from p_at)::text) as hash
$$;
comment on function penstock.run_id(text, timestamptz) is 'The id of the job that runs a schedule for a slot.';

create or replace function penstock.enqueue_run(p_name text, p_due_at timestamptz, p_run_at timestamptz, p_next_at timestamptz)
returns uuid
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    schedule penstock.schedules;
    run uuid;
begin
    select * into schedule from penstock.schedules where name = p_name for update;
    if not found or schedule.next_at is distinct from p_due_at or p_due_at > penstock.clock() or penstock.schedule_is_running(schedule) then
        return null;
    end if;
    if p_next_at is null or p_next_at <= p_due_at or p_run_at > penstock.clock() then
        raise exception 'schedule % cannot run for % and be due at % after %', p_name, p_run_at, p_next_at, p_due_at
            using errcode = 'PS400', hint = 'A slot lies in the past, and the next one after it.';
    end if;
    if p_run_at is null then
        update penstock.schedules set next_at = p_next_at where name = p_name;
        return null;
    end if;
    perform penstock.note_ended_runs(array[p_name]);
    run := penstock.run_id(p_name, p_run_at);
    perform penstock.enqueue(p_name, jsonb_build_object('at', p_run_at), run);
    update penstock.schedules
    set next_at = p_next_at,
        last_at = p_run_at,
        job_id = run,
        last_outcome = null,
        last_started_at = null,
        last_finished_at = null,
        last_worker = null
    where name = p_name;
    return run;
end
$$;
comment on function penstock.enqueue_run(text, timestamptz, timestamptz, timestamptz) is
    'Enqueues the run of a schedule for p_run_at (null: skips) and moves it from the slot p_due_at to p_next_at, in one transaction. Returns the job; null: skipped, or another worker was faster, or the run before has not ended.';

create or replace function penstock.error_text(p_error jsonb)
returns text
language sql
immutable
as $$
    select left(concat_ws(': ', p_error ->> 'type', p_error ->> 'message'), 2000)
$$;
comment on function penstock.error_text(jsonb) is 'Part of the functions about schedules: the error of an attempt as one text.';

create or replace function penstock.failures_after(p_failures integer, p_outcome text)
returns integer
language sql
immutable
as $$
    -- A cancelled run says nothing about the schedule.
    select case p_outcome when 'succeeded' then 0 when 'cancelled' then p_failures else p_failures + 1 end
$$;
comment on function penstock.failures_after(integer, text) is
    'Part of the functions about schedules: how many runs in a row have failed after one with this outcome.';

create or replace function penstock.note_ended_runs(p_names text[])
returns void
language plpgsql
as $$
begin
    with open as (
        select name, job_id
        from penstock.schedules
        where name = any (p_names) and job_id is not null and last_finished_at is null
        order by name
        for update skip locked
    ),
    ended as (
        select open.name, archived.status, archived.started_at, archived.finished_at, archived.worker, archived.errors
        from open
        join penstock.archived_jobs as archived on archived.id = open.job_id
            and archived.finished_at >= penstock.id_time(open.job_id) - interval '1 day'
    )
    update penstock.schedules as schedule
    set last_outcome = ended.status::text,
        last_started_at = ended.started_at,
        last_finished_at = ended.finished_at,
        last_worker = ended.worker,
        last_error = case when ended.status = 'succeeded' then schedule.last_error else penstock.error_text(ended.errors -> -1) end,
        last_error_at = case when ended.status = 'succeeded' then schedule.last_error_at else ended.finished_at end,
        failures = penstock.failures_after(schedule.failures, ended.status::text)
    from ended
    where schedule.name = ended.name;
end
$$;
comment on function penstock.note_ended_runs(text[]) is
    'Part of note_schedules and enqueue_run: copies what became of archived runs to their schedules, where it outlives the archive.';

create or replace function penstock.note_schedules(p_names text[])
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'schedules');
    with stale as (
        select name
        from penstock.schedules
        where name = any (p_names) and (declared_at is null or declared_at < penstock.clock() - interval '10 seconds')
        order by name
        for update skip locked
    )
    update penstock.schedules as schedule
    set declared_at = penstock.clock()
    from stale
    where schedule.name = stale.name;
    perform penstock.note_ended_runs(p_names);
end
$$;
comment on function penstock.note_schedules(text[]) is
    'Says that a running worker declares these schedules, which counts for a minute, and notes what became of their runs.';

create or replace function penstock.note_run(
    p_name text, p_worker text, p_at timestamptz, p_started_at timestamptz, p_finished_at timestamptz, p_error jsonb
)
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    update penstock.schedules
    set -- The run that failed last is noted twice when it is also the latest one.
        failures = case
            when p_error is null then 0
            when last_at = p_at and last_worker = left(p_worker, 200) then failures
            else failures + 1
        end,
        last_at = p_at,
        last_worker = left(p_worker, 200),
        last_started_at = p_started_at,
        last_finished_at = p_finished_at,
        last_outcome = case when p_error is null then 'succeeded' else 'failed' end,
        last_error = case when p_error is null then last_error else penstock.error_text(p_error) end,
        last_error_at = case when p_error is null then last_error_at else p_finished_at end
    where name = p_name and runs_as = 'per-worker'
$$;
comment on function penstock.note_run(text, text, timestamptz, timestamptz, timestamptz, jsonb) is
    'Notes what became of a run of a schedule that each worker runs for itself. Not every run is noted.';

create or replace function penstock.take_schedule(
    p_name text, p_worker text, p_for interval,
    out taken boolean, out due_at timestamptz, out now_at timestamptz, out due_in double precision, out requested boolean
)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    schedule penstock.schedules;
begin
    now_at := penstock.clock();
    select * into schedule from penstock.schedules where name = p_name;
    due_at := schedule.next_at;
    taken := false;
    if (due_at <= now_at or schedule.requested_at is not null) and not penstock.schedule_is_running(schedule) then
        select * into schedule from penstock.schedules where name = p_name for update;
        due_at := schedule.next_at;
        if (due_at <= now_at or schedule.requested_at is not null) and not penstock.schedule_is_running(schedule) then
            taken := true;
            requested := schedule.requested_at is not null;
            update penstock.schedules
            set running_by = p_worker,
                running_until = now_at + p_for,
                last_outcome = case when schedule.running_by is not null then 'lost' else last_outcome end,
                last_worker = case when schedule.running_by is not null then schedule.running_by else last_worker end,
                last_error = case
                    when schedule.running_by is not null then 'worker ' || schedule.running_by || ' fell silent in the middle of a run'
                    else last_error
                end,
                last_error_at = case when schedule.running_by is not null then now_at else last_error_at end,
                failures = case when schedule.running_by is not null then penstock.failures_after(failures, 'lost') else failures end
            where name = p_name;
        end if;
    end if;
    due_in := extract(epoch from due_at - now_at);
end
$$;
comment on function penstock.take_schedule(text, text, interval) is
    'Takes a schedule that runs in place and is due, or of which a run was requested, for a while: no other worker runs it until end_schedule, or until the while is over (see extend_schedule). due_at: the time for which it runs, or will; requested: it runs for now_at instead, and stays due at due_at.';

create or replace function penstock.extend_schedule(p_name text, p_worker text, p_due_at timestamptz, p_for interval)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    update penstock.schedules
    set running_until = penstock.clock() + p_for
    where name = p_name and running_by = p_worker and next_at = p_due_at;
    return found;
end
$$;
comment on function penstock.extend_schedule(text, text, timestamptz, interval) is
    'Says that a worker still runs a schedule. False: another has taken it.';

create or replace function penstock.end_schedule(
    p_name text, p_worker text, p_due_at timestamptz, p_next_at timestamptz, p_ran_at timestamptz default null,
    p_started_at timestamptz default null, p_error jsonb default null
)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    ran constant boolean := p_ran_at is not null;
begin
    update penstock.schedules
    set running_by = null,
        running_until = null,
        next_at = p_next_at,
        last_at = coalesce(p_ran_at, last_at),
        job_id = case when ran then null else job_id end,
        requested_at = case when ran then null else requested_at end,
        failures = case when ran then penstock.failures_after(failures, case when p_error is null then 'succeeded' else 'failed' end) else failures end,
        last_worker = case when ran then p_worker else last_worker end,
        last_started_at = case when ran then p_started_at else last_started_at end,
        last_finished_at = case when ran then penstock.clock() else last_finished_at end,
        last_outcome = case when not ran then last_outcome when p_error is null then 'succeeded' else 'failed' end,
        last_error = case when p_error is null then last_error else penstock.error_text(p_error) end,
        last_error_at = case when p_error is null then last_error_at else penstock.clock() end
    where name = p_name and running_by = p_worker and next_at = p_due_at;
    return found;
end
$$;
comment on function penstock.end_schedule(text, text, timestamptz, timestamptz, timestamptz, timestamptz, jsonb) is
    'Ends a run of a schedule in place, for p_ran_at (null: it was skipped or handed back), and says when it is due next. False: another has taken it, or it was declared again.';

create or replace function penstock.schedule_list()
returns table (
    name text, runs_as text, kind text, spec text, next_at timestamptz, last_at timestamptz, last_outcome text, last_error text,
    last_error_at timestamptz, last_started_at timestamptz, last_finished_at timestamptz, last_worker text, job_id uuid,
    declared boolean, declared_at timestamptz, failures integer, requested_at timestamptz
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        schedule.name, schedule.runs_as, schedule.kind, schedule.spec, schedule.next_at, schedule.last_at,
        case
            when schedule.running_by is not null and schedule.running_until >= penstock.clock() then 'in-progress'
            else coalesce(queued.status::text, schedule.last_outcome, archived.status::text)
        end,
        case
            when queued.errors is not null then penstock.error_text(queued.errors -> -1)
            when schedule.last_finished_at is null and archived.status <> 'succeeded' then penstock.error_text(archived.errors -> -1)
            else schedule.last_error
        end,
        case
            when queued.errors is not null then queued.updated_at
            when schedule.last_finished_at is null and archived.status <> 'succeeded' then archived.finished_at
            else schedule.last_error_at
        end,
        coalesce(lease.started_at, schedule.last_started_at, archived.started_at),
        coalesce(schedule.last_finished_at, archived.finished_at),
        coalesce(schedule.running_by, lease.worker, schedule.last_worker, archived.worker),
        schedule.job_id,
        coalesce(schedule.declared_at > penstock.clock() - interval '1 minute', false),
        schedule.declared_at,
        case
            when archived.status is not null then penstock.failures_after(schedule.failures, archived.status::text)
            else schedule.failures
        end,
        schedule.requested_at
    from penstock.schedules as schedule
    left join penstock.queued_jobs as queued on queued.id = schedule.job_id
    left join penstock.leases as lease on lease.id = queued.lease
    left join lateral (
        select job.status, job.errors, job.started_at, job.finished_at, job.worker
        from penstock.archived_jobs as job
        where schedule.last_finished_at is null
            and queued.id is null
            and job.id = schedule.job_id
            and job.finished_at >= penstock.id_time(schedule.job_id) - interval '1 day'
    ) as archived on true
    order by schedule.name
$$;
comment on function penstock.schedule_list() is
    'Every schedule: when it is due next, for which time it ran last, what became of that, the last error, how many runs in a row have failed, and whether a running worker declares it (false: it left the code, or no worker of that code runs).';

create or replace function penstock.require_schedule(p_name text)
returns penstock.schedules
language plpgsql
as $$
declare
    schedule penstock.schedules;
begin
    select * into schedule from penstock.schedules where name = p_name for update;
    if not found then
        raise exception 'no such schedule: %', coalesce(left(p_name, 100), 'null')
            using errcode = 'PS404', hint = 'See: select * from penstock.schedule_list();';
    end if;
    return schedule;
end
$$;
comment on function penstock.require_schedule(text) is 'Part of run_schedule and drop_schedule: the schedule of that name, held until the transaction ends; or PS404.';

create or replace function penstock.run_schedule(p_name text)
returns uuid
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    schedule constant penstock.schedules := penstock.require_schedule(p_name);
    run uuid;
begin
    if schedule.runs_as = 'per-worker' then
        raise exception 'each worker runs the schedule % by itself', p_name
            using errcode = 'PS409', hint = 'A schedule that runs once for all workers can be run on request.';
    end if;
    if penstock.schedule_is_running(schedule) or schedule.requested_at is not null then
        raise exception 'a run of schedule % has not ended', p_name
            using errcode = 'PS409', hint = 'Runs do not overlap: wait for its end, or cancel its job.';
    end if;
    if schedule.runs_as = 'in-place' then
        update penstock.schedules set requested_at = moment where name = p_name;
        perform pg_notify('penstock', 'schedule ' || p_name);
        return null;
    end if;
    perform penstock.note_ended_runs(array[p_name]);
    run := penstock.enqueue(p_name, jsonb_build_object('at', moment));
    update penstock.schedules
    set last_at = moment,
        job_id = run,
        last_outcome = null,
        last_started_at = null,
        last_finished_at = null,
        last_worker = null
    where name = p_name;
    return run;
end
$$;
comment on function penstock.run_schedule(text) is
    'Runs a schedule now, beside its times. Returns the job of the run; null: a worker runs it in place as soon as it can. PS404 when there is none, PS409 while a run has not ended, or when each worker runs it by itself.';

create or replace function penstock.schedule_runs(p_name text, p_status text default null, p_limit integer default 20)
returns table (
    id uuid, status text, at timestamptz, started_at timestamptz, finished_at timestamptz, worker text, attempt integer, error text
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_limit(p_limit, 1000);
    if not exists (select from penstock.schedules where name = p_name) then
        raise exception 'no such schedule: %', coalesce(left(p_name, 100), 'null')
            using errcode = 'PS404', hint = 'See: select * from penstock.schedule_list();';
    end if;
    return query
    select
        run.id, run.status,
        -- The id of a run has the time of its slot, see run_id.
        coalesce(penstock.id_time(run.id), run.created_at), run.started_at, run.finished_at, run.worker,
        run.attempt::integer,
        nullif(penstock.error_text(run.errors::jsonb -> -1), '')
    from penstock.list_jobs(p_name, p_status, p_limit => p_limit) with ordinality as listed (id, place)
    cross join lateral penstock.find_jobs(array[listed.id]) as run
    order by listed.place;
end
$$;
comment on function penstock.schedule_runs(text, text, integer) is
    'The last runs of a schedule whose runs are jobs, latest first, as far as the archive goes: at is the time for which it ran. p_status: only those with this status. PS404 when there is no such schedule.';

create or replace function penstock.drop_schedule(p_name text)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    schedule constant penstock.schedules := penstock.require_schedule(p_name);
begin
    if schedule.declared_at > penstock.clock() - interval '1 minute' then
        raise exception 'schedule % is declared by a running worker, the last time at %', p_name, schedule.declared_at
            using errcode = 'PS409',
                  hint = 'Take it out of the code and restart the workers; a minute after the last of them said that it declares it, it can be dropped.';
    end if;
    delete from penstock.schedules where name = p_name;
end
$$;
comment on function penstock.drop_schedule(text) is
    'Forgets a schedule that left the code. The job type of its runs and their history stay. PS404 when there is none, PS409 while a running worker declares it.';
