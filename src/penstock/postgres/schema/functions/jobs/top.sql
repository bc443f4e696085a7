-- What fills the queue: the job types, or the keys, with most ready jobs, the oldest ones, or most finished ones.
--
-- Neither a count of everything nor an index that every claim would have to write. The work of the function has the same bound for any
-- number of jobs, types and keys, and for any number of pages and dead rows that an earlier backlog has left:
--
-- * A table of at most 2,000 pages (16 MiB) is read as a whole.
-- * Of a larger one the indexes are read first, up to 50,000 jobs that are ready or running, and up to 50,000 deferred ones. If there are
--   no more, they are counted exactly, however many empty pages the table has. Dead rows stay in the indexes until vacuum has removed
--   them, so this is left out while PostgreSQL knows of more than a million (a transaction that stays open may hold vacuum back).
-- * If there are more, they are counted on a random sample of 2,000 pages.
--
-- Of the jobs that finished, the last 10,000 are counted.

create or replace function penstock.first_placed(p_names text[], p_most integer)
returns table (name text, key text, status penstock.job_status, since timestamptz)
language plpgsql
stable
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
begin
    if p_names is null then
        return query
        select placed.*
        from (
            (
                select job.name, job.key, job.status, greatest(job.run_after, job.created_at)
                from penstock.queued_jobs as job
                where job.seq is not null and job.slot is null
                order by job.name, job.priority, job.seq
                limit p_most
            )
            union all
            (
                select job.name, job.key, job.status, greatest(job.run_after, job.created_at)
                from penstock.queued_jobs as job
                where job.seq is not null and job.slot is not null
                order by job.name, job.slot, job.key collate "C", job.seq
                limit p_most
            )
        ) as placed
        limit p_most;
    else
        return query
        select placed.*
        from (select distinct asked.name from unnest(p_names) as asked (name)) as type
        cross join lateral (
            (
                select job.name, job.key, job.status, greatest(job.run_after, job.created_at)
                from penstock.queued_jobs as job
                where job.name = type.name and job.seq is not null and job.slot is null
                order by job.priority, job.seq
                limit p_most
            )
            union all
            (
                select job.name, job.key, job.status, greatest(job.run_after, job.created_at)
                from penstock.queued_jobs as job
                where job.name = type.name and job.seq is not null and job.slot is not null
                order by job.slot, job.key collate "C", job.seq
                limit p_most
            )
        ) as placed
        limit p_most;
    end if;
end
$$;
comment on function penstock.first_placed(text[], integer) is
    'Part of top: at most so many (p_most) of the jobs that have a place in the order, ready or running, of these types (null: of all), by the indexes.';

create or replace function penstock.first_deferred(p_names text[], p_most integer)
returns table (name text, key text, status penstock.job_status)
language plpgsql
stable
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
begin
    if p_names is null then
        return query
        select job.name, job.key, job.status
        from penstock.queued_jobs as job
        where job.seq is null
        order by job.name, job.key collate "C", job.id
        limit p_most;
    else
        return query
        select job.name, job.key, job.status
        from (select distinct asked.name from unnest(p_names) as asked (name)) as type
        cross join lateral (
            select deferred.name, deferred.key, deferred.status
            from penstock.queued_jobs as deferred
            where deferred.name = type.name and deferred.seq is null
            order by deferred.key collate "C", deferred.id
            limit p_most
        ) as job
        limit p_most;
    end if;
end
$$;
comment on function penstock.first_deferred(text[], integer) is
    'Part of top: at most so many (p_most) of the jobs that have no place in the order, since they wait for their time, of these types (null: of all), by the index.';

create or replace function penstock.last_finished(p_most integer)
returns table (name text, key text, finished_at timestamptz)
language plpgsql
stable
set search_path = penstock, pg_temp
as $$
begin
    return query
    select job.name, job.key, job.finished_at
    from penstock.archived_jobs as job
    order by job.xid desc
    limit p_most;
end
$$;
comment on function penstock.last_finished(integer) is 'Part of top: the last so many (p_most) jobs that were archived, by the index.';

-- Long, since its one statement joins the jobs that wait and those that finished, and counts both in the same way.
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
    most_jobs constant integer := 50000;
    most_dead constant integer := 1000000;
    share double precision;
    by_index boolean;
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'names');
    perform penstock.check_limit(p_limit, 10000);
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
    by_index := share < 1 and pg_stat_get_dead_tuples('penstock.queued_jobs'::regclass) <= most_dead;
    return query
    with placed as materialized (
        select job.* from penstock.first_placed(p_names, most_jobs + 1) as job where by_index
    ),
    deferred as materialized (
        select job.* from penstock.first_deferred(p_names, most_jobs + 1) as job where by_index
    ),
    counted as materialized (
        select
            by_index and (select count(*) from placed) <= most_jobs as placed,
            by_index and (select count(*) from deferred) <= most_jobs as deferred
    ),
    -- Each job that was looked at stands for so many (weight).
    looked as (
        select placed.name, placed.key, placed.status, true as placed, placed.since, 1::double precision as weight
        from placed
        where (select placed from counted)
        union all
        select deferred.name, deferred.key, deferred.status, false, null, 1
        from deferred
        where (select deferred from counted)
        union all
        select job.name, job.key, job.status, job.seq is not null, greatest(job.run_after, job.created_at), 1 / share
        from penstock.queued_jobs as job tablesample system (100 * share)
        where not ((select placed from counted) and (select deferred from counted))
            and not case when job.seq is null then (select deferred from counted) else (select placed from counted) end
            and (p_names is null or job.name = any (p_names))
    ),
    waiting as (
        select
            job.name,
            case when p_by = 'keys' then job.key end as key,
            coalesce(sum(job.weight) filter (where job.status = 'queued' and job.placed), 0) as ready,
            coalesce(sum(job.weight) filter (where job.status = 'queued' and not job.placed), 0) as deferred,
            coalesce(sum(job.weight) filter (where job.status = 'in-progress'), 0) as in_progress,
            min(job.since) filter (where job.status = 'queued' and job.placed) as oldest
        from looked as job
        where p_by = 'types' or job.key is not null
        group by 1, 2
    ),
    ended as (
        select latest.name, case when p_by = 'keys' then latest.key end as key, count(*) as finished
        from penstock.last_finished(10000) as latest
        where (p_by = 'types' or latest.key is not null)
            and (p_names is null or latest.name = any (p_names))
            and latest.finished_at > penstock.clock() - interval '1 hour'
        group by 1, 2
    ),
    numbers as (
        select
            coalesce(waiting.name, ended.name) as name,
            coalesce(waiting.key, ended.key) as key,
            round(coalesce(waiting.ready, 0))::bigint as ready,
            round(coalesce(waiting.deferred, 0))::bigint as deferred,
            round(coalesce(waiting.in_progress, 0))::bigint as in_progress,
            extract(epoch from penstock.clock() - waiting.oldest)::double precision as oldest_ready_s,
            coalesce(ended.finished, 0) as finished
        from waiting
        full join ended on ended.name = waiting.name and coalesce(ended.key, '') = coalesce(waiting.key, '')
    )
    select
        numbers.name, numbers.key, numbers.ready, numbers.deferred, numbers.in_progress, numbers.oldest_ready_s, numbers.finished,
        case when (select placed from counted) then 1 else share end
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
    'What fills the queue: the types or the keys (p_by) with most ready jobs, the oldest ready job, or most finished jobs (p_order: ready, oldest, busy), of these types only (p_names; null: of all). Bounded work: it counts up to 50,000 ready and running jobs exactly, and as many deferred ones; of more it looks at about 2,000 random pages of the queue. looked_at: the share of the ready and running jobs that it looked at; 1: all, and their numbers are exact; below, they are estimates and the age is that of the oldest job looked at. finished: of the last 10,000 finished jobs those of the last hour.';
