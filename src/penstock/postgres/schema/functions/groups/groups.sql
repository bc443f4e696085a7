-- Membership groups: their declaration, members and slots. The head of tables/0004_groups.sql explains the protocol.

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

create or replace function penstock.forget_group(p_name text)
returns void
language plpgsql
as $$
begin
    delete from penstock.listeners where kind = 'keys' and subject = p_name;
    delete from penstock.members where group_name = p_name;
    delete from penstock.slots where group_name = p_name;
    delete from penstock.groups where name = p_name;
end
$$;
comment on function penstock.forget_group(text) is 'Part of what drops pools, streams and consumer groups: removes all rows of a membership group, which is locked.';

create or replace function penstock.group_members(p_name text)
returns table (
    id text, state text, metadata text, age bigint, joined_at timestamptz, seen_at timestamptz, slots integer, key_ids text[]
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        members.id, members.state, coalesce(penstock.shown(members.metadata), '{}'), members.age, members.joined_at, members.seen_at,
        coalesce(owned.slots, 0)::integer, members.key_ids
    from penstock.members
    left join (
        select slots.owner, count(*) as slots from penstock.slots where slots.group_name = p_name group by slots.owner
    ) as owned on owned.owner = members.id
    where members.group_name = p_name
    order by members.age
$$;
comment on function penstock.group_members(text) is 'The members of a group, oldest first, with how many slots each has, and the ids of the keys of encryption that it has. Metadata comes as text.';

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
