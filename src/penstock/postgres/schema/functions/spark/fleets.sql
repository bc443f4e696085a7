-- Fleets: workers that a cluster runs, told through the database when to stop.

create or replace function penstock.start_fleet(p_name text, p_target text, p_workers integer)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
begin
    if p_name is null or p_name !~ '^[A-Za-z0-9_.-]{1,100}$' then
        raise exception 'invalid name of a fleet: %', coalesce(quote_literal(left(p_name, 100)), 'null')
            using errcode = 'PS400', hint = 'It has 1 to 100 letters, digits, ".", "-" or "_".';
    end if;
    perform penstock.check_limit(p_workers, 100000, 'number of workers');
    if p_target is null or length(p_target) not between 1 and 1000 then
        raise exception 'invalid target: %', coalesce(quote_literal(left(p_target, 100)), 'null')
            using errcode = 'PS400', hint = 'It is the application that the workers run, such as shop.app:app, in 1 to 1,000 characters.';
    end if;
    if exists (
        select from penstock.fleet_members where fleet = p_name and seen_at > moment - interval '10 seconds'
    ) then
        raise exception 'the fleet % runs already', p_name
            using errcode = 'PS409', hint = 'Drain it first, or give this one another name.';
    end if;
    delete from penstock.fleet_members where fleet = p_name;
    insert into penstock.fleets (name, target, wanted, draining, started_at)
    values (p_name, p_target, p_workers, false, moment)
    on conflict (name) do update
    set target = excluded.target, wanted = excluded.wanted, draining = false, started_at = excluded.started_at;
end
$$;
comment on function penstock.start_fleet(text, text, integer) is 'Announces a fleet of workers. PS409 while one of that name runs.';

create or replace function penstock.serve_fleet(p_fleet text, p_worker text, p_host text, p_python text)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stops boolean;
begin
    select draining into stops from penstock.fleets where name = p_fleet;
    if not found then
        return true;
    end if;
    insert into penstock.fleet_members (fleet, worker, host, python, seen_at)
    values (p_fleet, p_worker, p_host, p_python, penstock.clock())
    on conflict (fleet, worker) do update set seen_at = excluded.seen_at
    returning stops or draining into stops;
    return stops;
end
$$;
comment on function penstock.serve_fleet(text, text, text, text) is 'Says that a worker serves a fleet. True: it should stop, since it or the fleet is drained, or the fleet is gone.';

create or replace function penstock.drain_fleet(p_name text)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    update penstock.fleets set draining = true where name = p_name;
    if not found then
        raise exception 'no such fleet: %', p_name using errcode = 'PS404', hint = 'See: penstock fleet status';
    end if;
end
$$;
comment on function penstock.drain_fleet(text) is 'Tells the workers of a fleet to stop in their orderly way, which they notice within a second.';

create or replace function penstock.drain_worker(p_worker text)
returns text
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    drained text;
    process record;
begin
    update penstock.fleet_members set draining = true where worker = p_worker returning fleet into drained;
    if found then
        return drained;
    end if;
    select host, pid into process from penstock.workers where id = p_worker;
    if found then
        raise exception 'the worker % is of no fleet', p_worker
            using errcode = 'PS409', hint = format('Send SIGTERM to the process %s on %s.', process.pid, process.host);
    end if;
    raise exception 'no such worker: %', left(p_worker, 100) using errcode = 'PS404', hint = 'See: penstock workers';
end
$$;
comment on function penstock.drain_worker(text) is
    'Tells one worker of a fleet to stop in its orderly way; Spark does not start it again. Returns the fleet. PS409 for a worker of no fleet.';

create or replace function penstock.told_names(p_metadata jsonb, p_kind text)
returns text[]
language sql
immutable
as $$
    -- A worker says of itself what it likes.
    select array(
        select name
        from jsonb_array_elements_text(
            case when jsonb_typeof(p_metadata -> p_kind) = 'array' then p_metadata -> p_kind else '[]' end
        ) as told (name)
        where name is not null
    )
$$;
comment on function penstock.told_names(jsonb, text) is
    'Part of worker_list: the names of one kind (pools, consumers, schedules, leader_tasks) in the metadata of a worker.';

create or replace function penstock.told_text(p_metadata jsonb, p_name text)
returns text
language sql
immutable
as $$
    select case when jsonb_typeof(p_metadata -> p_name) = 'string' then left(p_metadata ->> p_name, 100) end
$$;
comment on function penstock.told_text(jsonb, text) is
    'Part of worker_list: a text (version, code_version) in the metadata of a worker.';

create or replace function penstock.worker_list()
returns table (
    id text, host text, pid integer, fleet text, names text[], concurrency integer, state text, in_flight integer, alive boolean,
    started_at timestamptz, seen_at timestamptz, silent_s double precision, blocked_since timestamptz, blocked_by text, halted jsonb,
    no_key jsonb, pools text[], topics text[], consumers text[], schedules text[], leader_tasks text[], version text,
    code_version text
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        worker.id, worker.host, worker.pid, member.fleet, worker.names, worker.concurrency,
        case when member.draining then 'draining' else worker.state end,
        worker.in_flight,
        worker.seen_at > penstock.clock() - worker.dead_after,
        worker.started_at, worker.seen_at,
        extract(epoch from penstock.clock() - worker.seen_at)::double precision,
        worker.blocked_since, worker.blocked_by, worker.halted, worker.no_key,
        penstock.told_names(worker.metadata, 'pools'),
        -- The queue of a subscriber is a job type of the worker.
        array(
            select distinct subscription.topic
            from penstock.subscriptions as subscription
            where subscription.queue = any (worker.names)
            order by subscription.topic
        ),
        penstock.told_names(worker.metadata, 'consumers'),
        penstock.told_names(worker.metadata, 'schedules'),
        penstock.told_names(worker.metadata, 'leader_tasks'),
        penstock.told_text(worker.metadata, 'version'),
        penstock.told_text(worker.metadata, 'code_version')
    from penstock.workers as worker
    left join penstock.fleet_members as member on member.worker = worker.id
    order by member.fleet nulls last, worker.host, worker.started_at, worker.id
$$;
comment on function penstock.worker_list() is 'Every worker, where it runs, the fleet that it is of, how long it has been silent, since when and by what its event loop is blocked, and which of its consumers halted, with their errors. no_key: what it does not work on for want of a key, with the id of the key. Beside the job types (names) the pools, the topics of whose subscribers it works on the copies, the consumers (stream/group), schedules and tasks of the leader on which it works. version: of Penstock; code_version: of the application''s code, if it is known.';

create or replace function penstock.end_fleet(p_name text)
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    delete from penstock.fleets where name = p_name
$$;
comment on function penstock.end_fleet(text) is 'Forgets a fleet.';

create or replace function penstock.fleet_counts()
returns table (name text, target text, wanted integer, present bigint, draining boolean, started_at timestamptz)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select fleets.name, fleets.target, fleets.wanted, count(member.worker), fleets.draining, fleets.started_at
    from penstock.fleets
    left join penstock.fleet_members as member on member.fleet = fleets.name and member.seen_at > penstock.clock() - interval '10 seconds'
    group by fleets.name
    order by fleets.name
$$;
comment on function penstock.fleet_counts() is 'Each fleet, with how many of its workers were there in the last ten seconds.';
