-- Durable steps as people see them. The head of tables/0013_workflows.sql has the whole.

create or replace function penstock.steps_shown(p_id uuid, p_results bigint default null)
returns table (
    name text, kind text, state text, at timestamptz, due timestamptz, job_group uuid, size integer, value text, signalled_at timestamptz
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    with given as (
        select step.*, coalesce(step.result, step.signal) as value, octet_length(coalesce(step.result, step.signal)) as size
        from penstock.steps_of(array[p_id]) as step
    ),
    suspended as (
        select job.waits_for as name from penstock.queued_jobs as job where job.id = p_id and penstock.is_suspended(job)
    ),
    measured as (
        select given.*, sum(given.size) over (order by given.size, given.at, given.name) as total from given
    )
    select
        step.name, step.kind,
        case
            when step.kind = 'signal' then 'early'
            when step.name = (select suspended.name from suspended) then 'waiting'
            when step.kind = 'wait' and step.signalled_at is null then 'begun'
            when step.kind = 'wait' and step.signal is null then 'timed-out'
            when step.kind = 'sleep' and step.due > penstock.clock() then 'begun'
            when step.kind = 'gather' and step.result is null
                and (select 1 from penstock.job_groups as job_group where job_group.id = step.job_group and job_group.finished_at is null) is not null
                then 'begun'
            else 'done'
        end,
        step.at, step.due, step.job_group, step.size, case when p_results is null or step.total <= p_results then step.value end, step.signalled_at
    from measured as step
    order by step.at, step.name
$$;
comment on function penstock.steps_shown(uuid, bigint) is
    'The durable steps of a job as people see them, in their order, and signals for which it does not wait yet. state: done; waiting (the job is suspended for this step); begun (the step has not ended, and the job is not suspended for it); timed-out; early (a signal for which the job does not wait yet). size: bytes of value, the result or the signal as JSON text. p_results: how many bytes of values it returns; the smallest come first, and the others are null. Null: all.';
