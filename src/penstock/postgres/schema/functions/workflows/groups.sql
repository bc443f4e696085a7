-- Job groups: any number of children, and what follows when all of them have ended. The head of tables/0013_workflows.sql has the whole.

create or replace function penstock.require_group(p_id uuid)
returns penstock.job_groups
language plpgsql
stable
as $$
declare
    job_group penstock.job_groups;
begin
    select * into job_group from penstock.job_groups where id = p_id;
    if not found then
        raise exception 'no such job group: %', coalesce(p_id::text, 'null')
            using errcode = 'PS404', hint = 'Open it first: select penstock.open_group(''import'');';
    end if;
    return job_group;
end
$$;
comment on function penstock.require_group(uuid) is 'A job group. PS404 when there is none.';

create or replace function penstock.check_group_id(p_name text, p_group text)
returns void
language plpgsql
immutable
as $$
begin
    perform p_group::uuid;
exception
    when data_exception then
        raise exception 'invalid options of a job of %: group must be the id of a job group, not %', p_name, left(p_group, 100)
            using errcode = 'PS400', hint = 'An id is a UUID: that which penstock.open_group returned.';
end
$$;
comment on function penstock.check_group_id(text, text) is
    'Part of enqueue_many: raises PS400 for a group that is no UUID.';

create or replace function penstock.hold_group(p_id uuid, p_ids uuid[] default null)
returns boolean
language plpgsql
as $$
declare
    job_group penstock.job_groups;
    known uuid[];
begin
    -- A key share lock: it goes with the updates of the resolver and with the locks of others that enqueue, and not with the end.
    perform from penstock.job_groups where id = p_id and finished_at is null and cancelled_at is null for key share;
    if found then
        return true;
    end if;
    select * into job_group from penstock.job_groups where id = p_id;
    if not found then
        raise exception 'a job is to be a child of a job group that does not exist: %', p_id
            using errcode = 'PS400', hint = 'Open it first: select penstock.open_group(''import'');';
    end if;
    if p_ids is not null then
        -- An enqueue that is repeated adds nothing. In the order in which a job goes through the tables.
        known := array(select job.id from penstock.waiting_jobs as job where job.id = any (p_ids));
        known := known || array(select job.id from penstock.queued_jobs as job where job.id = any (p_ids));
        known := known || penstock.known_before(p_ids);
        if p_ids <@ known then
            return false;
        end if;
    end if;
    raise exception 'job group % takes no more children', job_group.name
        using errcode = 'PS409',
              hint = case when job_group.finished_at is null then 'It is being cancelled.' else 'It has ended. Enqueue children before it is sealed, or from its children.' end;
end
$$;
comment on function penstock.hold_group(uuid, uuid[]) is
    'Part of enqueue_many and open_group: the group does not end before this transaction has. False: it has ended or is cancelled, and all of these jobs (null: none) are known, so that nothing is to be added. PS409 when it has ended or is cancelled otherwise, PS400 when there is none.';

create or replace function penstock.check_group_name(p_what text, p_name text, p_example text)
returns void
language plpgsql
immutable
as $$
begin
    if p_name is null or not penstock.is_key(p_name) or p_name like '%/%' then
        raise exception 'invalid %: %', p_what, coalesce(quote_literal(left(p_name, 100)), 'null')
            using errcode = 'PS400',
                  hint = format('It has 1 to 255 characters, no slash and no control characters, such as %s.', p_example);
    end if;
    if p_name ~* '^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}($|[.])' then
        raise exception 'invalid %: %, which is an id, or begins with one', p_what, quote_literal(left(p_name, 100))
            using errcode = 'PS400',
                  hint = format('Groups are found by their ids too, and those of job.gather are named <id of the job>.<step>. Take a name such as %s.', p_example);
    end if;
end
$$;
comment on function penstock.check_group_name(text, text, text) is
    'Part of open_group, start_workflow and retry_workflow: raises PS400 for a name that may not be used, also one that could be an id of a group, the name of a step of a run (it has a slash) or that of a step of a job (it begins with an id and a dot).';

create or replace function penstock.open_group(
    p_name text,
    p_then text default null,
    p_then_data jsonb default '{}',
    p_on_failure text default 'cancel',
    p_parent uuid default null,
    p_then_key text default null
)
returns uuid
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    new_id constant uuid := penstock.new_id();
    then_id constant uuid := case when p_then is not null then penstock.new_id() end;
    there penstock.job_groups;
    there_data jsonb;
    there_key text;
    other text;
begin
    perform penstock.check_group_name('name of a job group', p_name, 'import-2026-11-22');
    if p_on_failure is null or p_on_failure not in ('cancel', 'continue') then
        raise exception 'on_failure must be cancel or continue, not %', coalesce(left(p_on_failure, 100), 'null')
            using errcode = 'PS400', hint = 'cancel: the first child that fails cancels the others; continue: they go on.';
    end if;
    if p_parent is not null then
        perform penstock.require_group(p_parent);
    end if;
    insert into penstock.job_groups (id, name, parent, created_at, changed_at, on_failure, then_job, then_name)
    values (new_id, p_name, p_parent, moment, moment, p_on_failure, then_id, p_then)
    on conflict (name) do nothing;
    if not found then
        select * into there from penstock.job_groups where name = p_name;
        select job.data, job.key into there_data, there_key from penstock.waiting_jobs as job where job.id = there.then_job;
        other := case
            when there.parent is distinct from p_parent then 'parent'
            when there.on_failure <> p_on_failure then 'on_failure'
            when there.then_name is distinct from p_then then 'then'
            -- Encrypted payloads differ each time, and one that has been released cannot change any more.
            when p_then is not null and there_data <> p_then_data and not penstock.is_envelope(there_data) then 'then_data'
            when there_data is not null and there_key is distinct from p_then_key then 'then_key'
        end;
        if other is not null then
            raise exception 'job group % was opened with another %', p_name, other
                using errcode = 'PS409', hint = 'Give each group a name of its own, such as import-2026-11-22; open it again with the same options.';
        end if;
        return there.id;
    end if;
    if p_parent is not null then
        perform penstock.hold_group(p_parent);
        insert into penstock.workflow_ticks (workflow, added) values (p_parent, 1);
    end if;
    if p_then is not null then
        perform from penstock.enqueue_many(
            p_then, array[p_then_data], array[then_id], case when p_then_key is not null then array[p_then_key] end,
            p_options => array[jsonb_strip_nulls(jsonb_build_object(
                'after', array[new_id], 'when', case when p_on_failure = 'continue' then 'finished' end, 'group', p_parent
            ))]
        );
    end if;
    return new_id;
end
$$;
comment on function penstock.open_group(text, text, jsonb, text, uuid, text) is
    'Opens a job group, or returns the one that has this name. p_then: the type of a job that runs once when the group is sealed and all its children have ended, with the payload p_then_data and the key p_then_key, which a pool needs. p_on_failure: cancel (the first child that fails cancels the others, and that job), or continue. p_parent: the group of which this one is a child. Enqueue children with p_group, then call seal_group. PS409 when it was opened with other options.';

create or replace function penstock.seal_group(p_id uuid)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.require_group(p_id);
    update penstock.job_groups set sealed_at = penstock.clock() where id = p_id and sealed_at is null;
    if found then
        -- Without children: it brings the group to a pass, which ends it when nothing is left.
        insert into penstock.workflow_ticks (workflow) values (p_id);
        perform penstock.tell_all('workflows', '');
    end if;
end
$$;
comment on function penstock.seal_group(uuid) is
    'Says that no more children of a job group come, apart from those that its children enqueue: it ends with the last of them. Idempotent. PS404 when there is none.';

create or replace function penstock.stop_group(p_id uuid, p_moment timestamptz, p_since timestamptz default null)
returns boolean
language plpgsql
as $$
declare
    parts uuid[];
    free uuid[];
begin
    parts := array(
        with recursive parts as (
            select p_id as id
            union
            select job_group.id
            from parts
            join penstock.job_groups as job_group on job_group.parent = parts.id
        )
        select job_group.id
        from parts
        join penstock.job_groups as job_group on job_group.id = parts.id
        where job_group.finished_at is null
    );
    free := array(
        select job_group.id from penstock.job_groups as job_group where job_group.id = any (parts) order by job_group.id for no key update skip locked
    );
    with stopped as (
        update penstock.job_groups as job_group
        set cancelled_at = p_moment, sealed_at = coalesce(job_group.sealed_at, p_moment)
        where job_group.id = any (free) and job_group.finished_at is null and job_group.cancelled_at is null
        returning job_group.id
    )
    insert into penstock.operations (id, kind, filter, started_at, updated_at)
    select penstock.new_id(), 'cancel', jsonb_build_object('workflow', stopped.id), p_moment, p_moment from stopped;
    if found then
        -- They are sealed, and may have no children to be cancelled.
        insert into penstock.workflow_ticks (workflow) select unnest(free);
        perform penstock.tell_all('workflows', '');
    end if;
    if free @> parts then
        return true;
    end if;
    -- It is done again when the others can be locked.
    insert into penstock.workflow_ticks (workflow, noted_at) values (p_id, coalesce(p_since, clock_timestamp()));
    return false;
end
$$;
comment on function penstock.stop_group(uuid, timestamptz, timestamptz) is
    'Part of cancel_group and resolve_workflows: seals a group and the groups in it, and starts operations that cancel their children. Returns whether it was all; false: other transactions have locked some of these groups, and it wrote a tick for them. p_since: since when that waits; null: now.';

create or replace function penstock.reason_of_group(p_id uuid)
returns text
language sql
stable
as $$
    select 'group' from penstock.job_groups as job_group where job_group.id = p_id and job_group.cancelled_at is not null
$$;
comment on function penstock.reason_of_group(uuid) is
    'Part of what cancels jobs: the reason group when they are children of a group that failed or was cancelled; null: they were cancelled otherwise.';

create or replace function penstock.cancel_group(p_id uuid)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    job_group penstock.job_groups;
begin
    perform penstock.require_group(p_id);
    select * into job_group from penstock.job_groups where id = p_id for no key update;
    if job_group.finished_at is not null or job_group.cancelled_at is not null then
        return;
    end if;
    perform penstock.stop_group(p_id, moment);
    if exists (select from penstock.waiting_jobs where id = job_group.then_job for update) then
        perform penstock.ensure_archive(moment);
        perform penstock.end_waiting(array[job_group.then_job], 'cancelled', array['group'], null, moment);
    end if;
end
$$;
comment on function penstock.cancel_group(uuid) is
    'Cancels a job group: its children, in batches by an operation, the groups in it, and its then, all with the reason group. It ends when its children have ended. One that has ended stays as it is. PS404 when there is none.';

create or replace function penstock.group_list(
    p_limit integer default 50, p_open boolean default false, p_id uuid default null, p_name text default null
)
returns table (
    id uuid, name text, parent uuid, created_at timestamptz, sealed_at timestamptz, cancelled_at timestamptz, finished_at timestamptz,
    status text, on_failure text, then_job uuid, added bigint, succeeded bigint, failed bigint, cancelled bigint, expired bigint,
    changed_at timestamptz
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_limit(p_limit, 1000);
    return query
    select
        job_group.id, job_group.name, job_group.parent, job_group.created_at, job_group.sealed_at, job_group.cancelled_at,
        job_group.finished_at, coalesce(job_group.status::text, case when job_group.sealed_at is null then 'open' else 'running' end),
        job_group.on_failure, job_group.then_job, job_group.added + ticks.added, job_group.succeeded + ticks.succeeded,
        job_group.failed + ticks.failed, job_group.cancelled + ticks.cancelled, job_group.expired + ticks.expired, job_group.changed_at
    from (
        select *
        from penstock.job_groups as wanted
        where (p_id is null or wanted.id = p_id)
            and (p_name is null or wanted.name = p_name)
            and (not p_open or wanted.finished_at is null)
        order by wanted.created_at desc, wanted.id desc
        limit p_limit
    ) as job_group
    cross join lateral (
        select
            coalesce(sum(tick.added), 0)::bigint as added, coalesce(sum(tick.succeeded), 0)::bigint as succeeded,
            coalesce(sum(tick.failed), 0)::bigint as failed, coalesce(sum(tick.cancelled), 0)::bigint as cancelled,
            coalesce(sum(tick.expired), 0)::bigint as expired
        from penstock.workflow_ticks as tick
        where tick.workflow = job_group.id
    ) as ticks
    order by job_group.created_at desc, job_group.id desc;
end
$$;
comment on function penstock.group_list(integer, boolean, uuid, text) is
    'Job groups, latest first, with the numbers of their children, also of those whose ticks are not folded yet. status: open (not sealed), running, or how it ended. p_open: only those that have not ended.';

create or replace function penstock.group_of(p_id uuid)
returns uuid
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select coalesce(
        (select job_group.id from penstock.job_groups as job_group where job_group.then_job = p_id limit 1),
        (select job.workflow from penstock.waiting_jobs as job where job.id = p_id),
        (select job.workflow from penstock.queued_jobs as job where job.id = p_id),
        (select job.workflow from penstock.archived_jobs as job where job.id = p_id order by job.finished_at desc limit 1)
    )
$$;
comment on function penstock.group_of(uuid) is
    'The job group of a job: of the `then` of a group that group; of a child the group in which it is, to which it can add further children while it runs; null: none. The `then` of a group that is in another one is a child of that: see parent in group_list.';
