-- Ownership: join, leave, heartbeat, take, release, evict. The head of tables/0004_groups.sql explains the protocol.
--
-- Errors beyond those of core/basics.sql: PS404: the group or member does not exist (a missing member was evicted), PS409: a live member
-- has the id.

create or replace function penstock.tell_member(p_group text, p_member text)
returns void
language sql
as $$
    select pg_notify('penstock_' || p_member, 'slots ' || p_group)
$$;
comment on function penstock.tell_member(text, text) is 'Notifies a member that it has to release or take slots.';

create or replace function penstock.declare_group(p_name text, p_slots integer, p_assignor text default 'sticky')
returns penstock.groups
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    declared penstock.groups;
    moment constant timestamptz := penstock.clock();
begin
    if p_name is null or p_name !~ '^[^[:space:][:cntrl:]]{1,200}$' then
        raise exception 'invalid group name: %', coalesce(quote_literal(left(p_name, 100)), 'null')
            using errcode = 'PS400', hint = 'A group name has 1 to 200 characters, none of them white space or a control character.';
    end if;
    if p_assignor is null or p_assignor not in ('sticky', 'jump', 'custom') then
        raise exception 'unknown assignor: %', coalesce(quote_literal(left(p_assignor, 100)), 'null')
            using errcode = 'PS400', hint = 'An assignor is sticky, jump or custom.';
    end if;
    if p_slots is null or p_slots not between 1 and 65536 then
        raise exception 'invalid number of slots: %', coalesce(p_slots::text, 'null')
            using errcode = 'PS400', hint = 'A group has 1 to 65,536 slots.';
    end if;
    insert into penstock.groups (name, slots, assignor, created_at)
    values (p_name, case when p_assignor = 'custom' then 0 else p_slots end, p_assignor, moment)
    on conflict (name) do nothing;
    if found and p_assignor <> 'custom' then
        insert into penstock.slots (group_name, slot, changed_at)
        select p_name, number, moment from generate_series(0, p_slots - 1) as number;
    end if;
    select * into declared from penstock.groups where name = p_name;
    if declared.assignor <> p_assignor and 'custom' in (declared.assignor, p_assignor) then
        raise exception 'group % has the assignor %', p_name, declared.assignor
            using errcode = 'PS409', hint = 'A group with a slot for each key cannot become one with numbered slots, nor the reverse: use another name.';
    end if;
    if declared.assignor <> p_assignor then
        update penstock.groups
        set assignor = p_assignor,
            generation = generation + 1
        where name = p_name
        returning * into declared;
    end if;
    return declared;
end
$$;
comment on function penstock.declare_group(text, integer, text) is
    'Creates a group unless it exists; then only its assignor is changed, between sticky and jump.';

create or replace function penstock.lock_group(p_name text)
returns penstock.groups
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    locked penstock.groups;
begin
    -- Not "for update": an enqueue that inserts the slot of a new key locks the row for key share until its transaction ends.
    select * into locked from penstock.groups where name = p_name for no key update;
    if not found then
        raise exception 'no such group: %', left(p_name, 100)
            using errcode = 'PS404', hint = 'Declare it first.';
    end if;
    return locked;
end
$$;
comment on function penstock.lock_group(text) is 'The group, locked until the transaction ends: for a transaction that is about to compute targets. PS404 when there is none.';

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

create or replace function penstock.group_members(p_name text)
returns table (id text, state text, metadata text, age bigint, joined_at timestamptz, seen_at timestamptz, slots integer)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        members.id, members.state, coalesce(penstock.shown(members.metadata), '{}'), members.age, members.joined_at, members.seen_at,
        coalesce(owned.slots, 0)::integer
    from penstock.members
    left join (
        select slots.owner, count(*) as slots from penstock.slots where slots.group_name = p_name group by slots.owner
    ) as owned on owned.owner = members.id
    where members.group_name = p_name
    order by members.age
$$;
comment on function penstock.group_members(text) is 'The members of a group, oldest first, with how many slots each has. Metadata comes as text.';

create or replace function penstock.group_slots(p_name text)
returns setof penstock.slots
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select * from penstock.slots where group_name = p_name order by slot
$$;
comment on function penstock.group_slots(text) is 'The slots of a group.';

create or replace function penstock.still_owned(p_group text, p_member text, p_slots integer[], p_epochs bigint[])
returns integer[]
language sql
stable
as $$
    select array_agg(slots.slot order by slots.slot)
    from unnest(p_slots, p_epochs) as given (slot, epoch)
    join penstock.slots on slots.slot = given.slot and slots.epoch = given.epoch
    where slots.group_name = p_group and slots.owner = p_member;
$$;
comment on function penstock.still_owned(text, text, integer[], bigint[]) is
    'Those of the slots that the member has under these epochs, in order; null: none.';

create or replace function penstock.set_targets(p_group text, p_slots integer[], p_targets text[])
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    locked constant penstock.groups := penstock.lock_group(p_group);
    moved integer;
    concerned text[];
    member text;
begin
    perform penstock.check_size(greatest(cardinality(p_slots), cardinality(p_targets)), 1000000, 'slots');
    if coalesce(cardinality(p_slots), 0) <> coalesce(cardinality(p_targets), 0) then
        raise exception 'the arrays differ in length'
            using errcode = 'PS400', hint = 'Give one target for each slot.';
    end if;
    with changed as (
        update penstock.slots
        set target = given.target,
            placed = true
        from (
            select every.slot, wanted.target
            from penstock.slots as every
            left join unnest(p_slots, p_targets) as wanted (slot, target) using (slot)
            where every.group_name = p_group
                -- The slot of a new key may have been inserted after the assignor read the slots: the next rebalance places it.
                and (wanted.slot is not null or every.placed)
        ) as given
        where slots.group_name = p_group
            and slots.slot = given.slot
            and (slots.target is distinct from given.target or not slots.placed)
        returning slots.owner, slots.target
    )
    select
        count(*) filter (where changed.owner is distinct from changed.target),
        -- Notify the owner to release the slot, or, when it has none, the target to take it.
        array_agg(distinct coalesce(changed.owner, changed.target))
    into moved, concerned
    from changed;
    foreach member in array coalesce(array_remove(concerned, null), '{}') loop
        perform penstock.tell_member(p_group, member);
    end loop;
    update penstock.groups set balanced = locked.generation where name = p_group;
    return moved;
end
$$;
comment on function penstock.set_targets(text, integer[], text[]) is
    'Writes the targets that an assignor computed, in the transaction that locked the group: a target, or null, for each slot that it saw. A slot left out gets no target, unless it is new: the next rebalance places it. Returns how many slots will move.';

create or replace function penstock.revoke_slots(p_group text, p_member text, p_slots integer[], p_error jsonb)
returns integer
language plpgsql
as $$
declare
    freed integer;
    next_owner text;
begin
    -- Blocks new claims of this member; claims that are under way finish first and are visible below.
    perform from penstock.members where group_name = p_group and id = p_member for update;
    perform penstock.end_owned_work(p_group, p_member, p_slots, p_error);
    update penstock.slots
    set owner = null,
        changed_at = penstock.clock()
    where group_name = p_group
        and owner = p_member
        and (p_slots is null or slot = any (p_slots));
    get diagnostics freed = row_count;
    for next_owner in
        select distinct target
        from penstock.slots
        where group_name = p_group
            and owner is null
            and target <> p_member
            and (p_slots is null or slot = any (p_slots))
    loop
        perform penstock.tell_member(p_group, next_owner);
    end loop;
    return freed;
end
$$;
comment on function penstock.revoke_slots(text, text, integer[], jsonb) is
    'Part of release, leave and evict: ends the work of the member in these slots (null: in all its slots), sets them free and notifies the members that are to take them.';

create or replace function penstock.join_group(
    p_group text,
    p_member text,
    p_session uuid,
    p_dead_after interval default '10 seconds',
    p_metadata jsonb default '{}'
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
    if p_member is null or p_member !~ '^(?![.]{1,2}$)[A-Za-z0-9_.-]{1,50}$' then
        raise exception 'invalid member id: %', coalesce(quote_literal(left(p_member, 100)), 'null')
            using errcode = 'PS400', hint = 'An id has 1 to 50 letters, digits, ".", "-" or "_".';
    end if;
    if p_dead_after is null or p_dead_after < interval '1 second' or p_dead_after > interval '1 day' then
        raise exception 'invalid dead_after: %', coalesce(p_dead_after::text, 'null')
            using errcode = 'PS400', hint = 'Use 1 second to 1 day, and heartbeat at least twice in that time.';
    end if;
    if p_metadata is null or jsonb_typeof(p_metadata) <> 'object' or pg_column_size(p_metadata) > 1048576 then
        raise exception 'metadata must be a JSON object of at most 1 MiB'
            using errcode = 'PS400', hint = 'For example {"clients": ["ada", "bob"]}.';
    end if;
    perform penstock.check_json(p_metadata, 'metadata');
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
    insert into penstock.members (group_name, id, session, age, metadata, joined_at, seen_at, dead_after)
    values (p_group, p_member, p_session, nextval('penstock.member_age'), p_metadata, moment, moment, p_dead_after);
    update penstock.groups
    set generation = generation + 1,
        members = members + 1
    where name = p_group
    returning * into locked;
    return locked;
end
$$;
comment on function penstock.join_group(text, text, uuid, interval, jsonb) is
    'Makes a member of the group, which stays locked until the transaction ends: compute targets and call set_targets in the same one. The session distinguishes the membership from others under the same id, so that the call may be repeated. PS409 when a live member has that id.';

create or replace function penstock.is_silent(member penstock.members, p_moment timestamptz)
returns boolean
language sql
stable
as $$
    -- No member can send a heartbeat while the server is down: after its start all members get three fifths of the silence to do so.
    select member.seen_at + member.dead_after < p_moment and pg_postmaster_start_time() + member.dead_after * 0.6 < p_moment
$$;
comment on function penstock.is_silent(penstock.members, timestamptz) is 'Whether a member has been silent for too long.';

create or replace function penstock.remove_members(p_group text, p_members text[])
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
            jsonb_build_object('type', 'WorkerLost', 'message', 'the worker died or lost contact while it held the job')
        );
    end loop;
    delete from penstock.members where group_name = p_group and id = any (p_members);
    get diagnostics removed = row_count;
    delete from penstock.listeners where kind = 'keys' and subject = p_group and channel = any (array(select 'penstock_' || unnest(p_members)));
    delete from penstock.place_waiters where name = p_group and worker = any (p_members);
    update penstock.groups
    set generation = generation + 1,
        members = members - removed
    where name = p_group and removed > 0;
end
$$;
comment on function penstock.remove_members(text, text[]) is 'Part of join, leave and evict: removes members of a locked group and sets their slots free.';

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
    perform penstock.remove_members(p_group, array[p_member]);
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
                and seen_at + dead_after * 0.6 < moment
                and (suspected_at is null or suspected_at <= seen_at or suspected_at < pg_postmaster_start_time())
            for update skip locked
        ));
    if not exists (
        select from penstock.members
        where group_name = p_group
            and seen_at + dead_after < moment and suspected_at + dead_after * 0.5 < moment
    ) then
        return '{}';
    end if;
    perform penstock.lock_group(p_group);
    -- Check again under the lock, by a clock that is read after it: a member may have sent a heartbeat or evicted others meanwhile.
    select array_agg(id) into silent
    from (
        select id
        from penstock.members
        where group_name = p_group
            and seen_at + dead_after < penstock.clock()
            and suspected_at > seen_at
            and suspected_at + dead_after * 0.5 < penstock.clock()
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

create or replace function penstock.take(p_group text, p_member text, p_session uuid, p_slots integer[])
returns table (slot integer, epoch bigint)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
begin
    perform penstock.check_size(cardinality(p_slots), 1000000, 'slots');
    perform from penstock.members where group_name = p_group and id = p_member and session = p_session for key share;
    if not found then
        perform penstock.refuse_member(p_group, p_member);
    end if;
    return query
    update penstock.slots
    set owner = p_member,
        epoch = slots.epoch + 1,
        settling = false,
        changed_at = penstock.clock()
    where slots.group_name = p_group
        and slots.slot = any (p_slots)
        and slots.target = p_member
        and slots.owner is null
        and (not slots.settling or not penstock.has_owned_work(p_group, slots.slot))
    returning slots.slot, slots.epoch;
end
$$;
comment on function penstock.take(text, text, uuid, integer[]) is
    'Takes those of the slots that are free and whose target is the member, each with a new epoch. Returns the slots that it took. PS404 when it was evicted.';

create or replace function penstock.release(p_group text, p_member text, p_slots integer[], p_epochs bigint[])
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_size(greatest(cardinality(p_slots), cardinality(p_epochs)), 1000000, 'slots');
    perform from penstock.members where group_name = p_group and id = p_member for update;
    return penstock.revoke_slots(
        p_group,
        p_member,
        coalesce(penstock.still_owned(p_group, p_member, p_slots, p_epochs), '{}'),
        jsonb_build_object('type', 'SlotMoved', 'message', 'the slot moved to another worker before the job was settled')
    );
end
$$;
comment on function penstock.release(text, text, integer[], bigint[]) is
    'Releases the slots that the member owns under these epochs; others do not change. Returns how many were set free.';

create or replace function penstock.owns(p_group text, p_member text, p_slot integer, p_epoch bigint)
returns boolean
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select exists (
        select from penstock.slots
        where group_name = p_group and slot = p_slot and owner = p_member and epoch = p_epoch
    )
$$;
comment on function penstock.owns(text, text, integer, bigint) is 'Whether a member owns a slot under an epoch.';

create or replace function penstock.set_metadata(p_group text, p_member text, p_metadata jsonb)
returns penstock.groups
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    locked penstock.groups;
begin
    if p_metadata is null or jsonb_typeof(p_metadata) <> 'object' or pg_column_size(p_metadata) > 1048576 then
        raise exception 'metadata must be a JSON object of at most 1 MiB'
            using errcode = 'PS400', hint = 'For example {"clients": ["ada", "bob"]}.';
    end if;
    perform penstock.check_json(p_metadata, 'metadata');
    locked := penstock.lock_group(p_group);
    update penstock.members
    set metadata = p_metadata
    where group_name = p_group and id = p_member;
    if not found then
        perform penstock.refuse_member(p_group, p_member);
    end if;
    if locked.assignor = 'custom' then
        update penstock.groups set generation = generation + 1 where name = p_group returning * into locked;
    end if;
    return locked;
end
$$;
comment on function penstock.set_metadata(text, text, jsonb) is
    'Changes the metadata of a member. With the assignor custom, compute targets in the same transaction.';

create or replace function penstock.drain_member(p_group text, p_member text, p_drain boolean default true)
returns penstock.groups
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    locked penstock.groups;
    state_then text;
begin
    locked := penstock.lock_group(p_group);
    select members.state into state_then from penstock.members where group_name = p_group and id = p_member;
    if not found then
        perform penstock.refuse_member(
            p_group, p_member, format('List the members: select id from penstock.group_members(%L);', left(p_group, 100))
        );
    end if;
    if (state_then = 'draining') <> p_drain then
        update penstock.members
        set state = case when p_drain then 'draining' else 'active' end
        where group_name = p_group and id = p_member;
        update penstock.groups set generation = generation + 1 where name = p_group returning * into locked;
        -- A call from psql computes no targets: let a member do it now.
        perform penstock.tell_member(p_group, p_member);
    end if;
    return locked;
end
$$;
comment on function penstock.drain_member(text, text, boolean) is
    'Drains a member: it stays in the group, but its slots move to the others (false: it takes part again). Idempotent. PS404 when there is none.';

create or replace function penstock.wait_for_slots(p_group text, p_member text)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_worker(p_member);
    perform penstock.listen_for('keys', array[p_group], 'penstock_' || p_member);
end
$$;
comment on function penstock.wait_for_slots(text, text) is
    'Registers a member as idle; it listens on the channel penstock_<member>. Claim once more after the call, since jobs may have arrived in between.';
