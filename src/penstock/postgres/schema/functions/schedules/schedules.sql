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
    if not coalesce(
        case p_kind
            -- From ten milliseconds to a thousand years.
            when 'every' then p_spec ~ '^[0-9]{1,11}([.][0-9]{1,6})?$' and p_spec::numeric between 0.01 and 31622400000
            when 'cron' then p_spec ~ '^(@[a-z]+|([^[:space:][:cntrl:]]+ ){4,5}[^[:space:][:cntrl:]]+) [^[:space:][:cntrl:]]+$' and length(p_spec) <= 300
        end,
        false
    ) then
        raise exception 'invalid times of schedule %: % %', p_name, coalesce(quote_literal(left(p_kind, 100)), 'null'), coalesce(quote_literal(left(p_spec, 100)), 'null')
            using errcode = 'PS400',
                  hint = 'Use every and a number of seconds such as 90 or 0.5, or cron and an expression with its time zone such as 0 4 * * * Europe/Berlin.';
    end if;
    if not isfinite(p_first_at) then
        raise exception 'schedule % cannot begin at %', p_name, p_first_at
            using errcode = 'PS400', hint = 'Give the first of its times.';
    end if;
    perform penstock.check_times(array[p_first_at]);
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
    p_name text, out due_at timestamptz, out now_at timestamptz, out due_in double precision, out running boolean, out spec text
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
    spec := schedule.spec;
    running := due_at <= now_at and penstock.schedule_is_running(schedule);
end
$$;
comment on function penstock.look_at_schedule(text) is
    'When a schedule is due, and, when it is, whether the run before has not ended; spec: its times. due_at is null when there is no such schedule.';

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

create or replace function penstock.are_runs(p_name text, p_data jsonb[])
returns boolean
language sql
stable
as $$
    select exists (select from penstock.schedules where schedules.name = p_name)
        and not exists (
            select from unnest(p_data) as given (document)
            where case
                when given.document = '{}' then false
                when jsonb_typeof(given.document -> 'at') is distinct from 'string' then true
                else given.document - 'at' <> '{}'
                    or given.document ->> 'at' !~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,15}(Z|[+-][0-9:]{2,8})$'
            end
        )
$$;
comment on function penstock.are_runs(text, jsonb[]) is
    'Part of enqueue, of encrypted job types: whether these are runs of a schedule, whose payload is its time and nothing else, and stays readable.';

create or replace function penstock.error_text(p_error jsonb)
returns text
language sql
immutable
as $$
    select left(
        concat_ws(': ', p_error ->> 'type', case when p_error ? 'penstock' and not p_error ? 'message' then 'encrypted' else p_error ->> 'message' end), 2000
    )
$$;
comment on function penstock.error_text(jsonb) is 'Part of the functions about schedules: the error of an attempt as one text.';

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

create or replace function penstock.object_or_empty(p_value jsonb)
returns jsonb
language sql
immutable
as $$
    select case when jsonb_typeof(p_value) = 'object' then p_value else '{}' end
$$;
comment on function penstock.object_or_empty(jsonb) is 'An object; what is none counts as empty.';

create or replace function penstock.schedule_differences()
returns table (subject text, stored text, said text, workers text[])
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    with told as (
        select worker.id, worker.metadata
        from penstock.workers as worker
        where worker.state <> 'dead' and worker.seen_at > penstock.clock() - worker.dead_after
    ),
    times as (
        select schedule.name, schedule.spec, one.value, array_agg(told.id order by told.id) as ids
        from told
        cross join jsonb_each_text(penstock.object_or_empty(told.metadata -> 'schedule_specs')) as one
        join penstock.schedules as schedule on schedule.name = one.key and schedule.spec <> one.value
        group by schedule.name, schedule.spec, one.value
    ),
    zones as (
        select one.key, one.value, array_agg(told.id order by told.id) as ids
        from told
        cross join jsonb_each_text(penstock.object_or_empty(told.metadata -> 'time_zones')) as one
        group by one.key, one.value
    ),
    differing as (
        select key from zones group by key having count(*) > 1
    )
    (
        select name, spec, value, ids from times
        union all
        select zones.key, null, zones.value, zones.ids from zones join differing using (key)
    )
    order by 1, 3
    limit 100
$$;
comment on function penstock.schedule_differences() is
    'What running workers say differently: the times of a schedule (subject: its name; stored: the times by which it runs; said: those that these workers declare), and the rules of a time zone (subject: the zone; stored is null; said: a digest of the rules that these workers have).';

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
