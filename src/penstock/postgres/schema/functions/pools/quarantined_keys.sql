-- Quarantined keys: keys for which the assign of their pool fails. tables/0004_groups.sql says what happens to them.

create or replace function penstock.quarantine_keys(p_group text, p_slots integer[], p_errors text[])
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    quarantined integer;
begin
    perform penstock.check_size(greatest(cardinality(p_slots), cardinality(p_errors)), 1000000, 'slots');
    perform penstock.lock_group(p_group);
    if coalesce(cardinality(p_slots), 0) <> coalesce(cardinality(p_errors), 0) then
        raise exception 'the arrays differ in length'
            using errcode = 'PS400', hint = 'Give one error for each slot.';
    end if;
    update penstock.slots
    set error = null, failed_at = null
    where group_name = p_group and error is not null and slot <> all (coalesce(p_slots, '{}'));
    update penstock.slots
    set error = left(given.error, 1000), failed_at = penstock.clock()
    from unnest(p_slots, p_errors) as given (slot, error)
    where slots.group_name = p_group and slots.slot = given.slot;
    get diagnostics quarantined = row_count;
    return quarantined;
end
$$;
comment on function penstock.quarantine_keys(text, integer[], text[]) is
    'Notes for which slots the rule of the application failed, in the transaction that sets the targets; all other slots of the group are free of errors. Returns how many.';

create or replace function penstock.release_keys(p_name text, p_key text default null, p_after interval default '0')
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    released integer;
    member text;
begin
    perform penstock.check_span(p_after, 'time since a key was quarantined', '0', '3660 days');
    perform penstock.require_pool(p_name);
    update penstock.slots
    set placed = false,
        failed_at = penstock.clock()
    where group_name = p_name
        and error is not null
        and (p_key is null or key = p_key)
        and failed_at <= penstock.clock() - p_after;
    get diagnostics released = row_count;
    if released = 0 and p_key is not null then
        raise exception 'key % of pool % is not quarantined', left(p_key, 100), p_name
            using errcode = 'PS404', hint = format('List those that are: penstock pools keys %s --quarantined, or select * from penstock.quarantined_keys(%L);', p_name, p_name);
    end if;
    if released > 0 then
        -- A worker has to place the keys; two are notified, since one may have crashed.
        for member in select id from penstock.members where group_name = p_name order by age limit 2 loop
            perform penstock.tell_member(p_name, member);
        end loop;
    end if;
    return released;
end
$$;
comment on function penstock.release_keys(text, text, interval) is
    'Has the rule of a pool asked again about a quarantined key (null: about all) that failed p_after ago or longer. Members call it at intervals; where the rule fails again the key stays quarantined. Returns how many. PS404 when that key is not quarantined.';

create or replace function penstock.quarantined_keys(p_name text, p_after text default null, p_limit integer default 100, p_key text default null)
returns table (key text, slot integer, error text, failed_at timestamptz, jobs bigint)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
begin
    perform penstock.require_pool(p_name);
    perform penstock.check_limit(p_limit, 1000);
    return query
    select
        bad.key, bad.slot, bad.error, bad.failed_at,
        (
            select count(*)
            from (
                select from penstock.queued_jobs as job
                where job.name = p_name and job.slot = bad.slot and job.seq is not null
                limit 10000
            ) as waiting
        )
    from penstock.slots as bad
    where bad.group_name = p_name
        and bad.error is not null
        and (p_after is null or bad.key > p_after)
        and (p_key is null or bad.key = p_key)
    order by bad.key
    limit p_limit;
end
$$;
comment on function penstock.quarantined_keys(text, text, integer, text) is
    'Keys for which the rule of the pool fails, by key, from p_after on, or the one of p_key: why, since when, and how many jobs wait (at most 10,000 are counted).';

create or replace function penstock.quarantined_counts()
returns table (name text, keys bigint)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select pools.name, (select count(*) from penstock.slots where slots.group_name = pools.name and slots.error is not null)
    from penstock.pools
    order by pools.name
$$;
comment on function penstock.quarantined_counts() is 'The number of quarantined keys of every pool.';
