-- Failures by cause: the signature that a failure got when it was settled (penstock.signature_of) is a column of the archive.
--
-- A look is bounded: it goes along the partial index of what did not succeed, newest first, and counts by columns alone. The errors of the
-- newest of each group, and its first time, come from the index of the signatures.

-- Long, since one statement counts what it looks at and adds to each group what the index of the signatures knows of it.
create or replace function penstock.failure_groups(
    p_names text[] default null, p_since timestamptz default null, p_limit integer default 100
)
returns table (
    name text, signature text, failures bigint, first_at timestamptz, last_at timestamptz, trend bigint[], type text, message text,
    reason text, versions text[], examples uuid[], looked bigint, until timestamptz
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    most constant integer := 20000;
    places constant integer := 24;
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'job types');
    perform penstock.check_limit(p_limit, 1000);
    return query
    with ended as materialized (
        -- All types: see the head of search.sql.
        select job.name, job.signature, job.finished_at, job.status
        from penstock.archived_jobs as job
        where job.status <> 'succeeded' and (p_since is null or job.finished_at >= p_since)
        order by job.finished_at desc, job.id desc
        limit most
    ),
    failed as materialized (
        select ended.name, ended.signature, ended.finished_at
        from ended
        where ended.status = 'failed' and ended.signature is not null and (p_names is null or ended.name = any (p_names))
    ),
    looked as materialized (
        select
            count(*) as failures,
            extract(epoch from min(failed.finished_at)) as since,
            extract(epoch from max(failed.finished_at)) as last,
            (select min(ended.finished_at) from ended having count(*) = most) as until
        from failed
    ),
    parted as (
        select
            failed.name, failed.signature,
            case when looked.last > looked.since
                then least(floor((extract(epoch from failed.finished_at) - looked.since) / (looked.last - looked.since) * places), places - 1)
                else places - 1
            end::integer as part,
            count(*) as failures, max(failed.finished_at) as last_at
        from failed
        cross join looked
        group by 1, 2, 3
    ),
    grouped as materialized (
        select
            parted.name, parted.signature, sum(parted.failures)::bigint as failures, max(parted.last_at) as last_at,
            array_agg(parted.part) as parts, array_agg(parted.failures) as counts
        from parted
        group by parted.name, parted.signature
        order by sum(parted.failures) desc, parted.name, parted.signature
        limit p_limit
    )
    select
        grouped.name, grouped.signature, grouped.failures, first.at, grouped.last_at,
        (
            select array_agg(coalesce(grouped.counts[array_position(grouped.parts, place)], 0) order by place)
            from generate_series(0, places - 1) as place
        ),
        newest.type, newest.message, newest.reason, newest.versions, newest.examples, looked.failures, looked.until
    from grouped
    cross join looked
    cross join lateral (
        select job.finished_at as at
        from penstock.archived_jobs as job
        where job.name = grouped.name and job.signature = grouped.signature
        order by job.finished_at
        limit 1
    ) as first
    cross join lateral (
        select
            (array_agg(left(one.error ->> 'type', 200) order by one.place))[1] as type,
            (array_agg(left(one.error ->> 'message', 500) order by one.place))[1] as message,
            (array_agg(one.reason order by one.place))[1] as reason,
            array_agg(distinct left(one.error ->> 'version', 100)) filter (where one.error ? 'version') as versions,
            (array_agg(one.id order by one.place))[1:3] as examples
        from (
            select job.id, job.reason, job.errors -> -1 as error, row_number() over (order by job.finished_at desc) as place
            from penstock.archived_jobs as job
            where job.name = grouped.name and job.signature = grouped.signature
            order by job.finished_at desc
            limit 20
        ) as one
    ) as newest
    order by grouped.failures desc, grouped.name, grouped.signature;
end
$$;
comment on function penstock.failure_groups(text[], timestamptz, integer) is
    'The failures of each type by the signature of the last error, most first, of these types only (null: of all), not before p_since, of the 20,000 jobs that did not succeed last. first_at is that of the first one which the archive still has; trend: their numbers in 24 equal parts of the time looked at; type, message, reason, versions (of the code, as far as the errors say) and examples are those of the newest ones. looked: how many failures were looked at, until: how far back; null: all.';
