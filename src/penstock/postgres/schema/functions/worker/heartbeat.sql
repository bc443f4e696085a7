-- The heartbeat of a process: its worker and its memberships in one call, made beside its event loop.

create or replace function penstock.keep_alive(
    p_worker text,
    p_groups text[],
    p_members text[],
    p_sessions uuid[],
    p_blocked_s double precision default null,
    p_blocked_by text default null,
    out worker_known boolean,
    out dead_after_s double precision[]
)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
begin
    perform penstock.check_size(
        greatest(cardinality(p_groups), cardinality(p_members), cardinality(p_sessions)),
        100000, 'members'
    );
    if p_worker is not null then
        update penstock.workers
        set seen_at = moment,
            blocked_since = moment - p_blocked_s * interval '1 second',
            blocked_by = left(p_blocked_by, 200)
        where id = p_worker and state <> 'dead';
        worker_known := found;
    end if;
    -- Always in one order, so that two calls do not deadlock.
    with kept as (
        update penstock.members
        set seen_at = moment
        from (
            select present.group_name, present.id
            from unnest(p_groups, p_members, p_sessions) as given (group_name, id, session)
            join penstock.members as present
                on present.group_name = given.group_name and present.id = given.id and present.session = given.session
            order by present.group_name, present.id
            for update of present skip locked
        ) as locked
        where members.group_name = locked.group_name and members.id = locked.id
        returning members.group_name, members.id, members.dead_after
    )
    select array_agg(extract(epoch from kept.dead_after)::double precision order by given.place)
    into dead_after_s
    from unnest(p_groups, p_members) with ordinality as given (group_name, id, place)
    left join kept on kept.group_name = given.group_name and kept.id = given.id;
end
$$;
comment on function penstock.keep_alive(text, text[], text[], uuid[], double precision, text) is
    'Keeps a worker (null: none) and memberships alive, each by group, member and session. worker_known: false when it was declared dead. dead_after_s: for each membership, in order, the silence after which others may evict it; null when it was evicted, or is locked at this moment. p_blocked_s: for how long the event loop of the process has made no progress, and p_blocked_by what blocks it.';
