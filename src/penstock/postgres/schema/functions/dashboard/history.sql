-- What the page of the history reads: the rollups of a lake over a period, folded to a bounded number of parts.

create or replace function penstock.history_of(p_lake text, p_since timestamptz, p_until timestamptz, p_names text[] default null, p_limit integer default 100)
returns table (
    name text, succeeded bigint, failed bigint, expired bigint, cancelled bigint, retries bigint, delay_s double precision, run_s double precision,
    delay_p95 double precision, run_p95 double precision, days bigint[]
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'job types');
    perform penstock.check_limit(p_limit, 1000);
    if p_since is null or p_until is null or p_until <= p_since or p_until > p_since + interval '31 days' then
        raise exception 'no period: % to %', coalesce(p_since::text, 'null'), coalesce(p_until::text, 'null')
            using errcode = 'PS400', hint = 'A period is at most 31 days.';
    end if;
    return query
    with parts as (
        select
            rollup.name,
            width_bucket(extract(epoch from rollup.minute), extract(epoch from p_since), extract(epoch from p_until), 24) as part,
            sum(rollup.succeeded)::bigint as succeeded, sum(rollup.failed)::bigint as failed, sum(rollup.expired)::bigint as expired,
            sum(rollup.cancelled)::bigint as cancelled, sum(rollup.retries)::bigint as retries, sum(rollup.delay_s) as delay_s,
            sum(rollup.run_s) as run_s, max(rollup.delay_p95) as delay_p95, max(rollup.run_p95) as run_p95
        from penstock.rollups as rollup
        where rollup.lake = p_lake and rollup.minute >= p_since and rollup.minute < p_until
            and (p_names is null or rollup.name = any (p_names))
        group by 1, 2
    )
    select
        parts.name, sum(parts.succeeded)::bigint, sum(parts.failed)::bigint, sum(parts.expired)::bigint, sum(parts.cancelled)::bigint,
        sum(parts.retries)::bigint, sum(parts.delay_s), sum(parts.run_s), max(parts.delay_p95), max(parts.run_p95),
        array(
            select coalesce(sum(other.succeeded + other.failed), 0)::bigint
            from generate_series(1, 24) as place (part)
            left join parts as other on other.name = parts.name and other.part = place.part
            group by place.part
            order by place.part
        )
    from parts
    group by parts.name
    order by sum(parts.run_s) desc nulls last, parts.name
    limit p_limit;
end
$$;
comment on function penstock.history_of(text, timestamptz, timestamptz, text[], integer) is
    'The finished jobs of a period by type, from the rollups of a lake: counts, sums of delays and run times, the worst minute of the 95th percentiles, and the jobs in each of 24 equal parts of the period (days). The types that ran longest first.';
