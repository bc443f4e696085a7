-- What a further run of a job reads of its durable steps, in parts of bounded size. The head of tables/0013_workflows.sql has the whole.

create or replace function penstock.kept_steps(p_ids uuid[], p_after_id uuid default null, p_after_name text default null)
returns table (id uuid, name text, kind text, result text, is_large boolean)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(cardinality(p_ids), 10000, 'jobs');
    select
        page.job, page.name, page.kind, case when not sized.is_large then page.result::text end, sized.is_large
    from (
        select *
        from penstock.job_steps as step
        where step.job = any (p_ids) and (p_after_id is null or (step.job, step.name) > (p_after_id, p_after_name))
        order by step.job, step.name
        limit 1000
    ) as page
    cross join lateral (
        -- The first says it without reading the value; a value that is compressed well is larger than it is stored.
        select case
            when page.result is null then false
            when pg_column_size(page.result) > 8192 then true
            else octet_length(page.result::text) > 8192
        end as is_large
    ) as sized
    order by page.job, page.name
$$;
comment on function penstock.kept_steps(uuid[], uuid, text) is
    'Up to 1,000 durable steps of jobs, by job and name; call it again with the last of them while it returns 1,000. result: what the step returned, as JSON text, up to 8 KiB; is_large: it is larger, and kept_results has it. So what one call returns is bounded.';

create or replace function penstock.kept_results(p_ids uuid[], p_names text[])
returns table (place integer, result text)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(greatest(cardinality(p_ids), cardinality(p_names)), 32, 'steps');
    select penstock.check_lists(array[array_dims(p_ids), array_dims(p_names)]);
    select given.place::integer, step.result::text
    from unnest(p_ids, p_names) with ordinality as given (id, name, place)
    join penstock.job_steps as step on step.job = given.id and step.name = given.name
    order by given.place
$$;
comment on function penstock.kept_results(uuid[], text[]) is
    'The results of up to 32 durable steps, one element of the arrays for each, as JSON text, each with its place. Null: the step has none yet. No row: there is no such step.';
