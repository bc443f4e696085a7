-- Runs of schedules: as jobs, and in place.

create or replace function penstock.run_id(p_name text, p_at timestamptz)
returns uuid
language sql
stable
as $$
    select (penstock.derived_ids(p_at, array['run ' || extract(epoch from p_at) || ' ' || p_name]))[1]
$$;
comment on function penstock.run_id(text, timestamptz) is 'The id of the job that runs a schedule for a slot: a derived id.';

create or replace function penstock.is_run_of(p_id uuid, p_name text, p_at timestamptz)
returns boolean
language plpgsql
stable
as $$
declare
    found_job record;
begin
    -- In the order in which a job goes through the tables.
    select job.name, job.data into found_job from penstock.waiting_jobs as job where job.id = p_id;
    if not found then
        select job.name, job.data into found_job from penstock.queued_jobs as job where job.id = p_id;
    end if;
    if not found then
        select job.name, job.data into found_job from penstock.archived_jobs as job where job.id = p_id order by job.finished_at desc limit 1;
    end if;
    return coalesce(found_job.name = p_name and found_job.data = jsonb_build_object('at', p_at), false);
end
$$;
comment on function penstock.is_run_of(uuid, text, timestamptz) is
    'Part of enqueue_run: whether the job that has an id is the run of a schedule for a slot.';

create or replace function penstock.note_job_of_run(p_name text, p_at timestamptz, p_job uuid, p_next_at timestamptz)
returns void
language sql
as $$
    update penstock.schedules
    set next_at = coalesce(p_next_at, next_at),
        last_at = p_at,
        job_id = p_job,
        last_outcome = null,
        last_started_at = null,
        last_finished_at = null,
        last_worker = null
    where name = p_name
$$;
comment on function penstock.note_job_of_run(text, timestamptz, uuid, timestamptz) is
    'Part of enqueue_run and run_schedule: notes the job of the last run of a schedule, and where it is not null the time at which it is due next.';

create or replace function penstock.enqueue_run(
    p_name text, p_spec text, p_due_at timestamptz, p_run_at timestamptz, p_next_at timestamptz, p_key text default null
)
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
    if not found or schedule.spec is distinct from p_spec or schedule.next_at is distinct from p_due_at
        or p_due_at > penstock.clock() or penstock.schedule_is_running(schedule) then
        return null;
    end if;
    perform penstock.check_next_time(p_name, p_due_at, p_next_at);
    if p_run_at < p_due_at or p_run_at >= p_next_at or p_run_at > penstock.clock() then
        raise exception 'schedule % cannot run for %, when it was due at % and is due next at %', p_name, p_run_at, p_due_at, p_next_at
            using errcode = 'PS400', hint = 'A run is for a time that has passed, from the one at which the schedule was due to the next one.';
    end if;
    if p_run_at is null then
        update penstock.schedules set next_at = p_next_at where name = p_name;
        return null;
    end if;
    perform penstock.note_ended_runs(array[p_name]);
    run := penstock.run_id(p_name, p_run_at);
    perform from penstock.enqueue_many(
        p_name, array[jsonb_build_object('at', p_run_at)], array[run], case when p_key is not null then array[p_key] end
    );
    if found and not penstock.is_run_of(run, p_name, p_run_at) then
        -- The schedule goes on, whichever job took the id.
        raise warning 'the id % of the run of schedule % for % belongs to another job: it runs under another id', run, p_name, p_run_at;
        run := penstock.enqueue(p_name, jsonb_build_object('at', p_run_at), p_key => p_key);
    end if;
    perform penstock.note_job_of_run(p_name, p_run_at, run, p_next_at);
    return run;
end
$$;
comment on function penstock.enqueue_run(text, text, timestamptz, timestamptz, timestamptz, text) is
    'Enqueues the run of a schedule for p_run_at (null: skips) and moves it from the slot p_due_at to p_next_at, in one transaction. p_spec: the times by which the caller computed them, as they are stored. p_key: key of the job. Returns the job; null: skipped, or another worker was faster, or the run before has not ended, or the schedule has other times by now. PS400 when p_next_at is not later than p_due_at. Where another job has the id of the run, the run gets a new one, and a warning says so.';

create or replace function penstock.check_next_time(p_name text, p_due_at timestamptz, p_next_at timestamptz)
returns void
language plpgsql
as $$
begin
    if (p_next_at > p_due_at and isfinite(p_next_at)) is not true then
        raise exception 'schedule % cannot be due at % after %', p_name, coalesce(p_next_at::text, 'no time'), p_due_at
            using errcode = 'PS400', hint = 'The next time of a schedule is later than the one before.';
    end if;
    perform penstock.check_times(array[p_next_at]);
end
$$;
comment on function penstock.check_next_time(text, timestamptz, timestamptz) is
    'Part of enqueue_run and end_schedule: PS400 unless the next time of a schedule is later than the one that has passed.';

create or replace function penstock.bring_forward(p_name text, p_spec text, p_due_at timestamptz)
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    update penstock.schedules
    set next_at = penstock.clock() + make_interval(secs => spec::double precision)
    where name = p_name
        and spec = p_spec
        and next_at = p_due_at
        and next_at > penstock.clock() + case when kind = 'every' then make_interval(secs => spec::double precision) end
$$;
comment on function penstock.bring_forward(text, text, timestamptz) is
    'Begins the intervals of a timer from now, when it is due later than an interval from now: the clock has stepped back.';

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
    'Part of note_schedules, enqueue_run and run_schedule: copies what became of archived runs to their schedules, where it outlives the archive.';

create or replace function penstock.note_run(
    p_name text, p_worker text, p_at timestamptz, p_started_at timestamptz, p_finished_at timestamptz, p_error jsonb
)
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_times(array[p_at, p_started_at, p_finished_at]);
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
    p_name text, p_spec text, p_worker text, p_for interval,
    out taken boolean, out due_at timestamptz, out now_at timestamptz, out due_in double precision, out requested boolean, out spec text
)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    schedule penstock.schedules;
begin
    perform penstock.check_span(p_for, 'time for which a schedule is held', '0', '366 days');
    now_at := penstock.clock();
    select * into schedule from penstock.schedules where name = p_name;
    due_at := schedule.next_at;
    spec := schedule.spec;
    taken := false;
    if spec = p_spec and (due_at <= now_at or schedule.requested_at is not null) and not penstock.schedule_is_running(schedule) then
        select * into schedule from penstock.schedules where name = p_name for update;
        due_at := schedule.next_at;
        spec := schedule.spec;
        if spec = p_spec and (due_at <= now_at or schedule.requested_at is not null) and not penstock.schedule_is_running(schedule) then
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
comment on function penstock.take_schedule(text, text, text, interval) is
    'Takes a schedule that runs in place, has the times p_spec, and is due, or of which a run was requested, for the time p_for: no other worker runs it until end_schedule, or until that time is over (see extend_schedule). due_at: the time for which it runs, or will; requested: it runs for now_at instead, and stays due at due_at.';

create or replace function penstock.extend_schedule(p_name text, p_worker text, p_due_at timestamptz, p_for interval)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_span(p_for, 'time for which a schedule is held', '0', '366 days');
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
    perform penstock.check_times(array[p_ran_at, p_started_at]);
    -- A run that was handed back, or requested, leaves the schedule due when it was.
    if p_next_at is distinct from p_due_at
        or ran and not exists (select from penstock.schedules where name = p_name and requested_at is not null) then
        perform penstock.check_next_time(p_name, p_due_at, p_next_at);
    end if;
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
    'Ends a run of a schedule in place, for p_ran_at (null: it was skipped or handed back), and says when it is due next. False: another has taken it, or it was declared again. PS400 when a run that was not requested leaves it due at p_due_at or before.';

create or replace function penstock.run_schedule(p_name text, p_key text default null)
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
    if p_key is not null and schedule.runs_as <> 'job' then
        raise exception 'a run of schedule % is no job, and has no key', p_name
            using errcode = 'PS400', hint = 'Leave the key out: the schedule runs in place.';
    end if;
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
        perform penstock.tell_all('schedule', p_name);
        return null;
    end if;
    perform penstock.note_ended_runs(array[p_name]);
    run := penstock.enqueue(p_name, jsonb_build_object('at', moment), p_key => p_key);
    perform penstock.note_job_of_run(p_name, moment, run, null);
    return run;
end
$$;
comment on function penstock.run_schedule(text, text) is
    'Runs a schedule now, beside its times. p_key: key of its job. Returns the job of the run; null: a worker runs it in place as soon as it can. PS404 when there is none, PS409 while a run has not ended, or when each worker runs it by itself, PS400 for the key of a run in place.';
