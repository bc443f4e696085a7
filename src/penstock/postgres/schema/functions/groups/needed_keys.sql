-- Keys of encryption that the work in slots needs. The head of tables/0004_groups.sql has the whole.

create or replace function penstock.need_keys(p_group text, p_member text, p_slots integer[], p_key_ids text[])
returns penstock.groups
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    -- Said again in time, it is not forgotten while it lasts.
    fresh constant timestamptz := penstock.clock() - interval '10 minutes';
    locked penstock.groups;
begin
    perform penstock.check_size(greatest(cardinality(p_slots), cardinality(p_key_ids)), 10000, 'slots');
    if coalesce(cardinality(p_slots), 0) <> coalesce(cardinality(p_key_ids), 0) then
        raise exception 'the arrays differ in length'
            using errcode = 'PS400', hint = 'Give the id of a key for each slot; a slot may come several times.';
    end if;
    perform penstock.check_key_ids('member ' || left(p_member, 100), array(select distinct given from unnest(p_key_ids) as given));
    -- An owner says it again as long as it waits: nearly always it is known, and nothing is locked.
    if not exists (
        select
        from (
            select given.slot, array_agg(distinct given.key_id) as key_ids
            from unnest(p_slots, p_key_ids) as given (slot, key_id)
            group by given.slot
        ) as lacking
        join penstock.slots on slots.group_name = p_group and slots.slot = lacking.slot and slots.owner = p_member
        where slots.needed_at is null or slots.needed_at < fresh
            or not slots.key_ids[1:cardinality(lacking.key_ids)] @> lacking.key_ids
    ) then
        return null;
    end if;
    locked := penstock.lock_group(p_group);
    update penstock.slots
    set key_ids = (lacking.key_ids || array(select before from unnest(slots.key_ids) as before where before <> all (lacking.key_ids)))[1:8],
        needed_at = penstock.clock()
    from (
        select given.slot, (array_agg(distinct given.key_id order by given.key_id))[1:8] as key_ids
        from unnest(p_slots, p_key_ids) as given (slot, key_id)
        group by given.slot
    ) as lacking
    where slots.group_name = p_group and slots.slot = lacking.slot and slots.owner = p_member;
    if not found then
        return null;
    end if;
    if locked.assignor = 'custom' then
        locked := penstock.new_generation(p_group);
    end if;
    return locked;
end
$$;
comment on function penstock.need_keys(text, text, integer[], text[]) is
    'The owner of slots says that work in them waits for keys of encryption which it lacks, by their ids. Null: that is known, or the slots have another owner. Otherwise returns the group, which stays locked: compute targets in the same transaction, which give these slots to members that have the keys.';

create or replace function penstock.slots_to_place(p_name text)
returns table (slot integer, owner text, target text, epoch bigint, key text, error text, key_ids text[])
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        slots.slot, slots.owner, slots.target, slots.epoch, slots.key, slots.error,
        case when slots.needed_at > penstock.clock() - interval '1 hour' then slots.key_ids else '{}' end
    from penstock.slots
    where slots.group_name = p_name
    order by slots.slot
$$;
comment on function penstock.slots_to_place(text) is
    'The slots of a group as an assignor sees them; key_ids: keys of encryption that their work was found to need, latest first.';

create or replace function penstock.locked_work()
returns table (name text, key_id text, lacking text[], holders text[])
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    with live as (
        select workers.id, workers.key_ids, workers.no_key, workers.names, workers.metadata
        from penstock.workers
        where workers.seen_at > penstock.clock() - workers.dead_after
    ),
    noted as (
        select entry.name, entry.key_id #>> '{}' as key_id, live.id as by
        from live
        cross join lateral jsonb_each(live.no_key) as entry (name, key_id)
        union
        -- A slot whose owner has meanwhile what was needed is not counted, and neither is one that nothing is said of any more.
        select slots.group_name, needed.key_id, slots.owner
        from penstock.slots
        join penstock.members on members.group_name = slots.group_name and members.id = slots.owner
        cross join lateral unnest(slots.key_ids) as needed (key_id)
        where slots.key_ids <> '{}' and slots.needed_at > penstock.clock() - interval '15 minutes'
            and needed.key_id <> all (members.key_ids)
    ),
    having_it as (
        select work.name, work.key_id, members.id
        from (select distinct noted.name, noted.key_id from noted) as work
        join penstock.members on members.group_name = work.name and members.state = 'active'
        where case when work.key_id is null then members.key_ids <> '{}' else work.key_id = any (members.key_ids) end
        union
        select work.name, work.key_id, live.id
        from (select distinct noted.name, noted.key_id from noted) as work
        join live on work.name = any (live.names)
        where case when work.key_id is null then live.key_ids <> '{}' else work.key_id = any (live.key_ids) end
    )
    select
        noted.name, noted.key_id,
        -- The id of a member begins with that of its worker.
        array_agg(distinct coalesce((select live.id from live where starts_with(noted.by, live.id) limit 1), noted.by)),
        array(
            select distinct coalesce((select live.id from live where starts_with(having_it.id, live.id) limit 1), having_it.id)
            from having_it
            where having_it.name = noted.name and having_it.key_id is not distinct from noted.key_id
        )
    from noted
    group by noted.name, noted.key_id
    order by noted.name, noted.key_id
    limit 1000
$$;
comment on function penstock.locked_work() is
    'Part of penstock doctor: the job types, pools and consumer groups (stream/group) in which work waits for a key of encryption that a live worker or member of them lacks (null: it has no key at all), who lacks it, and who has it.';
