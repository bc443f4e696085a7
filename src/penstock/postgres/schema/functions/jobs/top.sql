-- What fills the queue: the job types, or the keys, with most ready jobs, the oldest ones, or most finished ones.
--
-- Neither a count of everything nor an index that every claim would have to write: the function looks at a random sample of at most
-- about 2,000 pages of the queue (16 MiB), and at the last 10,000 jobs that finished. Its work is thus the same for any number of jobs,
-- types and keys. A queue that is not larger is looked at as a whole, and the numbers are exact.

-- Long, since its one statement joins the sample of the queue and the jobs that finished, and counts both in the same way.
create or replace function penstock.top(
    p_by text,
    p_order text default 'ready',
    p_names text[] default null,
    p_limit integer default 20
)
returns table (
    name text,
    key text,
    ready bigint,
    deferred bigint,
    in_progress bigint,
    oldest_ready_s double precision,
    finished bigint,
    looked_at double precision
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    most_pages constant integer := 2000;
    share double precision;
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'names');
    perform penstock.check_limit(p_limit, 1000);
    if p_by is null or p_by not in ('types', 'keys') then
        raise exception 'unknown kind: %', coalesce(left(p_by, 100), 'null')
            using errcode = 'PS400', hint = 'The top is that of types or keys.';
    end if;
    if p_order is null or p_order not in ('ready', 'oldest', 'busy') then
        raise exception 'unknown order: %', coalesce(left(p_order, 100), 'null')
            using errcode = 'PS400', hint = 'An order is ready, oldest or busy.';
    end if;
    share := least(
        1,
        most_pages * current_setting('block_size')::double precision
            / greatest(pg_relation_size('penstock.queued_jobs'), 1)
    );
    return query
    with waiting as (
        select
            job.name,
            case when p_by = 'keys' then job.key end as key,
            count(*) filter (where job.status = 'queued' and job.seq is not null) as ready,
            count(*) filter (where job.status = 'queued' and job.seq is null) as deferred,
            count(*) filter (where job.status = 'in-progress') as in_progress,
            min(greatest(job.run_after, job.created_at)) filter (where job.status = 'queued' and job.seq is not null) as oldest
        from penstock.queued_jobs as job tablesample system (100 * share)
        where (p_by = 'types' or job.key is not null) and (p_names is null or job.name = any (p_names))
        group by 1, 2
    ),
    ended as (
        select latest.name, case when p_by = 'keys' then latest.key end as key, count(*) as finished
        from (
            select job.name, job.key, job.finished_at
            from penstock.archived_jobs as job
            order by job.xid desc
            limit 10000
        ) as latest
        where (p_by = 'types' or latest.key is not null)
            and (p_names is null or latest.name = any (p_names))
            and latest.finished_at > penstock.clock() - interval '1 hour'
        group by 1, 2
    ),
    numbers as (
        select
            coalesce(waiting.name, ended.name) as name,
            coalesce(waiting.key, ended.key) as key,
            round(coalesce(waiting.ready, 0) / share)::bigint as ready,
            round(coalesce(waiting.deferred, 0) / share)::bigint as deferred,
            round(coalesce(waiting.in_progress, 0) / share)::bigint as in_progress,
            extract(epoch from penstock.clock() - waiting.oldest)::double precision as oldest_ready_s,
            coalesce(ended.finished, 0) as finished
        from waiting
        full join ended on ended.name = waiting.name and coalesce(ended.key, '') = coalesce(waiting.key, '')
    )
    select
        numbers.name, numbers.key, numbers.ready, numbers.deferred, numbers.in_progress, numbers.oldest_ready_s, numbers.finished, share
    from numbers
    order by
        case p_order when 'ready' then numbers.ready when 'oldest' then numbers.oldest_ready_s else numbers.finished end desc nulls last,
        numbers.ready desc,
        numbers.name,
        numbers.key
    limit p_limit;
end
$$;
comment on function penstock.top(text, text, text[], integer) is
    'What fills the queue: the types or the keys (p_by) with most ready jobs, the oldest ready job, or most finished jobs (p_order: ready, oldest, busy), of these types only (p_names; null: of all). Bounded work: it looks at about 2,000 random pages of the queue at most. looked_at: the share of the queue that it looked at; 1: all, and the numbers are exact; below, the counts are estimates and the age is that of the oldest job looked at. finished: of the last 10,000 finished jobs those of the last hour.';
