-- Begin and commit: a member begins to consume a partition under the epoch of its slot, and commits offsets under that epoch.

create or replace function penstock.begin_partitions(p_stream text, p_group text, p_member text, p_partitions integer[], p_epochs bigint[])
returns table (
    partition integer, next_offset bigint, revision integer, paused boolean, waits boolean, crashes smallint, crashed_at bigint, doubt integer
)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    consuming constant penstock.stream_groups := penstock.require_consumer_group(p_stream, p_group);
    given record;
    -- Partitions that came later wait until the group has finished what the older ones held then.
    unfinished constant int4range[] := array(
        select int4range(cardinality(growth.ends), growth.width)
        from penstock.stream_growths as growth
        where growth.stream = consuming.stream
            and exists (
                select
                from unnest(growth.ends) with ordinality as before (ends_at, place)
                cross join lateral (
                    select found.next_offset from penstock.group_offsets as found
                    where found.stream = consuming.stream and found.group_id = p_group and found.partition = before.place - 1
                    offset 0
                ) as older
                where older.next_offset < before.ends_at
            )
    );
begin
    perform penstock.check_size(greatest(cardinality(p_partitions), cardinality(p_epochs)), 10000, 'partitions');
    for given in
        select owned.partition, owned.epoch
        from unnest(p_partitions, p_epochs) as owned (partition, epoch)
        -- In this order only the primary key can give the row, whatever the statistics say of the owners.
        cross join lateral (
            select found.slot, found.owner, found.epoch from penstock.slots as found
            where found.group_name = consuming.group_name and found.slot >= owned.partition
            order by found.slot
            limit 1
        ) as slot
        where slot.slot = owned.partition and slot.owner = p_member and slot.epoch = owned.epoch
        -- In one order, always, so that two that begin or commit cannot wait for each other.
        order by owned.partition
    loop
        -- A commit of the owner before may be under way in the transaction of a handler, on a machine that hangs: this
        -- partition waits for it, and the others do not.
        perform
        from penstock.group_offsets as reached
        where reached.stream = consuming.stream
            and reached.group_id = p_group
            and reached.partition = given.partition
            and reached.epoch < given.epoch
        for no key update skip locked;
        if found then
            update penstock.group_offsets as reached
            set epoch = given.epoch,
                tried = 0
            where reached.stream = consuming.stream
                and reached.group_id = p_group
                and reached.partition = given.partition;
        end if;
        return query
        select
            reached.partition, reached.next_offset, reached.revision, reached.paused_at is not null,
            reached.epoch < given.epoch or reached.partition <@ any (unfinished), reached.crashes, reached.crashed_at, reached.doubt
        from penstock.group_offsets as reached
        where reached.stream = consuming.stream
            and reached.group_id = p_group
            and reached.partition = given.partition
            and reached.epoch <= given.epoch;
    end loop;
end
$$;
comment on function penstock.begin_partitions(text, text, text, integer[], bigint[]) is
    'Begins to consume partitions that the member has as slots, under these epochs: from now on a commit under an older epoch is refused. Returns where to go on, for those that are the member''s. waits: not yet, since older partitions have to be finished first (see grow_stream), or a commit of the owner before is under way; ask again. crashes, crashed_at, doubt: see tables/0006_streams.sql.';

create or replace function penstock.commit_offsets(
    p_stream text, p_group text, p_member text, p_partitions integer[], p_epochs bigint[], p_revisions integer[], p_offsets bigint[]
)
returns table (partition integer, committed boolean, paused boolean)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    consuming constant penstock.stream_groups := penstock.require_consumer_group(p_stream, p_group);
    given record;
begin
    if greatest(cardinality(p_partitions), cardinality(p_epochs), cardinality(p_revisions), cardinality(p_offsets)) > 10000 then
        perform penstock.check_size(
            greatest(cardinality(p_partitions), cardinality(p_epochs), cardinality(p_revisions), cardinality(p_offsets)),
            10000, 'partitions'
        );
    end if;
    for given in
        select one.*
        from unnest(p_partitions, p_epochs, p_revisions, p_offsets) as one (partition, epoch, revision, next_offset)
        -- In one order, always, so that two that commit cannot wait for each other.
        order by one.partition
    loop
        partition := given.partition;
        -- When it had to wait for a new owner to begin, the row has another epoch by now.
        update penstock.group_offsets as reached
        set next_offset = greatest(given.next_offset, reached.next_offset),
            committed_at = penstock.clock(),
            halt_error = case when given.next_offset <= reached.next_offset then reached.halt_error end,
            failing_since = case when given.next_offset <= reached.failing_offset then reached.failing_since end,
            failing_attempt = case when given.next_offset <= reached.failing_offset then reached.failing_attempt end,
            failing_error = case when given.next_offset <= reached.failing_offset then reached.failing_error end,
            failing_offset = case when given.next_offset <= reached.failing_offset then reached.failing_offset end
        where reached.stream = consuming.stream
            and reached.group_id = p_group
            and reached.partition = given.partition
            and reached.epoch = given.epoch
            and reached.revision = given.revision
            and exists (
                select
                from (
                    -- As in begin_partitions.
                    select found.slot, found.owner, found.epoch from penstock.slots as found
                    where found.group_name = consuming.group_name and found.slot >= given.partition
                    order by found.slot
                    limit 1
                ) as slot
                where slot.slot = given.partition and slot.owner = p_member and slot.epoch = given.epoch
            )
        returning true, reached.paused_at is not null into committed, paused;
        committed := coalesce(committed, false);
        paused := coalesce(paused, false);
        return next;
    end loop;
end
$$;
comment on function penstock.commit_offsets(text, text, text, integer[], bigint[], integer[], bigint[]) is
    'Commits for each partition the offset of the next event of the group; all events below it are done. Not committed: the partition is no longer this member''s under that epoch, or the group was moved to another offset (another revision): begin the partition again. In the transaction of a handler it makes its effects happen exactly once.';

create or replace function penstock.lock_offset(p_stream text, p_group text, p_partition integer, p_epoch bigint, p_revision integer)
returns bigint
language sql
as $$
    select next_offset
    from penstock.group_offsets
    where stream = (penstock.require_stream(p_stream)).id
        and group_id = p_group
        and partition = p_partition
        and epoch = p_epoch
        and revision = p_revision
    for no key update
$$;
comment on function penstock.lock_offset(text, text, integer, bigint, integer) is
    'How far a group is in a partition, locked until the transaction ends; null: it has another epoch or revision.';

create or replace function penstock.commit_exactly(
    p_stream text, p_group text, p_member text, p_partition integer, p_epoch bigint, p_revision integer, p_offset bigint,
    p_first bigint default null
)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    reached constant bigint := penstock.lock_offset(p_stream, p_group, p_partition, p_epoch, p_revision);
begin
    if not (
        select committed
        from penstock.commit_offsets(
            p_stream, p_group, p_member, array[p_partition], array[p_epoch], array[p_revision], array[p_offset]
        )
    ) then
        raise exception 'partition % of stream % is no longer consumed by %', p_partition, p_stream, p_member
            using errcode = 'PS409', hint = 'It moved to another member, or the group was moved to another offset. Roll back.';
    end if;
    if p_first < reached then
        raise exception 'the events of partition % of stream % from offset % on are done already', p_partition, p_stream, p_first
            using errcode = 'PS409', hint = 'An earlier transaction that committed them succeeded. Roll back.';
    end if;
end
$$;
comment on function penstock.commit_exactly(text, text, text, integer, bigint, integer, bigint, bigint) is
    'commit_offsets for one partition in the transaction of a handler, whose events begin at p_first: PS409 when it is refused, or when they were committed before, so that the transaction rolls back.';

create or replace function penstock.commit_json(p_stream text, p_commit jsonb)
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.commit_exactly(
        p_stream, p_commit ->> 'group', p_commit ->> 'member', (p_commit ->> 'partition')::integer, (p_commit ->> 'epoch')::bigint,
        (p_commit ->> 'revision')::integer, (p_commit ->> 'next_offset')::bigint, (p_commit ->> 'first_offset')::bigint
    )
$$;
comment on function penstock.commit_json(text, jsonb) is
    'commit_exactly for any driver: {group, member, partition, epoch, revision, next_offset, first_offset}.';
