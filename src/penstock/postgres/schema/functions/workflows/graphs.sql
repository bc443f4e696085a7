-- Graphs: runs of named steps, and how they start. The head of tables/0013_workflows.sql has the whole.

create or replace function penstock.step_options()
returns text[]
language sql
immutable
parallel safe
as $$
    select array['data', 'key', 'priority', 'run_after', 'expires_at', 'max_attempts', 'time_limit', 'traceparent']
$$;
comment on function penstock.step_options() is 'The fields of a step that belong to its job, or to each of its jobs.';

-- Long, since it has an error of its own for each way in which a step can be wrong.
create or replace function penstock.check_steps(p_steps jsonb)
returns void
language plpgsql
immutable
as $$
declare
    most constant integer := 10000;
    most_after constant integer := 100;
    wrong record;
begin
    perform penstock.check_documents(
        p_steps, array['name', 'type', 'after', 'when', 'jobs'] || penstock.step_options(), 'step',
        '{"name": "publish", "type": "publish", "after": ["extract"], "data": {"day": "2026-11-22"}}'
    );
    if jsonb_array_length(p_steps) not between 1 and most then
        raise exception 'a run has 1 to % steps, not %', most, jsonb_array_length(p_steps)
            using errcode = 'PS400', hint = 'Many jobs of one type are one step: give it jobs, an array.';
    end if;
    select given.place, coalesce(given.step ->> 'name', 'number ' || given.place) as name, problem into wrong
    from jsonb_array_elements(p_steps) with ordinality as given (step, place)
    cross join lateral (
        select case
            when jsonb_typeof(given.step -> 'name') is distinct from 'string' or not penstock.is_key(given.step ->> 'name')
                or given.step ->> 'name' like '%/%'
                then 'it needs a name of 1 to 255 characters, without slashes and control characters'
            when jsonb_typeof(given.step -> 'type') is distinct from 'string' then 'it needs a type, the name of a job type'
            when coalesce(jsonb_typeof(given.step -> 'after'), 'null') not in ('null', 'array') then 'after is an array of the names of steps'
            when jsonb_typeof(given.step -> 'after') = 'array' and jsonb_array_length(given.step -> 'after') > most_after
                then format('it waits for %s steps, and at most %s are possible', jsonb_array_length(given.step -> 'after'), most_after)
            when coalesce(given.step ->> 'when', 'succeeded') not in ('succeeded', 'finished') then 'when is succeeded or finished'
            when given.step ->> 'when' is not null and coalesce(jsonb_typeof(given.step -> 'after'), 'null') = 'null'
                then 'when is given without after'
            when coalesce(jsonb_typeof(given.step -> 'jobs'), 'null') not in ('null', 'array') then 'jobs is an array of objects with data'
            when jsonb_typeof(given.step -> 'jobs') = 'array' and given.step ?| penstock.step_options()
                then 'it has jobs, whose data and options stand in these'
            when jsonb_typeof(given.step -> 'jobs') = 'array' and jsonb_array_length(given.step -> 'jobs') > 100000
                then 'it has more than 100,000 jobs'
        end as problem
    ) as checked
    where checked.problem is not null
    order by given.place
    limit 1;
    if found then
        raise exception 'invalid step %: %', left(wrong.name, 100), wrong.problem
            using errcode = 'PS400',
                  hint = 'For example {"name": "publish", "type": "publish", "after": ["extract"], "when": "finished", "data": {}}. What is to run after more than 100 jobs waits for one step that has these as jobs.';
    end if;
    select given.step ->> 'name' as name into wrong
    from jsonb_array_elements(p_steps) as given (step)
    group by 1
    having count(*) > 1
    limit 1;
    if found then
        raise exception 'two steps have the name %', left(wrong.name, 100)
            using errcode = 'PS400', hint = 'Give each step of a graph a name of its own.';
    end if;
    select given.step ->> 'name' as name, wanted.name as after, other.place, given.place = other.place as itself into wrong
    from jsonb_array_elements(p_steps) with ordinality as given (step, place)
    cross join lateral jsonb_array_elements_text(coalesce(nullif(given.step -> 'after', 'null'), '[]')) as wanted (name)
    left join jsonb_array_elements(p_steps) with ordinality as other (step, place) on other.step ->> 'name' = wanted.name
    where other.place is null or other.place >= given.place
    order by given.place
    limit 1;
    if found then
        raise exception 'step % is to run after %', left(wrong.name, 100),
            case
                when wrong.place is null then format('%s, which is no step of this graph', coalesce(left(wrong.after, 100), 'null'))
                when wrong.itself then 'itself'
                else format('step %s, which comes behind it', left(wrong.after, 100))
            end
            using errcode = 'PS400',
                  hint = 'Give a step behind those after which it runs. Steps that wait for each other would never start.';
    end if;
    perform penstock.check_documents(given.step -> 'jobs', penstock.step_options(), 'job of a step', '{"data": {"part": 1}}')
    from jsonb_array_elements(p_steps) as given (step)
    where jsonb_typeof(given.step -> 'jobs') = 'array';
end
$$;
comment on function penstock.check_steps(jsonb) is
    'Part of start_workflow: raises PS400 unless these are steps with names of their own, each behind those for which it waits, so that there is no cycle.';

-- Long, since what a step waits for, and when it can be enqueued, follow from the steps before it in one pass.
create or replace function penstock.add_steps(p_run penstock.job_groups, p_steps jsonb)
returns void
language plpgsql
as $$
declare
    size constant integer := jsonb_array_length(p_steps);
    -- By the place of each step: how many steps are before it on the longest way; for what it waits; and for what those behind it wait.
    levels integer[] := array_fill(0, array[size]);
    waits jsonb[] := array_fill('[]'::jsonb, array[size]);
    ends jsonb[] := array_fill('[]'::jsonb, array[size]);
    one record;
    batch record;
begin
    for one in
        with given as materialized (
            select each.place::integer as place, each.document, each.document ->> 'name' as name
            from jsonb_array_elements(p_steps) with ordinality as each (document, place)
        ),
        edges as (
            select given.place, array_agg(distinct other.place order by other.place) as after
            from given
            cross join lateral jsonb_array_elements_text(coalesce(nullif(given.document -> 'after', 'null'), '[]')) as wanted (name)
            join given as other on other.name = wanted.name
            group by given.place
        )
        select
            given.place, given.name, given.document ->> 'type' as type, coalesce(edges.after, '{}') as after,
            coalesce((given.document ->> 'job')::uuid, penstock.new_id()) as job, given.document ? 'job' as shared,
            case
                when given.document ? 'parts' then (given.document ->> 'parts')::integer
                when jsonb_typeof(given.document -> 'jobs') = 'array' then jsonb_array_length(given.document -> 'jobs')
            end as jobs,
            coalesce((given.document ->> 'carried')::integer, 0) as carried,
            coalesce(given.document ->> 'when' = 'finished', false) as at_any_end
        from given
        left join edges on edges.place = given.place
        order by given.place
    loop
        insert into penstock.graph_steps (run, job, place, jobs, carried, at_any_end, shared, name, type, after)
        values (
            p_run.id, one.job, one.place, one.jobs + case when one.shared then 0 else one.carried end, one.carried, one.at_any_end,
            one.shared, one.name, one.type, one.after
        );
        levels[one.place] := 1 + coalesce((select max(levels[place]) from unnest(one.after) as place), 0);
        waits[one.place] := (
            select coalesce(jsonb_agg(distinct id), '[]')
            from unnest(one.after) as place
            cross join lateral jsonb_array_elements(ends[place]) as id
        );
        -- What succeeded in an earlier run is not waited for. A group without jobs ends at once: what comes behind it waits for what is
        -- before it.
        ends[one.place] := case
            when one.jobs = 0 then waits[one.place]
            when one.shared then '[]'
            else jsonb_build_array(one.job)
        end;
    end loop;
    insert into penstock.job_groups (id, name, parent, created_at, changed_at, sealed_at, on_failure)
    select step.job, p_run.name || '/' || step.name, p_run.id, p_run.created_at, p_run.created_at, p_run.created_at, p_run.on_failure
    from penstock.graph_steps as step
    where step.run = p_run.id and step.jobs is not null and not step.shared;
    insert into penstock.workflow_ticks (workflow, added)
    select p_run.id, count(*)
    from penstock.graph_steps as step
    where step.run = p_run.id and step.jobs is not null and not step.shared
    having count(*) > 0;
    -- As a seal does: a group without jobs ends in the next pass.
    insert into penstock.workflow_ticks (workflow)
    select step.job from penstock.graph_steps as step where step.run = p_run.id and step.jobs = step.carried and not step.shared;
    if found then
        perform penstock.tell_all('workflows', '');
    end if;
    -- A job can wait only for what is there: level by level.
    for batch in
        select
            levels[step.place] as level, step.type,
            jsonb_agg(
                job.document
                || case
                    when waits[step.place] = '[]' then '{}'
                    else jsonb_build_object('after', waits[step.place])
                        || case when step.at_any_end then '{"when": "finished"}'::jsonb else '{}' end
                end
                || case
                    when step.jobs is null then jsonb_build_object('id', step.job, 'group', p_run.id)
                    else jsonb_build_object('group', step.job)
                end
                order by step.place, job.place
            ) as jobs
        from penstock.graph_steps as step
        join jsonb_array_elements(p_steps) with ordinality as given (document, place) on given.place = step.place
        cross join lateral jsonb_array_elements(
            case
                when step.jobs is null then jsonb_build_array(given.document - array['name', 'type', 'after', 'when', 'jobs', 'carried'])
                else given.document -> 'jobs'
            end
        ) with ordinality as job (document, place)
        where step.run = p_run.id and not step.shared
        group by levels[step.place], step.type, case when step.jobs is not null then step.job end
        order by 1, min(step.place)
    loop
        perform penstock.enqueue_json(batch.type, batch.jobs);
    end loop;
end
$$;
comment on function penstock.add_steps(penstock.job_groups, jsonb) is
    'Part of start_workflow and retry_workflow: enqueues the steps of a new run. A step that has a job is shared with an earlier run, and is not run again.';

create or replace function penstock.start_workflow(p_name text, p_run text, p_steps jsonb, p_on_failure text default 'continue')
returns uuid
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    run penstock.job_groups;
begin
    if p_name is null or not penstock.is_key(p_name) or p_name like '%/%' then
        raise exception 'invalid name of a workflow: %', coalesce(quote_literal(left(p_name, 100)), 'null')
            using errcode = 'PS400', hint = 'A name has 1 to 255 characters, no slash and no control characters.';
    end if;
    perform penstock.check_group_name('id of a run of ' || p_name, p_run, 'nightly-2026-11-22');
    if p_on_failure is null or p_on_failure not in ('cancel', 'continue') then
        raise exception 'on_failure must be cancel or continue, not %', coalesce(left(p_on_failure, 100), 'null')
            using errcode = 'PS400', hint = 'cancel: the first step that fails cancels the others; continue: steps that do not need it go on.';
    end if;
    perform penstock.check_steps(p_steps);
    insert into penstock.job_groups (id, name, graph, created_at, changed_at, sealed_at, on_failure)
    values (penstock.new_id(), p_run, p_name, moment, moment, moment, p_on_failure)
    on conflict (name) do nothing
    returning * into run;
    if run.id is null then
        select * into run from penstock.job_groups where name = p_run;
        if run.graph is distinct from p_name then
            raise exception '% is %, and no run of %', p_run, coalesce('a run of ' || run.graph, 'a job group'), p_name
                using errcode = 'PS409', hint = 'Give each run an id of its own, such as nightly-2026-11-22.';
        end if;
        if run.retry_of is not null then
            raise exception '% is a retry of another run of %', p_run, p_name
                using errcode = 'PS409', hint = 'Retries get the id of their run with ~2, ~3 and so on: start a run with another id.';
        end if;
        return run.id;
    end if;
    perform penstock.add_steps(run, p_steps);
    return run.id;
end
$$;
comment on function penstock.start_workflow(text, text, jsonb, text) is
    'Starts a run of a workflow, or returns the one that has this id, p_run. p_steps: an array of {name, type, after, when, data, key, priority, run_after, expires_at, max_attempts, time_limit}, each step behind those after which it runs, which are given by name; a step with jobs, an array of {data, key, ...}, is a job group. A payload can have {"$result": "name of a step"} where it wants the result of a step before. p_on_failure: continue (steps that do not need the one that failed go on) or cancel. PS400 for a cycle or an unknown step, PS409 when the id is in use for something else.';
