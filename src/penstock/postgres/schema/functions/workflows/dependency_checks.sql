-- Checks of dependencies: what a job may wait for, and that no jobs wait for each other.

create or replace function penstock.checked_after(p_name text, p_options jsonb)
returns jsonb
language plpgsql
immutable
as $$
declare
    most constant integer := 100;
    after uuid[];
    problem text;
    advice text := 'For example: {"after": ["018f4e9c-7b1a-7000-8000-000000000000"], "when": "finished"}.';
begin
    if coalesce(p_options ->> 'when', 'succeeded') not in ('succeeded', 'finished') then
        problem := format('when must be succeeded or finished, not %s', left(p_options ->> 'when', 100));
    elsif coalesce(p_options -> 'after', 'null') = 'null' then
        if p_options ->> 'when' is not null then
            problem := 'when is given without after';
        end if;
    elsif jsonb_typeof(p_options -> 'after') <> 'array' or jsonb_array_length(p_options -> 'after') = 0 then
        problem := format('after must be an array of ids of jobs, not %s', left((p_options -> 'after')::text, 100));
    elsif jsonb_array_length(p_options -> 'after') > most then
        problem := format('a job waits for at most %s jobs, not %s', most, jsonb_array_length(p_options -> 'after'));
        advice := 'Wait for a job that waits for them, in several steps.';
    elsif coalesce(p_options -> 'unique_for', 'null') <> 'null' then
        problem := 'unique_for and after exclude each other';
        advice := 'Give a unique key without a period: the job holds it while it waits and while it is queued.';
    else
        begin
            after := array(
                select distinct replace(given.id, 'job_', '')::uuid
                from jsonb_array_elements_text(p_options -> 'after') as given (id)
                order by 1
            );
            if array_position(after, null) is not null then
                problem := 'after has a null among its ids';
            end if;
        exception
            when data_exception then
                problem := format('after must be an array of ids of jobs, not %s', left((p_options -> 'after')::text, 100));
        end;
    end if;
    if problem is not null then
        raise exception 'invalid options of a job of %: %', p_name, problem
            using errcode = 'PS400', hint = advice;
    end if;
    return (p_options - array['after', 'when'])
        || case when after is not null then jsonb_build_object('after', to_jsonb(after)) else '{}' end
        || case when p_options ->> 'when' = 'finished' then '{"when": "finished"}'::jsonb else '{}' end;
end
$$;
comment on function penstock.checked_after(text, jsonb) is
    'Part of enqueue_many: the options of a job with those that say for which jobs it waits as they are stored. Raises PS400.';

create or replace function penstock.check_dependencies(p_name text, p_ids uuid[], p_options jsonb[])
returns void
language plpgsql
as $$
declare
    unknown record;
    places jsonb;
begin
    -- In this order, each in a statement of its own: a job goes from the first table to the second and then to the third.
    with wanted as (
        select given.place, after.id::uuid as id, p_ids[given.place] as job
        from unnest(p_options) with ordinality as given (options, place)
        cross join lateral jsonb_array_elements_text(given.options -> 'after') as after (id)
    )
    select array_agg(wanted.id) as ids, array_agg(wanted.place) as places into unknown
    from wanted
    where (select 1 from penstock.waiting_jobs as job where job.id = wanted.id) is null
        and (select 1 from penstock.job_groups as job_group where job_group.id = wanted.id) is null;
    select array_agg(wanted.id) as ids, array_agg(wanted.place) as places into unknown
    from unnest(unknown.ids, unknown.places) as wanted (id, place)
    where (select 1 from penstock.queued_jobs as job where job.id = wanted.id) is null;
    if unknown.ids is null then
        return;
    end if;
    -- The first place of each id of the call, in a document that finds it without a walk.
    places := (select jsonb_object_agg(given.id, given.place order by given.place desc) from unnest(p_ids) with ordinality as given (id, place));
    select wanted.id, wanted.place, (places ->> wanted.id::text)::bigint as here into unknown
    from unnest(unknown.ids, unknown.places) as wanted (id, place)
    -- A job of the same call, before it in the call, is known.
    where coalesce((places ->> wanted.id::text)::bigint >= wanted.place, true)
        and (select 1 from penstock.archived_jobs as job where job.id = wanted.id limit 1) is null
    order by wanted.place
    limit 1;
    if unknown.here = unknown.place then
        raise exception 'job % of % is to wait for itself', unknown.id, p_name
            using errcode = 'PS400', hint = 'A job waits for other jobs.';
    elsif unknown.here is not null then
        raise exception 'job % of % is to wait for job %, which comes behind it in the same call', p_ids[unknown.place], p_name, unknown.id
            using errcode = 'PS400', hint = 'Give a job behind those for which it waits. Jobs that wait for each other would never start.';
    elsif unknown.id is not null then
        raise exception 'job % of % is to wait for a job that does not exist: %', p_ids[unknown.place], p_name, unknown.id
            using errcode = 'PS400',
                  hint = 'Enqueue that job first, in the same transaction or in one that has committed. A job whose day was pruned from the archive is unknown too.';
    end if;
end
$$;
comment on function penstock.check_dependencies(text, uuid[], jsonb[]) is
    'Part of enqueue_many: raises PS400 for a job that is to wait for a job which does not exist, for itself, or for a later one of the same call.';

create or replace function penstock.check_cycles(p_name text, p_ids uuid[], p_workflow uuid)
returns void
language plpgsql
as $$
declare
    cycle record;
begin
    -- What waits for the group: jobs after it, the groups of these jobs, the groups around each group, and so on. Usually these are few.
    with recursive waits as (
        select p_workflow as id
        union
        select next.id
        from waits
        cross join lateral (
            select dependency.job as id from penstock.job_dependencies as dependency where dependency.after = waits.id
            union all
            select job.workflow from penstock.waiting_jobs as job where job.id = waits.id and job.workflow is not null
            union all
            select job_group.parent from penstock.job_groups as job_group where job_group.id = waits.id and job_group.parent is not null
        ) as next
    )
    select dependency.job, dependency.after, job_group.name as group_name into cycle
    from penstock.job_dependencies as dependency
    join penstock.job_groups as job_group on job_group.id = p_workflow
    where dependency.job = any (p_ids) and dependency.after in (select waits.id from waits)
    order by dependency.id
    limit 1;
    if found then
        raise exception 'job % of % is to be a child of job group %, and to wait for %, which waits for this group or is the group', cycle.job, p_name, cycle.group_name, cycle.after
            using errcode = 'PS400', hint = 'A group ends when its children have ended: enqueue the job outside of the group, or without that one in after.';
    end if;
end
$$;
comment on function penstock.check_cycles(text, uuid[], uuid) is
    'Part of enqueue_many: raises PS400 when one of these new waiting jobs, children of a job group, waits for something that waits for this group.';
