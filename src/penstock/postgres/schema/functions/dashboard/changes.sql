-- The audit of the dashboard. tables/0015_dashboard.sql says how a row lives.

create or replace function penstock.begin_change(p_user text, p_action text, p_filter jsonb)
returns bigint
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    change bigint;
begin
    perform penstock.check_json(p_filter, 'a filter', 65536);
    if p_user is null or p_action is null or p_filter is null then
        raise exception 'a change has a user, an action and a filter'
            using errcode = 'PS400', hint = 'For example ''ann'', ''pause'', ''{"name": "invoices"}''.';
    end if;
    insert into penstock.changes (at, user_name, action, filter)
    values (penstock.clock(), left(p_user, 200), left(p_action, 200), p_filter)
    returning id into change;
    return change;
end
$$;
comment on function penstock.begin_change(text, text, jsonb) is
    'Notes who is about to change what through the dashboard. Returns the number of the change, for end_change.';

create or replace function penstock.end_change(p_id bigint, p_changed bigint default null, p_error text default null)
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    update penstock.changes
    set ended_at = penstock.clock(), changed = p_changed, error = left(p_error, 1000)
    where id = p_id and ended_at is null
$$;
comment on function penstock.end_change(bigint, bigint, text) is
    'Notes what became of a change: how many objects it changed, or why it was refused.';

create or replace function penstock.list_changes(p_before bigint default null, p_limit integer default 100)
returns setof penstock.changes
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_limit(p_limit, 1000);
    return query
    select change.*
    from penstock.changes as change
    where p_before is null or change.id < p_before
    order by change.id desc
    limit p_limit;
end
$$;
comment on function penstock.list_changes(bigint, integer) is
    'The audit, latest first: changes with a number below p_before, at most p_limit.';
