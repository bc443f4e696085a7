-- Membership: join, heartbeat, leave, evict. The head of tables/0004_groups.sql explains the protocol.
--
-- Errors beyond those of core/basics.sql: PS404: the group or member does not exist (a missing member was evicted), PS409: a live member
-- has the id.

create or replace function penstock.refuse_member(p_group text, p_member text, p_hint text default 'It was evicted, or left: join again.')
returns void
language plpgsql
immutable
as $$
begin
    raise exception '% is no member of group %', left(p_member, 100), left(p_group, 100) using errcode = 'PS404', hint = p_hint;
end
$$;
comment on function penstock.refuse_member(text, text, text) is 'Raises PS404 for a member that was not found.';

create or replace function penstock.check_metadata(p_metadata jsonb)
returns void
language plpgsql
immutable
as $$
begin
    if p_metadata is null or jsonb_typeof(p_metadata) <> 'object' or pg_column_size(p_metadata) > 1048576 then
        raise exception 'metadata must be a JSON object of at most 1 MiB'
            using errcode = 'PS400', hint = 'For example {"clients": ["ada", "bob"]}.';
    end if;
    perform penstock.check_json(p_metadata, 'metadata');
end
$$;
comment on function penstock.check_metadata(jsonb) is 'Raises PS400 unless a member can have this metadata.';

create or replace function penstock.new_generation(p_group text, p_more integer default 0)
returns penstock.groups
language sql
as $$
    update penstock.groups
    set generation = generation + 1,
        members = members + p_more
    where name = p_group
    returning *
$$;
comment on function penstock.new_generation(text, integer) is
    'Part of the changes of a locked group: its targets have to be computed again. p_more: how many members it has gained. Returns the group.';

create or replace function penstock.join_group(
    p_group text,
    p_member text,
    p_session uuid,
    p_dead_after interval default '10 seconds',
    p_metadata jsonb default '{}',
    p_key_ids text[] default null
)
returns penstock.groups
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    locked penstock.groups;
    present penstock.members;
    moment constant timestamptz := penstock.clock();
begin
    perform penstock.check_sender('member', p_member, p_dead_after);
    perform penstock.check_metadata(p_metadata);
    perform penstock.check_key_ids('member ' || left(p_member, 100), p_key_ids);
    if p_session is null then
        raise exception 'session is null'
            using errcode = 'PS400', hint = 'Make a new UUID for each membership, and use it in all its calls.';
    end if;
    locked := penstock.lock_group(p_group);
    select * into present from penstock.members where group_name = p_group and id = p_member;
    if found then
        if present.session = p_session then
            return locked;
        end if;
        if not penstock.is_silent(present, moment) then
            raise exception 'member % of group % is alive', p_member, p_group
                using errcode = 'PS409', hint = 'Every live member needs an id of its own.';
        end if;
        perform penstock.remove_members(p_group, array[p_member]);
    end if;
    insert into penstock.members (group_name, id, session, age, metadata, key_ids, joined_at, seen_at, dead_after)
    values (p_group, p_member, p_session, nextval('penstock.member_age'), p_metadata, p_key_ids, moment, moment, p_dead_after);
    return penstock.new_generation(p_group, 1);
end
$$;
comment on function penstock.join_group(text, text, uuid, interval, jsonb, text[]) is
    'Makes a member of the group, which stays locked until the transaction ends: compute targets and call set_targets in the same one. The session distinguishes the membership from others under the same id, so that the call may be repeated. p_key_ids: ids of the keys of encrypted payloads that it has; null: it does not say. PS409 when a live member has that id.';

create or replace function penstock.is_silent(member penstock.members, p_moment timestamptz)
returns boolean
language sql
stable
as $$
    -- No member can send a heartbeat while the server is down: after its start all members get three fifths of the silence to do so.
    select member.seen_at + member.dead_after < p_moment and pg_postmaster_start_time() + member.dead_after * 0.6 < p_moment
$$;
comment on function penstock.is_silent(penstock.members, timestamptz) is 'Whether a member has been silent for too long.';

create or replace function penstock.remove_members(p_group text, p_members text[], p_lost boolean default true)
returns void
language plpgsql
as $$
declare
    member text;
    removed integer;
begin
    -- Always in one order, so that two evictions do not deadlock.
    foreach member in array array(select unnest(p_members) order by 1) loop
        perform penstock.revoke_slots(
            p_group, member, null,
            case
                when p_lost then jsonb_build_object('type', 'WorkerLost', 'message', 'the worker died or lost contact while it held the job')
                else jsonb_build_object('type', 'WorkerLeft', 'message', 'the worker went away while it held the job')
            end
        );
    end loop;
    delete from penstock.members where group_name = p_group and id = any (p_members);
    get diagnostics removed = row_count;
    delete from penstock.listeners where kind = 'keys' and subject = p_group and channel = any (array(select 'penstock_' || unnest(p_members)));
    delete from penstock.place_waiters where name = p_group and worker = any (p_members);
    if removed > 0 then
        perform penstock.new_generation(p_group, -removed);
    end if;
end
$$;
comment on function penstock.remove_members(text, text[], boolean) is 'Part of join_group, leave_group and evict: removes members of a locked group and sets their slots free. p_lost: they were lost, and have not left.';

create or replace function penstock.leave_group(p_group text, p_member text, p_session uuid default null)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.lock_group(p_group);
    if not exists (
        select from penstock.members where group_name = p_group and id = p_member and (p_session is null or session = p_session)
    ) then
        return false;
    end if;
    perform penstock.remove_members(p_group, array[p_member], false);
    return true;
end
$$;
comment on function penstock.leave_group(text, text, uuid) is
    'Ends a membership; slots that were not released before are free at once. Compute targets in the same transaction. False when there was no such membership.';

create or replace function penstock.evict(p_group text)
returns text[]
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    silent text[];
    moment constant timestamptz := penstock.clock();
begin
    -- The usual case, decided by one query of all members.
    if not exists (select from penstock.members where group_name = p_group and seen_at + dead_after * 0.6 < moment) then
        return '{}';
    end if;
    -- One check never suffices to take a process for dead: see the head of tables/0003_workers.sql.
    update penstock.members
    set suspected_at = moment
    where group_name = p_group
        and id = any (array(
            select id
            from penstock.members
            where group_name = p_group
                and penstock.is_to_be_suspected(seen_at, dead_after, suspected_at, moment)
            for update skip locked
        ));
    if not exists (
        select from penstock.members
        where group_name = p_group and penstock.is_dead(seen_at, dead_after, suspected_at, moment)
    ) then
        return '{}';
    end if;
    perform penstock.lock_group(p_group);
    -- Check again under the lock, by a clock that is read after it: a member may have sent a heartbeat or evicted others meanwhile.
    select array_agg(id) into silent
    from (
        select id
        from penstock.members
        where group_name = p_group and penstock.is_dead(seen_at, dead_after, suspected_at, penstock.clock())
        order by id
        for update
    ) as found;
    if silent is not null then
        perform penstock.remove_members(p_group, silent);
    end if;
    return coalesce(silent, '{}');
end
$$;
comment on function penstock.evict(text) is
    'Removes the members that were silent for too long and sets their slots free. Every member calls it at intervals. Returns their ids.';

create or replace function penstock.member_heartbeat(
    p_group text,
    p_member text,
    p_session uuid,
    out known boolean,
    out members integer,
    out balanced boolean,
    out dead_after_s double precision,
    out owned integer[],
    out epochs bigint[],
    out revoked integer[],
    out available integer[]
)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    update penstock.members
    set seen_at = penstock.clock()
    where group_name = p_group and id = p_member and session = p_session
    returning extract(epoch from members.dead_after) into dead_after_s;
    known := found;
    if not known then
        return;
    end if;
    select
        groups.members,
        groups.balanced = groups.generation
            and not exists (select from penstock.slots where slots.group_name = p_group and not slots.placed)
    into members, balanced
    from penstock.groups
    where groups.name = p_group;
    select
        array_agg(slots.slot order by slots.slot),
        array_agg(slots.epoch order by slots.slot),
        array_agg(slots.slot order by slots.slot) filter (where slots.target is distinct from p_member)
    into owned, epochs, revoked
    from penstock.slots
    where slots.group_name = p_group and slots.owner = p_member;
    select array_agg(slots.slot order by slots.slot)
    into available
    from penstock.slots
    where slots.group_name = p_group and slots.target = p_member and slots.owner is null;
end
$$;
comment on function penstock.member_heartbeat(text, text, uuid) is
    'Keeps a member alive and returns the slots that it owns (owned, with epochs), those of them that it must release (revoked) and those that it may take (available). known: false when it was evicted, also when another membership has its id now. balanced: false when a member has to compute targets. members: how many there are.';

create or replace function penstock.set_metadata(p_group text, p_member text, p_metadata jsonb)
returns penstock.groups
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    locked penstock.groups;
begin
    perform penstock.check_metadata(p_metadata);
    locked := penstock.lock_group(p_group);
    update penstock.members
    set metadata = p_metadata
    where group_name = p_group and id = p_member;
    if not found then
        perform penstock.refuse_member(p_group, p_member);
    end if;
    if locked.assignor = 'custom' then
        locked := penstock.new_generation(p_group);
    end if;
    return locked;
end
$$;
comment on function penstock.set_metadata(text, text, jsonb) is
    'Changes the metadata of a member. With the assignor custom, compute targets in the same transaction.';

create or replace function penstock.set_draining(p_group penstock.groups, p_member penstock.members, p_drain boolean)
returns penstock.groups
language plpgsql
as $$
begin
    if (p_member.state = 'draining') <> p_drain then
        update penstock.members
        set state = case when p_drain then 'draining' else 'active' end
        where group_name = p_group.name and id = p_member.id;
        p_group := penstock.new_generation(p_group.name);
        -- A call from psql computes no targets: let a member do it now.
        perform penstock.tell_member(p_group.name, p_member.id);
    end if;
    return p_group;
end
$$;
comment on function penstock.set_draining(penstock.groups, penstock.members, boolean) is
    'Part of drain_member and hand_over_slots: a member of a locked group drains, or takes part again. Returns the group.';

create or replace function penstock.hand_over_slots(p_group text, p_member text, p_session uuid)
returns penstock.groups
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    locked penstock.groups;
    leaving penstock.members;
begin
    locked := penstock.lock_group(p_group);
    select * into leaving from penstock.members where group_name = p_group and id = p_member and session = p_session;
    if not found then
        perform penstock.refuse_member(p_group, p_member);
    end if;
    return penstock.set_draining(locked, leaving, true);
end
$$;
comment on function penstock.hand_over_slots(text, text, uuid) is
    'A member that stops drains itself: its slots move to the others one by one, as it releases them. Compute targets in the same transaction. Idempotent. PS404 when there is no such membership.';

create or replace function penstock.drain_member(p_group text, p_member text, p_drain boolean default true)
returns penstock.groups
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    locked penstock.groups;
    present penstock.members;
begin
    locked := penstock.lock_group(p_group);
    select * into present from penstock.members where group_name = p_group and id = p_member;
    if not found then
        perform penstock.refuse_member(
            p_group, p_member, format('List the members: select id from penstock.group_members(%L);', left(p_group, 100))
        );
    end if;
    return penstock.set_draining(locked, present, p_drain);
end
$$;
comment on function penstock.drain_member(text, text, boolean) is
    'Drains a member: it stays in the group, but its slots move to the others (false: it takes part again). Idempotent. PS404 when there is none.';
