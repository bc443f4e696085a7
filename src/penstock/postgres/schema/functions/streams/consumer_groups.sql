-- Consumer groups: declare, seek, lag. The head of tables/0006_streams.sql explains them; members and slots are those of
-- groups/membership.sql.

create or replace function penstock.declare_consumer_group(p_stream text, p_group text, p_start text default 'earliest')
returns text
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream penstock.streams := penstock.require_stream(p_stream);
    members_share constant text := p_stream || '/' || p_group;
begin
    if p_group is null or p_group !~ '^(?![.]{1,2}$)[A-Za-z0-9_.-]{1,90}$' then
        raise exception 'invalid name of a consumer group: %', coalesce(quote_literal(left(p_group, 100)), 'null')
            using errcode = 'PS400', hint = 'A consumer group has 1 to 90 letters, digits, ".", "-" or "_", and is not "." or "..".';
    end if;
    if p_start is null or p_start not in ('earliest', 'latest') then
        raise exception 'unknown start: %', coalesce(left(p_start, 100), 'null')
            using errcode = 'PS400', hint = 'A new group starts with the earliest event, or with the latest.';
    end if;
    if exists (select from penstock.stream_groups where stream_groups.stream = stream.id and name = p_group) then
        return members_share;
    end if;
    -- So that it gets a row for each partition, also while the stream grows.
    select * into stream from penstock.streams where name = p_stream for share;
    if not found then
        -- Dropped a moment ago.
        stream := penstock.require_stream(p_stream);
    end if;
    insert into penstock.stream_groups (stream, name, group_name, created_at)
    values (stream.id, p_group, members_share, penstock.clock())
    on conflict do nothing;
    if found then
        perform penstock.declare_group(members_share, stream.partitions, 'sticky');
        insert into penstock.group_offsets (stream, group_id, partition, next_offset)
        select stream.id, p_group, bounds.partition, case p_start when 'latest' then bounds.next_offset else bounds.first_offset end
        from penstock.stream_bounds(p_stream) as bounds;
    end if;
    return members_share;
end
$$;
comment on function penstock.declare_consumer_group(text, text, text) is
    'Creates a consumer group when there is none, which starts at the earliest or latest event. Returns the name of the group whose members share the partitions as slots.';

create or replace function penstock.require_consumer_group(p_stream text, p_group text)
returns penstock.stream_groups
language plpgsql
stable
as $$
declare
    consuming penstock.stream_groups;
begin
    select consumer_group.* into consuming
    from penstock.streams as stream
    join penstock.stream_groups as consumer_group on consumer_group.stream = stream.id
    where stream.name = p_stream and consumer_group.name = p_group;
    if not found then
        perform penstock.require_stream(p_stream);
        raise exception 'stream % has no consumer group %', p_stream, coalesce(left(p_group, 100), 'null')
            using errcode = 'PS404', hint = format('Create it first: select penstock.declare_consumer_group(%L, %L);', p_stream, left(p_group, 200));
    end if;
    return consuming;
end
$$;
comment on function penstock.require_consumer_group(text, text) is 'The consumer group of that name, or PS404.';

create or replace function penstock.check_consumer_group(p_stream text, p_group text)
returns void
language plpgsql
stable
as $$
begin
    if p_group is not null and not exists (
        select
        from penstock.stream_groups
        where stream = (penstock.require_stream(p_stream)).id and name = p_group
    ) then
        raise exception 'stream % has no consumer group %', p_stream, left(p_group, 100)
            using errcode = 'PS404', hint = 'A group is made when its first consumer starts. penstock streams groups lists those that are there.';
    end if;
end
$$;
comment on function penstock.check_consumer_group(text, text) is 'Raises PS404 when a stream has no such consumer group; null is any.';

create or replace function penstock.tell_consumers(p_group_name text)
returns void
language sql
as $$
    select penstock.tell(id, 'moved', p_group_name) from penstock.members where group_name = p_group_name
$$;
comment on function penstock.tell_consumers(text) is 'Tells the members of a consumer group to begin their partitions again.';

create or replace function penstock.seek_group(p_stream text, p_group text, p_partitions integer[], p_offsets bigint[])
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    consuming constant penstock.stream_groups := penstock.require_consumer_group(p_stream, p_group);
    moved integer;
begin
    perform penstock.check_size(greatest(cardinality(p_partitions), cardinality(p_offsets)), 10000, 'partitions');
    if exists (
        select
        from unnest(p_partitions, p_offsets) as given (partition, next_offset)
        left join penstock.stream_bounds(p_stream) as bounds using (partition)
        where given.next_offset between bounds.first_offset and bounds.next_offset is not true
    ) then
        raise exception 'an offset is not within the stream %', p_stream
            using errcode = 'PS400', hint = format('Look at its bounds: select * from penstock.stream_bounds(%L);', p_stream);
    end if;
    update penstock.group_offsets as reached
    set next_offset = given.next_offset,
        revision = reached.revision + 1,
        crashes = 0,
        crashed_at = null,
        doubt = 1000,
        halt_error = null,
        failing_since = null,
        failing_offset = null,
        failing_attempt = null,
        failing_error = null
    from unnest(p_partitions, p_offsets) as given (partition, next_offset)
    where reached.stream = consuming.stream and reached.group_id = p_group and reached.partition = given.partition;
    get diagnostics moved = row_count;
    perform penstock.tell_consumers(consuming.group_name);
    return moved;
end
$$;
comment on function penstock.seek_group(text, text, integer[], bigint[]) is
    'Moves a consumer group to other offsets, back or forth. Its consumers go on from there; what they handle is not committed. Returns how many partitions.';

create or replace function penstock.group_lag(p_stream text, p_group text default null)
returns table (
    group_id text, partition integer, next_offset bigint, end_offset bigint, lag bigint, owner text, committed_at timestamptz,
    paused_at timestamptz, pause_reason text, quarantined boolean, halt_error text, waits_for integer[],
    failing_since timestamptz, failing_offset bigint, failing_attempt integer, failing_error text
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
begin
    perform penstock.check_consumer_group(p_stream, p_group);
    return query
    with unfinished as materialized (
        -- As in begin_partitions: the partitions that came with a growth wait for the older ones to be finished.
        select
            consuming.name, cardinality(growth.ends) as first, growth.width,
            array_agg(older.partition order by older.partition) as partitions
        from penstock.stream_growths as growth
        join penstock.stream_groups as consuming on consuming.stream = growth.stream
        cross join unnest(growth.ends) with ordinality as before (ends_at, place)
        join penstock.group_offsets as older
            on older.stream = growth.stream and older.group_id = consuming.name and older.partition = before.place - 1
        where growth.stream = (penstock.require_stream(p_stream)).id and older.next_offset < before.ends_at
        group by consuming.name, growth.ends, growth.width
    )
    select
        reached.group_id, reached.partition, reached.next_offset, bounds.next_offset, bounds.next_offset - reached.next_offset,
        slot.owner, reached.committed_at, reached.paused_at, reached.pause_reason, reached.quarantined, reached.halt_error,
        coalesce(unfinished.partitions, '{}'), reached.failing_since, reached.failing_offset, reached.failing_attempt, reached.failing_error
    from penstock.group_offsets as reached
    join penstock.stream_groups as consuming on consuming.stream = reached.stream and consuming.name = reached.group_id
    join penstock.stream_bounds(p_stream) as bounds on bounds.partition = reached.partition
    left join penstock.slots as slot on slot.group_name = consuming.group_name and slot.slot = reached.partition
    left join unfinished
        on unfinished.name = reached.group_id and reached.partition >= unfinished.first and reached.partition < unfinished.width
    where reached.stream = (penstock.require_stream(p_stream)).id and (p_group is null or reached.group_id = p_group)
    order by reached.group_id, reached.partition;
end
$$;
comment on function penstock.group_lag(text, text) is
    'PS404 when there is no such group. Of each partition how far a group (null: each group) is, how many events are before it, who consumes it, whether it is paused, why its consumer halted, since when and why a handler has failed at an event, and for which older partitions it waits since the stream grew: they have to be finished first, so a paused one among them has to be resumed, or the group moved past what is there.';
