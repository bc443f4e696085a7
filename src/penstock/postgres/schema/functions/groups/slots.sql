-- Slots: targets, and how slots move to them. The head of tables/0004_groups.sql explains the protocol.

create or replace function penstock.tell_member(p_group text, p_member text)
returns void
language sql
as $$
    select penstock.tell(p_member, 'slots', p_group)
$$;
comment on function penstock.tell_member(text, text) is 'Notifies a member that it has to release or take slots.';

create or replace function penstock.still_owned(p_group text, p_member text, p_slots integer[], p_epochs bigint[])
returns integer[]
language plpgsql
stable
as $$
declare
    own integer[];
    own_epochs bigint[];
begin
    select array_agg(mine.slot order by mine.slot), array_agg(mine.epoch order by mine.slot)
    into own, own_epochs
    from penstock.slots as mine
    where mine.group_name = p_group and mine.owner = p_member;
    -- Nearly always the member knows what it has: two comparisons are cheaper than a join in each claim.
    if own = p_slots and own_epochs = p_epochs then
        return own;
    end if;
    return (
        select array_agg(slots.slot order by slots.slot)
        from unnest(p_slots, p_epochs) as given (slot, epoch)
        join penstock.slots on slots.slot = given.slot and slots.epoch = given.epoch
        where slots.group_name = p_group and slots.owner = p_member
    );
end
$$;
comment on function penstock.still_owned(text, text, integer[], bigint[]) is
    'Those of the slots that the member has under these epochs, in order; null: none. Fastest when the slots are given in order.';

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
    'Part of release and remove_members: ends the work of the member in these slots (null: in all its slots), sets them free and notifies the members that are to take them.';

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

create or replace function penstock.wait_for_slots(p_group text, p_member text)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_worker(p_member);
    if not exists (select from penstock.groups where name = p_group) then
        raise exception 'no such membership group: %', coalesce(quote_literal(left(p_group, 100)), 'null')
            using errcode = 'PS404', hint = 'It is created with its pool or consumer group.';
    end if;
    perform penstock.listen_for('keys', array[p_group], 'penstock_' || p_member);
end
$$;
comment on function penstock.wait_for_slots(text, text) is
    'Registers a member as idle; it listens on the channel penstock_<member>. Claim once more after the call, since jobs may have arrived in between.';
