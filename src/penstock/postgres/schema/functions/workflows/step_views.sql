-- Durable steps as people see them, page by page. The head of tables/0013_workflows.sql has the whole.

create or replace function penstock.steps_shown(
    p_id uuid, p_results bigint default null, p_after text default null, p_limit integer default 1000
)
returns table (
    name text, kind text, state text, at timestamptz, due timestamptz, job_group uuid, size integer, value text, signalled_at timestamptz,
    cursor text
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    -- Microseconds since 1970, name and kind: a signal for which the job does not wait may have the name of a step.
    after constant text[] := regexp_match(p_after, '^(-?[0-9]{1,17}):(step|sleep|wait|gather|signal):(.+)$');
    after_at constant timestamptz := timestamptz 'epoch' + after[1]::double precision * interval '1 microsecond';
begin
    perform penstock.check_limit(p_limit, 100000);
    if p_after is not null and after is null then
        raise exception 'invalid cursor: %', left(p_after, 300)
            using errcode = 'PS400', hint = 'Give the cursor of the last step of the page before.';
    end if;
    return query
    with heads as (
        select
            coalesce(step.name, signal.name) as name, coalesce(step.kind, 'signal') as kind, coalesce(step.at, signal.at) as at, step.due,
            step.job_group, signal.at as signalled_at
        from (select * from penstock.job_steps as step where step.job = p_id) as step
        full join (select * from penstock.job_signals as signal where signal.job = p_id) as signal
            on signal.name = step.name and step.kind = 'wait'
    ),
    -- Values are read of the page alone.
    page as materialized (
        select *
        from heads
        where after is null or (heads.at, heads.name, heads.kind) > (after_at, after[3], after[2])
        order by heads.at, heads.name, heads.kind
        limit p_limit
    ),
    given as materialized (
        select
            page.*, step.result is not null as has_result, signal.value is not null as has_signal,
            coalesce(step.result::text, signal.value::text) as value
        from page
        left join penstock.job_steps as step on step.job = p_id and step.name = page.name and page.kind <> 'signal'
        left join penstock.job_signals as signal on signal.job = p_id and signal.name = page.name and page.kind in ('wait', 'signal')
    ),
    suspended as (
        select job.waits_for as name from penstock.queued_jobs as job where job.id = p_id and penstock.is_suspended(job)
    ),
    measured as (
        select
            given.*, octet_length(given.value) as size,
            sum(octet_length(given.value)) over (order by octet_length(given.value), given.at, given.name, given.kind) as total
        from given
    )
    select
        step.name, step.kind,
        case
            when step.kind = 'signal' then 'early'
            when step.name = (select suspended.name from suspended) then 'waiting'
            when step.kind = 'wait' and step.signalled_at is null then 'begun'
            when step.kind = 'wait' and not step.has_signal then 'timed-out'
            when step.kind = 'sleep' and step.due > penstock.clock() then 'begun'
            when step.kind = 'gather' and not step.has_result
                and (select 1 from penstock.job_groups as job_group where job_group.id = step.job_group and job_group.finished_at is null) is not null
                then 'begun'
            else 'done'
        end,
        step.at, step.due, step.job_group, step.size, case when p_results is null or step.total <= p_results then step.value end, step.signalled_at,
        (extract(epoch from step.at) * 1000000)::bigint || ':' || step.kind || ':' || step.name
    from measured as step
    order by step.at, step.name, step.kind;
end
$$;
comment on function penstock.steps_shown(uuid, bigint, text, integer) is
    'The durable steps of a job as people see them, in their order, and signals for which it does not wait yet: up to p_limit, which follow the one with the cursor p_after. state: done; waiting (the job is suspended for this step); begun (the step has not ended, and the job is not suspended for it); timed-out; early (a signal for which the job does not wait yet). size: bytes of value, the result or the signal as JSON text. p_results: how many bytes of values it returns; the smallest come first, and the others are null. Null: all.';
