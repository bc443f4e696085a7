-- Timers and cron schedules that run once across all workers. The times are computed by the workers, from the expression and
-- the clock of the database; here is who runs which.

create or replace function penstock.declare_schedule(p_name text, p_kind text, p_spec text, p_first_at timestamptz)
returns timestamptz
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    due timestamptz;
begin
    if p_name is null or p_name !~ '^[^[:space:][:cntrl:]]{1,200}$' then
        raise exception 'invalid name of a schedule: %', coalesce(quote_literal(left(p_name, 100)), 'null')
            using errcode = 'PS400', hint = 'A name has 1 to 200 characters, none of them white space or a control character.';
    end if;
    insert into penstock.schedules (name, kind, spec, next_at, updated_at)
    values (p_name, p_kind, p_spec, p_first_at, penstock.clock())
    on conflict (name) do update
    set kind = excluded.kind,
        spec = excluded.spec,
        next_at = excluded.next_at,
        updated_at = excluded.updated_at
    where (schedules.kind, schedules.spec) <> (excluded.kind, excluded.spec);
    select next_at into due from penstock.schedules where name = p_name;
    return due;
end
$$;
comment on function penstock.declare_schedule(text, text, text, timestamptz) is
    'Creates a schedule, or begins it anew when it changed. Returns when it is due next.';

create or replace function penstock.take_schedule(
    p_name text, p_worker text, p_for interval,
    out taken boolean, out due_at timestamptz, out now_at timestamptz, out due_in double precision
)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    now_at := penstock.clock();
    update penstock.schedules
    set running_by = p_worker,
        running_until = now_at + p_for
    where name = p_name
        and next_at <= now_at
        and (running_by is null or running_until < now_at)
    returning next_at into due_at;
    taken := found;
    if not taken then
        select next_at into due_at from penstock.schedules where name = p_name;
    end if;
    due_in := extract(epoch from due_at - now_at);
end
$$;
comment on function penstock.take_schedule(text, text, interval) is
    'Takes a schedule that is due, for a while: nobody else runs it until end_schedule, or until the while is over (see extend_schedule). due_at: the time for which it runs, or will.';

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

create or replace function penstock.end_schedule(p_name text, p_worker text, p_due_at timestamptz, p_next_at timestamptz, p_ran boolean)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    update penstock.schedules
    set running_by = null,
        running_until = null,
        last_at = case when p_ran then p_due_at else last_at end,
        next_at = p_next_at
    where name = p_name and running_by = p_worker and next_at = p_due_at;
    return found;
end
$$;
comment on function penstock.end_schedule(text, text, timestamptz, timestamptz, boolean) is
    'Ends a run of a schedule and says when it is due next. False: another has taken it, or it was declared anew.';
