-- Rates by minute: processes write what they counted; penstock top and the dashboard read it. See tables/0016_rates.sql.

create or replace function penstock.added(p_one double precision[], p_other double precision[])
returns double precision[]
language sql
immutable
as $$
    select array_agg(each.one + each.other order by each.place)
    from unnest(p_one, p_other) with ordinality as each (one, other, place)
$$;
comment on function penstock.added(double precision[], double precision[]) is 'Part of note_rates: the sum of two histograms.';

create or replace function penstock.check_rates(p_rates jsonb)
returns void
language plpgsql
immutable
as $$
declare
    wrong boolean;
begin
    perform penstock.check_json(p_rates, 'rates', 8388608);
    if jsonb_typeof(p_rates) is distinct from 'array' or jsonb_array_length(p_rates) > 1002 then
        raise exception 'rates are not an array of at most 1,002 objects'
            using errcode = 'PS400', hint = 'Give an object for each job type.';
    end if;
    begin
        select coalesce(bool_or(
            each.name is null or length(each.name) > 300
            or least(each.succeeded, each.failed, each.retried, each.others, each.wait_s, each.run_s, 0) < 0
            or num_nulls(each.succeeded, each.failed, each.retried, each.others, each.wait_s, each.run_s, each.waits, each.runs) > 0
            or cardinality(each.waits) <> 19 or cardinality(each.runs) <> 19
            or array_position(each.waits || each.runs, null) is not null or 0 > any (each.waits || each.runs)
        ), false) or count(*) <> count(distinct each.name)
        into wrong
        from jsonb_to_recordset(p_rates) as each (
            name text, succeeded bigint, failed bigint, retried bigint, others bigint, waits double precision[], runs double precision[],
            wait_s double precision, run_s double precision
        );
    exception
        when data_exception then
            wrong := true;
    end;
    if wrong then
        raise exception 'rates are not what a process counts'
            using errcode = 'PS400',
                  hint = 'Each object has name (once), succeeded, failed, retried, others, wait_s, run_s, and waits and runs with 19 numbers, none below 0.';
    end if;
end
$$;
comment on function penstock.check_rates(jsonb) is 'Part of note_rates: raises PS400 unless these can be rates.';

create or replace function penstock.note_rates(p_rates jsonb)
returns double precision
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    minute constant timestamptz := date_trunc('minute', moment);
    quarter constant timestamptz := minute - (extract(minute from minute)::integer % 15) * interval '1 minute';
    crowded constant boolean := (select count(*) >= 2000 from (select from penstock.rates where wide and at = quarter limit 2000) as counted);
    given record;
begin
    perform penstock.check_rates(p_rates);
    -- In one order in all processes, so that none waits for another one that waits for it.
    for given in
        select
            case
                when crowded and each.name <> ''
                    and not exists (select from penstock.rates as known where known.name = each.name and known.wide and known.at = quarter)
                    then 'others'
                else each.name
            end as kept_as,
            each.*, span.wide, span.at
        from jsonb_to_recordset(p_rates) as each (
            name text, succeeded bigint, failed bigint, retried bigint, others bigint, waits double precision[], runs double precision[],
            wait_s double precision, run_s double precision
        )
        cross join (values (false, minute), (true, quarter)) as span (wide, at)
        order by 1, span.wide
    loop
        insert into penstock.rates as kept (name, wide, at, succeeded, failed, retried, others, waits, runs, wait_s, run_s)
        values (
            given.kept_as, given.wide, given.at, given.succeeded, given.failed, given.retried, given.others, given.waits, given.runs,
            given.wait_s, given.run_s
        )
        on conflict on constraint rates_pkey do update
        set succeeded = kept.succeeded + excluded.succeeded,
            failed = kept.failed + excluded.failed,
            retried = kept.retried + excluded.retried,
            others = kept.others + excluded.others,
            waits = penstock.added(kept.waits, excluded.waits),
            runs = penstock.added(kept.runs, excluded.runs),
            wait_s = kept.wait_s + excluded.wait_s,
            run_s = kept.run_s + excluded.run_s;
    end loop;
    for given in select * from (values (false, interval '2 hours'), (true, interval '26 hours')) as span (wide, age) loop
        delete from penstock.rates
        where ctid = any (array(
            select old.ctid
            from penstock.rates as old
            where old.wide = given.wide and old.at < moment - given.age
            limit 5000
            for update skip locked
        ));
    end loop;
    return extract(epoch from clock_timestamp());
end
$$;
comment on function penstock.note_rates(jsonb) is
    'Adds what a process counted since its last call to the rates of the minute and of the quarter of an hour: an array of an object for each job type, and of one with the empty name for all together. Deletes old rates. Returns the time, in seconds since 1970. A call that is repeated counts twice.';

create or replace function penstock.summed_rates(p_names text[], p_wide boolean, p_after timestamptz, p_by_type boolean)
returns table (
    name text, at timestamptz, succeeded bigint, failed bigint, retried bigint, others bigint, waits double precision[],
    runs double precision[], wait_s double precision, run_s double precision
)
language sql
stable
as $$
    with chosen as materialized (
        select
            case when p_by_type then rate.name else '' end as name, case when p_by_type then p_after else rate.at end as at,
            rate.succeeded, rate.failed, rate.retried, rate.others, rate.waits, rate.runs, rate.wait_s, rate.run_s
        from penstock.rates as rate
        where rate.wide = p_wide and rate.at > p_after and rate.name <> '' and (p_names is null or rate.name = any (p_names))
    ),
    totals as (
        select
            chosen.name, chosen.at, sum(chosen.succeeded)::bigint as succeeded, sum(chosen.failed)::bigint as failed,
            sum(chosen.retried)::bigint as retried, sum(chosen.others)::bigint as others, sum(chosen.wait_s) as wait_s,
            sum(chosen.run_s) as run_s
        from chosen
        group by chosen.name, chosen.at
    ),
    histograms as (
        select part.name, part.at, array_agg(part.waits order by part.place) as waits, array_agg(part.runs order by part.place) as runs
        from (
            select chosen.name, chosen.at, bucket.place, sum(bucket.waits) as waits, sum(bucket.runs) as runs
            from chosen
            cross join unnest(chosen.waits, chosen.runs) with ordinality as bucket (waits, runs, place)
            group by chosen.name, chosen.at, bucket.place
        ) as part
        group by part.name, part.at
    )
    select
        totals.name, totals.at, totals.succeeded, totals.failed, totals.retried, totals.others, histograms.waits, histograms.runs,
        totals.wait_s, totals.run_s
    from totals
    join histograms on histograms.name = totals.name and histograms.at = totals.at
$$;
comment on function penstock.summed_rates(text[], boolean, timestamptz, boolean) is
    'Part of rates_of and type_rates: the rates of these job types (null: of all) after p_after, of minutes or of quarters of an hour (p_wide), added up for each type (p_by_type), or for each minute or quarter.';

create or replace function penstock.rates_of(p_names text[] default null, p_wide boolean default false)
returns table (
    at timestamptz, succeeded bigint, failed bigint, retried bigint, others bigint, waits double precision[], runs double precision[],
    wait_s double precision, run_s double precision
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    since constant timestamptz := penstock.clock() - case when p_wide then interval '24 hours' else interval '1 hour' end;
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'job types');
    if p_names is null then
        return query
        select rate.at, rate.succeeded, rate.failed, rate.retried, rate.others, rate.waits, rate.runs, rate.wait_s, rate.run_s
        from penstock.rates as rate
        where rate.name = '' and rate.wide = p_wide and rate.at > since
        order by rate.at;
        return;
    end if;
    return query
    select
        rate.at, rate.succeeded, rate.failed, rate.retried, rate.others, rate.waits, rate.runs, rate.wait_s, rate.run_s
    from penstock.summed_rates(p_names, p_wide, since, false) as rate
    order by rate.at;
end
$$;
comment on function penstock.rates_of(text[], boolean) is
    'The rates of these job types together (null: of all) by minute of the last hour, or by quarter of an hour of the last day (p_wide). A minute or quarter in which nothing ended has no row.';

create or replace function penstock.type_rates(p_names text[] default null, p_limit integer default 1000)
returns table (
    name text, succeeded bigint, failed bigint, retried bigint, others bigint, waits double precision[], runs double precision[],
    wait_s double precision, run_s double precision, since timestamptz
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment constant timestamptz := date_trunc('minute', penstock.clock());
    since constant timestamptz := moment - (extract(minute from moment)::integer % 15) * interval '1 minute' - interval '45 minutes';
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'job types');
    perform penstock.check_limit(p_limit, 10000);
    return query
    select
        rate.name, rate.succeeded, rate.failed, rate.retried, rate.others, rate.waits, rate.runs, rate.wait_s, rate.run_s, since
    from penstock.summed_rates(p_names, true, since - interval '15 minutes', true) as rate
    order by rate.succeeded + rate.failed + rate.retried + rate.others desc, rate.name
    limit p_limit;
end
$$;
comment on function penstock.type_rates(text[], integer) is
    'The rates of each job type (null: of all) since a quarter of an hour began 45 to 60 minutes ago (since), the busiest first.';
