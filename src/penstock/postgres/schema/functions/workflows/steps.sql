-- Durable steps: what the handler of a job has done already, and what it waits for. The head of tables/0013_workflows.sql has the whole.

create or replace function penstock.check_step(p_what text, p_name text, p_value jsonb)
returns void
language plpgsql
immutable
as $$
declare
    largest constant integer := 262144;
begin
    if not penstock.is_key(p_name) or p_name is null or length(p_name) > 200 or p_name like '%/%' then
        raise exception 'invalid name of %: %', p_what, coalesce(quote_literal(left(p_name, 100)), 'null')
            using errcode = 'PS400', hint = 'A name has 1 to 200 characters, no slash and no control characters.';
    end if;
    -- jsonb is several times as long as the text of many small numbers, which is what a client measures: without spaces. An envelope is longer
    -- than what it contains; the client that made it has measured that.
    if pg_column_size(p_value) > largest
        and octet_length(replace(replace(p_value::text, ', ', ','), ': ', ':'))
            > (case when penstock.is_envelope(p_value) then largest * 3 / 2 else largest end)
    then
        raise exception 'the value of % % is larger than 256 KiB', p_what, p_name
            using errcode = 'PS413',
                  hint = 'Store it in a table or an object store of your own, and return a reference to it, such as its key.';
    end if;
    perform penstock.check_json(p_value, 'the value of ' || p_what);
end
$$;
comment on function penstock.check_step(text, text, jsonb) is
    'Part of write_steps, begin_waits and signal: raises PS400 for a name that cannot be used, PS413 for a value that is too large. p_what: a step, or a signal.';

create or replace function penstock.check_held(p_what text, p_ids uuid[], p_leases bigint[], p_names text[])
returns void
language plpgsql
as $$
begin
    perform penstock.check_size(greatest(cardinality(p_ids), cardinality(p_leases), cardinality(p_names)), 10000, p_what);
    perform penstock.check_lists(array[array_dims(p_ids), array_dims(p_leases), array_dims(p_names)]);
    if coalesce(cardinality(p_ids), 0) > 0 and (p_leases is null or array_position(p_leases, null) is not null) then
        raise exception 'a step of a job is to be written without its lease'
            using errcode = 'PS400', hint = 'Give the lease that claim or extend returned for each job.';
    end if;
end
$$;
comment on function penstock.check_held(text, uuid[], bigint[], text[]) is
    'Part of write_steps and begin_waits: raises PS400 for arrays that differ in length, and for a job without its lease.';

create or replace function penstock.write_steps(
    p_ids uuid[], p_leases bigint[], p_names text[], p_results jsonb[], p_wait boolean default true
)
returns table (place integer, outcome text)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment constant timestamptz := penstock.clock();
    plain text;
    locked uuid[];
begin
    perform penstock.check_held('steps', p_ids, p_leases, p_names);
    perform penstock.check_lists(array[array_dims(p_ids), array_dims(p_results)]);
    perform penstock.check_step('a step', given.name, coalesce(given.result, 'null')) from unnest(p_names, p_results) as given (name, result);
    if penstock.any_encrypted(p_ids) then
        select job.name into plain
        from unnest(p_ids, p_results) as given (id, result)
        join penstock.queued_jobs as job on job.id = given.id
        join penstock.jobs as type on type.name = job.name
        where type.encrypted and not penstock.is_envelope(coalesce(given.result, 'null'))
        limit 1;
        if found then
            perform penstock.refuse_plain('job type ' || plain, array['null'::jsonb]);
        end if;
    end if;
    -- The fence: these rows are locked, so that no job of them is lost before the steps are committed.
    locked := penstock.lock_held_jobs(p_ids, p_leases, coalesce(p_wait, true));
    return query
    with held as (
        select given.place, given.id, given.name, coalesce(given.result, 'null') as result, given.id = any (locked) as is_locked
        from unnest(p_ids, p_leases, p_names, p_results) with ordinality as given (id, lease, name, result, place)
        join penstock.queued_jobs as job on job.id = given.id
        left join penstock.leases as lease on lease.id = job.lease
        where job.status = 'in-progress' and given.lease in (job.lease, lease.renews)
    ),
    written as (
        insert into penstock.job_steps as step (at, job, kind, name, result)
        select distinct on (held.id, held.name) moment, held.id, 'step', held.name, held.result
        from held
        where held.is_locked
        order by held.id, held.name, held.place
        on conflict (job, name) do update
        set result = excluded.result
        where step.kind = 'gather' and step.result is null
        returning step.job, step.name
    )
    select
        given.place::integer,
        case
            when held.id is null then 'stale'
            when not held.is_locked then 'busy'
            when written.job is null then 'known'
            else 'written'
        end
    from unnest(p_ids) with ordinality as given (id, place)
    left join held on held.place = given.place
    left join written on written.job = held.id and written.name = held.name
    order by given.place;
end
$$;
comment on function penstock.write_steps(uuid[], bigint[], text[], jsonb[], boolean) is
    'Keeps the results of durable steps, one element of the arrays for each, under the lease under which its job is held. Returns for each its place and written; known when the job has a step of this name, whose result stays; or stale when the job is not held under this lease, and nothing was kept. p_wait false: does not wait for jobs that other transactions have locked, and returns busy for them, of which nothing was kept: call it again. May be called in a transaction that has the effects of the step. PS413 for a result above 256 KiB.';

create or replace function penstock.time_out_waits(p_jobs uuid[], p_names text[], p_moment timestamptz)
returns void
language plpgsql
-- A transaction that goes on may have inserted the signal: its end decides, and the wait goes on until then.
set lock_timeout = '100ms'
as $$
declare
    -- One transaction may have signalled all of these jobs: after some locks the function waits for none any more.
    tries integer := 5;
    late record;
begin
    for late in select given.job, given.name from unnest(p_jobs, p_names) as given (job, name) order by given.job, given.name loop
        begin
            insert into penstock.job_signals (at, job, name) values (p_moment, late.job, late.name)
            on conflict (job, name) do nothing;
        exception
            when lock_not_available then
                tries := tries - 1;
                if tries = 0 then
                    perform set_config('lock_timeout', '1ms', true);
                end if;
        end;
    end loop;
end
$$;
comment on function penstock.time_out_waits(uuid[], text[], timestamptz) is
    'Part of begin_waits: the timeouts of waits that are over, where no signal was first.';

-- Long for its checks; what it does is one insert, the timeouts, and a look at what is there.
create or replace function penstock.begin_waits(
    p_ids uuid[], p_leases bigint[], p_kinds text[], p_names text[], p_for interval[] default null
)
returns table (place integer, state text, value text, job_group uuid)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment constant timestamptz := penstock.clock();
    refused text;
    locked uuid[];
    held integer[];
    busy integer[];
    late record;
begin
    perform penstock.check_held('steps', p_ids, p_leases, p_names);
    perform penstock.check_lists(array[array_dims(p_ids), array_dims(p_kinds), array_dims(p_for)]);
    perform penstock.check_step('a step', given.name, null) from unnest(p_names) as given (name);
    if exists (
        select from unnest(p_kinds, p_for) as given (kind, span)
        where given.kind is null or given.kind not in ('sleep', 'wait', 'gather') or given.kind = 'sleep' and given.span is null
    ) then
        raise exception 'a job is to wait for what is not known'
            using errcode = 'PS400', hint = 'A kind is sleep, with a span, wait or gather.';
    end if;
    if interval '3660 days' < any (p_for) or interval '0' > any (p_for) then
        raise exception 'a job cannot wait for %', (select given from unnest(p_for) as given order by given between interval '0' and interval '3660 days' limit 1)
            using errcode = 'PS400', hint = 'Give a span of at most 3,660 days that is not negative; null waits without a timeout.';
    end if;
    -- A transaction of the handler that goes on may hold the row of its job: the others of this call do not wait for it.
    locked := penstock.lock_held_jobs(p_ids, p_leases, false);
    select type.name into refused
    from unnest(p_ids) as given (id)
    join penstock.queued_jobs as job on job.id = given.id
    join penstock.jobs as type on type.name = job.name
    where type.delivery_strategy = 'at_most_once'
    limit 1;
    if found then
        raise exception 'a job of % cannot be suspended, since it may start only once', refused
            using errcode = 'PS409', hint = 'Make the type at_least_once, or enqueue a further job instead of waiting in this one.';
    end if;
    held := array(
        select given.place::integer
        from unnest(p_ids, p_leases) with ordinality as given (id, lease, place)
        join penstock.queued_jobs as job on job.id = given.id
        left join penstock.leases as lease on lease.id = job.lease
        where job.status = 'in-progress' and given.lease in (job.lease, lease.renews) and job.id = any (locked)
    );
    with groups as (
        -- Found again by a handler that runs again.
        insert into penstock.job_groups (id, name, created_at, changed_at, on_failure, gathered_by)
        select penstock.new_id(), p_ids[nth] || '.' || p_names[nth], moment, moment, 'continue', p_ids[nth]
        from unnest(held) as nth
        where p_kinds[nth] = 'gather'
            and (select 1 from penstock.job_steps as step where step.job = p_ids[nth] and step.name = p_names[nth]) is null
        on conflict (name) do nothing
        returning id, name
    )
    insert into penstock.job_steps (at, due, job, job_group, kind, name)
    select moment, moment + p_for[nth], p_ids[nth], groups.id, p_kinds[nth], p_names[nth]
    from unnest(held) as nth
    left join groups on groups.name = p_ids[nth] || '.' || p_names[nth]
    on conflict (job, name) do nothing;
    if cardinality(held) < cardinality(p_ids) then
        busy := array(
            select given.place::integer
            from unnest(p_ids, p_leases) with ordinality as given (id, lease, place)
            join penstock.queued_jobs as job on job.id = given.id
            left join penstock.leases as lease on lease.id = job.lease
            where job.status = 'in-progress' and given.lease in (job.lease, lease.renews) and job.id <> all (locked)
        );
    end if;
    select array_agg(step.job) as jobs, array_agg(step.name) as names into late
    from unnest(held) as nth
    join penstock.job_steps as step on step.job = p_ids[nth] and step.name = p_names[nth]
    where step.kind = 'wait' and step.due <= moment
        and (select 1 from penstock.job_signals as signal where signal.job = step.job and signal.name = step.name) is null;
    if late.jobs is not null then
        perform penstock.time_out_waits(late.jobs, late.names, moment);
    end if;
    return query
    select
        given.place::integer,
        case
            when given.place <> all (held) then case when given.place = any (busy) then 'busy' else 'stale' end
            when step.kind <> p_kinds[given.place::integer] then 'other'
            when step.kind = 'sleep' then case when step.due <= moment then 'done' else 'open' end
            when step.kind = 'wait' then case when signal.at is null then 'open' when signal.value is null then 'timeout' else 'done' end
            when step.result is not null then 'done'
            when job_group.finished_at is not null then 'ended'
            when job_group.sealed_at is not null then 'open'
            else 'new'
        end,
        coalesce(step.result, signal.value)::text,
        step.job_group
    from unnest(p_ids) with ordinality as given (id, place)
    left join penstock.job_steps as step on step.job = given.id and step.name = p_names[given.place::integer]
    left join penstock.job_signals as signal on signal.job = step.job and signal.name = step.name and step.kind = 'wait'
    left join penstock.job_groups as job_group on job_group.id = step.job_group
    order by given.place;
end
$$;
comment on function penstock.begin_waits(uuid[], bigint[], text[], text[], interval[]) is
    'Begins to wait, one element of the arrays for each wait, under the lease under which its job is held. Kinds: sleep (for p_for), wait (for the signal of this name, at most p_for, null: for ever), gather (for children). Returns for each its place and done (with what was signalled, or the results of the children), timeout, stale, busy (another transaction has locked the job: call it again), other (the job has a step of this name and another kind) or open: then settle the job as suspended. Of a gather new: enqueue the children in the job group, whose id is returned, and seal it; ended: write_steps their results. Called again it goes on. PS409 for a job of an at_most_once type.';

create or replace function penstock.child_ids(p_job uuid, p_lease bigint, p_step text, p_types text[])
returns uuid[]
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
declare
    size constant integer := coalesce(cardinality(p_types), 0);
    gathering penstock.job_groups;
    ids uuid[];
    taken integer[];
    place integer;
begin
    perform penstock.check_size(size, 10000, 'children');
    perform penstock.check_lists(array[array_dims(p_types)]);
    select job_group.* into gathering
    from penstock.queued_jobs as job
    left join penstock.leases as lease on lease.id = job.lease
    join penstock.job_steps as step on step.job = job.id and step.name = p_step and step.kind = 'gather'
    join penstock.job_groups as job_group on job_group.id = step.job_group
    where job.id = p_job and job.status = 'in-progress' and p_lease in (job.lease, lease.renews);
    if not found then
        return null;
    end if;
    ids := penstock.derived_ids(
        gathering.created_at, array(select format('child %s %s 0', gathering.id, nth) from generate_series(1, size) as nth order by nth)
    );
    for tries in 1 .. 10 loop
        -- A job of another type, or one that is no child of the step, is none of its children, whatever id it has.
        taken := array(
            select each.place::integer
            from unnest(ids, p_types) with ordinality as each (id, type, place)
            where (
                    select 1 from penstock.queued_jobs as job
                    where job.id = each.id and (job.workflow is distinct from gathering.id or job.name is distinct from each.type)
                ) is not null
                or (
                    select 1 from penstock.waiting_jobs as job
                    where job.id = each.id and (job.workflow is distinct from gathering.id or job.name is distinct from each.type)
                ) is not null
                or (
                    select 1 from penstock.archived_jobs as job
                    where job.id = each.id and (job.workflow is distinct from gathering.id or job.name is distinct from each.type)
                        and job.finished_at >= gathering.created_at - interval '1 day'
                    limit 1
                ) is not null
        );
        exit when cardinality(taken) = 0;
        foreach place in array taken loop
            ids[place] := (penstock.derived_ids(gathering.created_at, array[format('child %s %s %s', gathering.id, place, tries)]))[1];
        end loop;
    end loop;
    return ids;
end
$$;
comment on function penstock.child_ids(uuid, bigint, text, text[]) is
    'The ids of the children that a job gathers in a step, the same in each of its runs: derived ids, for who holds the job under this lease. p_types: the job type of each child. An id that another job has is passed over. Null: the job is not held under this lease, or does not gather in this step.';

create or replace function penstock.without_time()
returns timestamptz
language sql
immutable
as $$
    -- Not that of isolated jobs, which have an index of their own.
    select timestamptz '9998-01-01 00:00:00+00'
$$;
comment on function penstock.without_time() is 'The run_after of a suspended job that waits for something without a time.';

create or replace function penstock.resume_time(p_job uuid, p_name text, p_moment timestamptz)
returns timestamptz
language sql
stable
as $$
    select case
        when step.kind = 'wait' then case
            when (select 1 from penstock.job_signals as signal where signal.job = p_job and signal.name = p_name) is not null then p_moment
            -- The signal is in a transaction that goes on, see time_out_waits.
            when step.due <= p_moment then p_moment + interval '200 milliseconds'
            else coalesce(step.due, penstock.without_time())
        end
        when step.kind = 'gather' then case
            when (select 1 from penstock.job_groups as job_group where job_group.id = step.job_group and job_group.finished_at is null) is null
                then p_moment
            else penstock.without_time()
        end
        else step.due
    end
    from penstock.job_steps as step
    where step.job = p_job and step.name = p_name
$$;
comment on function penstock.resume_time(uuid, text, timestamptz) is
    'Part of settle and resume_jobs: when a job that is suspended for this step goes on: p_moment when what it waits for is there, the year 9998 when only a signal or the end of its children lets it go on. Null: there is no such step.';

create or replace function penstock.resume_jobs(p_ids uuid[], p_moment timestamptz, p_since timestamptz)
returns boolean
language plpgsql
as $$
declare
    locked uuid[];
    busy uuid[];
    of_type record;
begin
    locked := array(select job.id from penstock.queued_jobs as job where job.id = any (p_ids) for update skip locked);
    busy := array(select job.id from penstock.queued_jobs as job where job.id = any (p_ids) and job.id <> all (locked));
    for of_type in
        with resumed as (
            update penstock.queued_jobs as job
            set run_after = p_moment,
                seq = coalesce(job.seq, nextval('penstock.job_seq')),
                updated_at = p_moment
            where job.id = any (locked) and job.status = 'queued' and job.waits_for is not null and job.run_after > p_moment
                and coalesce(penstock.resume_time(job.id, job.waits_for, p_moment), p_moment) <= p_moment
            returning job.name, job.slot
        )
        select resumed.name, count(*)::integer as jobs, array_agg(resumed.slot) as slots from resumed group by resumed.name
    loop
        perform penstock.wake_claimers(of_type.name, of_type.jobs, of_type.slots);
    end loop;
    if cardinality(busy) = 0 then
        return true;
    end if;
    insert into penstock.workflow_ticks (resumed, noted_at) values (busy, p_since);
    return false;
end
$$;
comment on function penstock.resume_jobs(uuid[], timestamptz, timestamptz) is
    'Part of resolve_workflows: makes those of the jobs ready that are suspended and whose signal has come, or whose children have ended. Returns whether it was all; false: other transactions have locked some of them, and it wrote a tick for these, with p_since as its time.';

create or replace function penstock.stop_gathered(p_ids uuid[], p_moment timestamptz)
returns void
language sql
as $$
    select penstock.stop_group(job_group.id, p_moment)
    from penstock.job_groups as job_group
    where job_group.gathered_by = any (p_ids) and job_group.finished_at is null and job_group.cancelled_at is null
$$;
comment on function penstock.stop_gathered(uuid[], timestamptz) is
    'Part of archive_unsuccessful: cancels the children for which jobs waited that have ended.';
