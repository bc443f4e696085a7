-- Heartbeats: that of a process, its worker and its memberships in one call, made beside its event loop; and when a worker or a member
-- that sends none is dead.

create or replace function penstock.check_sender(p_what text, p_id text, p_dead_after interval)
returns void
language plpgsql
stable
as $$
begin
    if p_id is null or p_id !~ '^(?![.]{1,2}$)[A-Za-z0-9_.-]{1,50}$' then
        raise exception 'invalid % id: %', p_what, coalesce(quote_literal(left(p_id, 100)), 'null')
            using errcode = 'PS400', hint = 'An id has 1 to 50 letters, digits, ".", "-" or "_".';
    end if;
    if p_dead_after is null or p_dead_after not between interval '1 second' and interval '1 day' then
        raise exception 'invalid dead_after: %', coalesce(p_dead_after::text, 'null')
            using errcode = 'PS400', hint = 'Use 1 second to 1 day, and heartbeat at least twice in that time.';
    end if;
end
$$;
comment on function penstock.check_sender(text, text, interval) is
    'Raises PS400 unless this can be the id of what sends heartbeats (p_what: worker or member), and the silence after which it is dead.';

create or replace function penstock.is_to_be_suspected(p_seen_at timestamptz, p_dead_after interval, p_suspected_at timestamptz, p_moment timestamptz)
returns boolean
language sql
stable
as $$
    -- A suspicion from before the last heartbeat is void, and so is one from before the server started: it silenced them all.
    select p_seen_at + p_dead_after * 0.6 < p_moment
        and (p_suspected_at is null or p_suspected_at <= p_seen_at or p_suspected_at < pg_postmaster_start_time())
$$;
comment on function penstock.is_to_be_suspected(timestamptz, interval, timestamptz, timestamptz) is
    'Part of recover and evict: whether a worker or member has been silent for so long that this has to be noted. One check never suffices to take a process for dead: see the head of tables/0003_workers.sql.';

create or replace function penstock.is_dead(p_seen_at timestamptz, p_dead_after interval, p_suspected_at timestamptz, p_moment timestamptz)
returns boolean
language sql
stable
as $$
    select p_seen_at + p_dead_after < p_moment and p_suspected_at > p_seen_at and p_suspected_at + p_dead_after * 0.5 < p_moment
$$;
comment on function penstock.is_dead(timestamptz, interval, timestamptz, timestamptz) is
    'Part of recover and evict: whether a worker or member has been silent for too long, also since it was suspected.';

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
    if p_blocked_s not between 0 and 1e9 then
        raise exception 'invalid time for which the event loop is blocked: %', p_blocked_s
            using errcode = 'PS400', hint = 'Give seconds, from 0 to 1,000,000,000, or null when nothing blocks it.';
    end if;
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
