-- Retries of runs of graphs: a new run, which shares what succeeded. The head of tables/0013_workflows.sql has the whole.

create or replace function penstock.require_run(p_id uuid)
returns penstock.job_groups
language plpgsql
stable
as $$
declare
    run penstock.job_groups;
begin
    select * into run from penstock.job_groups where id = p_id;
    if not found then
        raise exception 'no such run of a workflow: %', coalesce(p_id::text, 'null')
            using errcode = 'PS404', hint = 'See: penstock workflows list';
    end if;
    if run.graph is null then
        raise exception '% is a job group, and no run of a workflow', run.name
            using errcode = 'PS409', hint = 'The children of a job group that failed can be replayed: penstock jobs replay.';
    end if;
    return run;
end
$$;
comment on function penstock.require_run(uuid) is 'A run of a workflow. PS404 when there is none, PS409 when it is a job group that is no run.';

create or replace function penstock.steps_to_retry(p_id uuid, p_from text)
returns integer[]
language plpgsql
stable
as $$
declare
    behind integer[] := '{}';
begin
    if p_from is not null then
        behind := array(
            with recursive behind as (
                select step.place from penstock.graph_steps as step where step.run = p_id and step.name = p_from
                union
                select step.place
                from behind
                join penstock.graph_steps as step on step.run = p_id and behind.place = any (step.after)
            )
            select place from behind
        );
        if cardinality(behind) = 0 then
            raise exception 'the run has no step %', left(p_from, 100)
                using errcode = 'PS400', hint = 'See its steps: select name, status from penstock.workflow_steps(id);';
        end if;
    end if;
    return array(
        select step.place
        from penstock.workflow_steps(p_id) as step
        where step.place = any (behind) or step.status <> 'succeeded'
        order by step.place
    );
end
$$;
comment on function penstock.steps_to_retry(uuid, text) is
    'Part of retry_workflow: the steps of a run that did not succeed, and those from p_from on. PS400 when there is no such step.';

create or replace function penstock.job_to_retry(job penstock.archived_jobs)
returns jsonb
language sql
stable
as $$
    select jsonb_build_object('data', job.data, 'priority', job.priority)
        || jsonb_strip_nulls(jsonb_build_object(
            'key', job.key, 'time_limit', job.options -> 'time_limit', 'max_attempts', job.options -> 'max_attempts'
        ))
$$;
comment on function penstock.job_to_retry(penstock.archived_jobs) is
    'Part of retry_workflow: a job as it is enqueued again. It starts when the steps before it let it, and does not expire.';

create or replace function penstock.jobs_to_retry(p_run uuid, p_place integer, p_all boolean)
returns jsonb
language sql
stable
as $$
    -- The group of the step, and behind it those of the runs before from which it carries jobs, of which the ones that succeeded count.
    with recursive parts as (
        select step.job, step.carried, run.retry_of, run.created_at, true as latest
        from penstock.graph_steps as step
        join penstock.job_groups as run on run.id = step.run
        where step.run = p_run and step.place = p_place
        union
        select step.job, step.carried, run.retry_of, run.created_at, step.job = parts.job and parts.latest
        from parts
        join penstock.graph_steps as step on step.run = parts.retry_of and step.place = p_place
        join penstock.job_groups as run on run.id = step.run
        where parts.carried > 0 or step.job = parts.job
    ),
    wanted as (
        select parts.job, bool_or(parts.latest) as latest, min(parts.created_at) as since
        from parts
        where parts.latest or p_all
        group by parts.job
    ),
    found as (
        select coalesce(jsonb_agg(penstock.job_to_retry(archived) order by archived.created_at, archived.id), '[]') as jobs
        from wanted
        join penstock.archived_jobs as archived on archived.workflow = wanted.job and archived.finished_at >= wanted.since
        where case when not wanted.latest then archived.status = 'succeeded' else p_all or archived.status <> 'succeeded' end
    )
    -- Null when some are not there any more.
    select found.jobs
    from found
    join penstock.graph_steps as step on step.run = p_run and step.place = p_place
    join penstock.job_groups as job_group on job_group.id = step.job
    where jsonb_array_length(found.jobs) = case
        when p_all then step.carried + job_group.added
        else job_group.added - job_group.succeeded
    end
$$;
comment on function penstock.jobs_to_retry(uuid, integer, boolean) is
    'Part of retry_workflow: the jobs of a step that is a job group as they are enqueued again: all, or those that did not succeed. Null when some are not in the archive any more.';

-- Long, since the steps of the new run, with what each of them shares or runs again, are one document.
create or replace function penstock.retry_workflow(p_id uuid, p_from text default null, p_run text default null)
returns uuid
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    before penstock.job_groups := penstock.require_run(p_id);
    run penstock.job_groups;
    again integer[];
    steps jsonb;
    wrong record;
begin
    if p_run is not null then
        perform penstock.check_group_name('id of a retry of run ' || before.name, p_run, before.name || '-again');
    end if;
    -- Two retries at the same time are one.
    perform from penstock.job_groups where id = p_id for no key update;
    select * into run from penstock.job_groups where retry_of = p_id;
    if found then
        if run.retried_from is not distinct from p_from and run.name = coalesce(p_run, run.name) then
            return run.id;
        end if;
        raise exception 'run % was retried already, as %', before.name, run.name
            using errcode = 'PS409', hint = 'Retry that run: it has the latest result of each step.';
    end if;
    select * into before from penstock.job_groups where id = p_id;
    if before.finished_at is null then
        raise exception 'run % has not ended', before.name
            using errcode = 'PS409', hint = 'Wait for its end, or cancel it first: select penstock.cancel_group(id);';
    end if;
    again := penstock.steps_to_retry(p_id, p_from);
    if cardinality(again) = 0 then
        raise exception 'each step of run % succeeded', before.name
            using errcode = 'PS409', hint = 'Say from which step on it is to run again: p_from, from_step=, --from.';
    end if;
    select jsonb_agg(
        jsonb_strip_nulls(jsonb_build_object(
            'name', step.name, 'type', step.type, 'when', case when step.at_any_end then 'finished' end,
            'after', (
                select jsonb_agg(other.name order by other.place)
                from penstock.graph_steps as other
                where other.run = p_id and other.place = any (step.after)
            ),
            'job', case when step.place <> all (again) then step.job end,
            'parts', case when step.place <> all (again) then step.jobs end,
            'carried', case
                when step.jobs is null then null
                when step.place <> all (again) then step.carried
                when step.status <> 'succeeded' and p_from is null then step.carried + step.succeeded
            end
        ))
        || case
            when step.place <> all (again) then '{}'
            when step.jobs is null then coalesce(
                (
                    select penstock.job_to_retry(archived)
                    from penstock.archived_jobs as archived
                    where archived.id = step.job and (select 1 from penstock.quarantined_payloads as kept where kept.id = archived.id) is null
                    order by archived.finished_at desc
                    limit 1
                ),
                '{"lost": true}'
            )
            -- Unless it is said from where: of a step that did not succeed, the jobs that did not.
            else coalesce(
                jsonb_build_object('jobs', penstock.jobs_to_retry(p_id, step.place, step.status = 'succeeded' or p_from is not null)),
                '{"lost": true}'
            )
        end
        order by step.place
    )
    into steps
    from penstock.workflow_steps(p_id) as step;
    select step ->> 'name' as name into wrong from jsonb_array_elements(steps) as step where step ? 'lost' or step -> 'jobs' = 'null' limit 1;
    if found then
        raise exception 'step % of run % cannot be retried: its payload cannot be read, or is not in the archive any more', wrong.name, before.name
            using errcode = 'PS409', hint = 'Start a new run.';
    end if;
    insert into penstock.job_groups (id, name, graph, created_at, changed_at, sealed_at, on_failure, retry_of, retried_from)
    values (
        penstock.new_id(),
        coalesce(p_run, regexp_replace(before.name, '~[0-9]+$', '') || '~' || coalesce(substring(before.name from '~([0-9]{1,6})$')::integer, 1) + 1),
        before.graph, moment, moment, moment, before.on_failure, p_id, p_from
    )
    on conflict (name) do nothing
    returning * into run;
    if run.id is null then
        raise exception 'the id of the retry of run % is in use', before.name
            using errcode = 'PS409', hint = 'Give the retry an id of its own: p_run, id=, --id.';
    end if;
    perform penstock.add_steps(run, steps);
    return run.id;
end
$$;
comment on function penstock.retry_workflow(uuid, text, text) is
    'Retries a run that has ended, as a new run with the id p_run (default: that of the run with ~2, ~3, ...): the steps that did not succeed run again, and with p_from that step and all behind it. The others are shared, with their results. Called again it returns the same run. PS404 when there is no such run, PS400 for an unknown step, PS409 when it has not ended, was retried otherwise, or has nothing to be retried.';
