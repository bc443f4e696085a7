-- Consumer groups: begin, commit, seek, pause. The head of tables/0006_streams.sql explains them; members and slots are those
-- of groups/membership.sql.

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
    select * into consuming
    from penstock.stream_groups
    where stream = (penstock.require_stream(p_stream)).id and name = p_group;
    if not found then
        raise exception 'stream % has no consumer group %', p_stream, coalesce(left(p_group, 100), 'null')
            using errcode = 'PS404', hint = format('Create it first: select penstock.declare_consumer_group(%L, %L);', p_stream, left(p_group, 200));
    end if;
    return consuming;
end
$$;
comment on function penstock.require_consumer_group(text, text) is 'The consumer group of that name, or PS404.';

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
    perform penstock.check_size(
        greatest(cardinality(p_partitions), cardinality(p_epochs), cardinality(p_revisions), cardinality(p_offsets)),
        10000, 'partitions'
    );
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

create or replace function penstock.try_partition(
    p_stream text, p_group text, p_partition integer, p_epoch bigint, p_tried integer, p_acquitted boolean default false
)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    update penstock.group_offsets
    set tried = greatest(p_tried, 0),
        crashes = case when p_acquitted then 0 else crashes end,
        doubt = case when p_acquitted then 1000 else doubt end,
        crashed_at = case when p_acquitted then null else crashed_at end
    where stream = (penstock.require_stream(p_stream)).id and group_id = p_group and partition = p_partition and epoch = p_epoch;
    return found;
end
$$;
comment on function penstock.try_partition(text, text, integer, bigint, integer, boolean) is
    'Says that the owner of a suspect partition handles so many events of it now, and of no other suspect, or (0) that they are done; p_acquitted: it has come past where members were lost. False: the epoch is another.';

create or replace function penstock.lose_partitions(p_group_name text, p_member text)
returns void
language plpgsql
as $$
declare
    consuming penstock.stream_groups;
    held integer[];
    on_trial integer[];
begin
    select * into consuming from penstock.stream_groups where group_name = p_group_name;
    if not found then
        return;
    end if;
    -- As in begin_partitions: a commit may be under way in the transaction of a handler, on a machine that hangs. Nothing waits for
    -- it, least of all this; its partition counts nothing.
    select array_agg(free.partition), array_agg(free.partition) filter (where free.tried > 0) into held, on_trial
    from (
        select reached.partition, reached.tried
        from penstock.slots
        join penstock.group_offsets as reached on reached.stream = consuming.stream
            and reached.group_id = consuming.name
            and reached.partition = slots.slot
        where slots.group_name = p_group_name and slots.owner = p_member
        order by reached.partition
        for no key update of reached skip locked
    ) as free;
    if on_trial is not null then
        update penstock.group_offsets as reached
        set crashes = case
                when reached.tried > 1 then 2
                when reached.crashes >= 3 and reached.crashed_at = reached.next_offset then 4
                else 3
            end,
            crashed_at = reached.next_offset,
            doubt = reached.tried,
            tried = 0
        where reached.stream = consuming.stream and reached.group_id = consuming.name and reached.partition = any (on_trial);
        return;
    end if;
    update penstock.group_offsets as reached
    set crashes = case
            when reached.crashes >= 2 and reached.next_offset between reached.crashed_at and reached.crashed_at + reached.doubt then reached.crashes
            when reached.next_offset between reached.crashed_at and reached.crashed_at + 1000 then reached.crashes + 1
            else 1
        end,
        crashed_at = case
            when reached.crashes >= 2 and reached.next_offset between reached.crashed_at and reached.crashed_at + reached.doubt then reached.crashed_at
            else reached.next_offset
        end,
        doubt = case
            when reached.crashes >= 2 and reached.next_offset between reached.crashed_at and reached.crashed_at + reached.doubt then reached.doubt
            else 1000
        end
    from penstock.stream_bounds((select streams.name from penstock.streams where streams.id = consuming.stream)) as bounds
    where bounds.partition = any (held)
        and reached.stream = consuming.stream
        and reached.group_id = consuming.name
        and reached.partition = bounds.partition
        and reached.next_offset < bounds.next_offset
        and reached.paused_at is null;
end
$$;
comment on function penstock.lose_partitions(text, text) is
    'Part of end_owned_work: a member of a consumer group was lost. Counts the crash for the partitions whose events can have caused it.';

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

create or replace function penstock.dead_letter(
    p_stream text, p_group text, p_member text, p_partition integer, p_epoch bigint, p_revision integer, p_offset bigint,
    p_until bigint, p_error text
)
returns bigint
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    letters record;
begin
    if penstock.lock_offset(p_stream, p_group, p_partition, p_epoch, p_revision) >= p_until then
        -- A repeated call, since the answer to the first was lost.
        return 0;
    end if;
    perform penstock.commit_exactly(p_stream, p_group, p_member, p_partition, p_epoch, p_revision, p_until);
    if not exists (select from penstock.streams where name = p_stream || '.dead') then
        perform penstock.declare_stream(
            p_stream || '.dead', 1,
            jsonb_build_object(
                'format', stream.format, 'compression', stream.compression, 'max_event_bytes', stream.max_event_bytes
            )
        );
    end if;
    select
        array_agg(event.data order by event.event_offset) as data,
        array_agg(event.bytes order by event.event_offset) as bytes,
        array_agg(event.key order by event.event_offset) as keys,
        array_agg(penstock.shown_time(event.happened_at) order by event.event_offset) as times,
        array_agg(
            (
                coalesce(event.headers::jsonb, '{}') || jsonb_build_object(
                    'dead', jsonb_build_object(
                        'stream', p_stream, 'partition', p_partition, 'offset', event.event_offset, 'group', p_group,
                        'error', p_error, 'failed_at', penstock.clock()
                    )
                )
            )::json
            order by event.event_offset
        ) as headers
    into letters
    from penstock.read_events(p_stream, p_partition, p_offset, (p_until - p_offset)::integer) as event
    where event.event_offset < p_until;
    perform from penstock.append_many(
        p_stream || '.dead',
        case stream.format when 'json' then letters.data end,
        letters.keys, letters.headers, letters.times,
        case stream.format when 'bytes' then letters.bytes end
    );
    return coalesce(cardinality(letters.keys), 0);
end
$$;
comment on function penstock.dead_letter(text, text, text, integer, bigint, integer, bigint, bigint, text) is
    'Appends the events of a partition from p_offset to before p_until to the stream <stream>.dead, with where they come from and the error in the header "dead", and commits p_until, in one transaction. PS409 when the partition is no longer the member''s. Returns how many.';

create or replace function penstock.replay_dead(
    p_stream text, p_limit integer default 1000, p_partitions integer[] default null, p_offsets bigint[] default null
)
returns bigint
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    dead penstock.streams;
    place record;
    letters record;
    replayed bigint := 0;
begin
    if p_limit is null or p_limit not between 1 and 100000 or cardinality(p_partitions) is distinct from cardinality(p_offsets) then
        raise exception 'give a limit from 1 to 100,000, and an offset for each partition or none at all'
            using errcode = 'PS400', hint = 'For example: select penstock.replay_dead(''orders'', 100);';
    end if;
    select * into dead from penstock.streams where name = p_stream || '.dead';
    if not found then
        return 0;
    end if;
    -- How far they were replayed is the place of a group of the dead letters, so that none is replayed twice unless asked for:
    -- group_lag shows it, and seek_group moves it.
    perform penstock.declare_consumer_group(dead.name, 'penstock.replay', 'earliest');
    perform
    from penstock.group_offsets
    where group_offsets.stream = dead.id and group_id = 'penstock.replay'
    order by partition
    for no key update;
    for place in
        select
            reached.partition,
            greatest(case when p_partitions is null then reached.next_offset else given.from_offset end, bounds.first_offset) as from_offset
        from penstock.group_offsets as reached
        join penstock.stream_bounds(dead.name) as bounds using (partition)
        left join unnest(p_partitions, p_offsets) as given (partition, from_offset) using (partition)
        where reached.stream = dead.id
            and reached.group_id = 'penstock.replay'
            and (p_partitions is null or given.from_offset is not null)
        order by reached.partition
    loop
        exit when replayed >= p_limit;
        select
            array_agg(event.data order by event.event_offset) as data,
            array_agg(event.bytes order by event.event_offset) as bytes,
            array_agg(event.key order by event.event_offset) as keys,
            array_agg(penstock.shown_time(event.happened_at) order by event.event_offset) as times,
            array_agg(
                (
                    -- For the group that put it aside, and no other: those that have seen it do not see it again.
                    coalesce(event.headers::jsonb, '{}') - 'dead' - 'replayed' || case
                        when event.headers::jsonb #>> '{dead,group}' is null then '{}'::jsonb
                        else jsonb_build_object('replayed', event.headers::jsonb -> 'dead')
                    end
                )::json
                order by event.event_offset
            ) as headers,
            max(event.event_offset) + 1 as next_offset
        into letters
        from penstock.read_events(dead.name, place.partition, place.from_offset, (p_limit - replayed)::integer) as event;
        continue when letters.next_offset is null;
        begin
            perform from penstock.append_many(
                p_stream,
                case stream.format when 'json' then letters.data end,
                letters.keys, letters.headers, letters.times,
                case stream.format when 'bytes' then letters.bytes end
            );
        exception
            when sqlstate 'PS400' or sqlstate 'PS413' then
                raise exception 'dead letters of partition % from offset % to before % cannot be appended: %',
                    place.partition, place.from_offset, letters.next_offset, sqlerrm
                    using errcode = 'PS400',
                          hint = format('Pass over what cannot be: select penstock.seek_group(%L, ''penstock.replay'', ''{%s}'', ''{...}'');', dead.name, place.partition);
        end;
        update penstock.group_offsets
        set next_offset = greatest(next_offset, letters.next_offset),
            committed_at = penstock.clock()
        where group_offsets.stream = dead.id and group_id = 'penstock.replay' and partition = place.partition;
        replayed := replayed + cardinality(letters.keys);
    end loop;
    return replayed;
end
$$;
comment on function penstock.replay_dead(text, integer, integer[], bigint[]) is
    'Appends up to p_limit dead letters of <stream>.dead, those that were not replayed before, to the stream again; with p_offsets those from there on, replayed or not. The header "replayed" says which group put an event aside: consumers of other groups pass over it. Returns how many: call it again until that is 0.';

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

create or replace function penstock.tell_consumers(p_group_name text)
returns void
language sql
as $$
    select pg_notify('penstock_' || id, 'moved ' || p_group_name) from penstock.members where group_name = p_group_name
$$;
comment on function penstock.tell_consumers(text) is 'Tells the members of a consumer group to begin their partitions again.';

create or replace function penstock.pause_partitions(p_stream text, p_group text, p_partitions integer[] default null, p_reason text default null)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    consuming constant penstock.stream_groups := penstock.require_consumer_group(p_stream, p_group);
    paused integer;
begin
    perform penstock.check_size(cardinality(p_partitions), 10000, 'partitions');
    update penstock.group_offsets
    set paused_at = penstock.clock(),
        pause_reason = p_reason,
        quarantined = false
    where stream = consuming.stream
        and group_id = p_group
        and (p_partitions is null or partition = any (p_partitions))
        and paused_at is null;
    get diagnostics paused = row_count;
    perform penstock.tell_consumers(consuming.group_name);
    return paused;
end
$$;
comment on function penstock.pause_partitions(text, text, integer[], text) is
    'Gives a group no more events of partitions (null: of any) until resume_partitions. Returns how many were not paused already.';

create or replace function penstock.quarantine_partition(
    p_stream text, p_group text, p_member text, p_partition integer, p_epoch bigint, p_revision integer, p_offset bigint, p_error text
)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.commit_exactly(p_stream, p_group, p_member, p_partition, p_epoch, p_revision, p_offset);
    update penstock.group_offsets
    set paused_at = penstock.clock(),
        pause_reason = p_error,
        quarantined = true
    where stream = (penstock.require_stream(p_stream)).id and group_id = p_group and partition = p_partition and paused_at is null;
end
$$;
comment on function penstock.quarantine_partition(text, text, text, integer, bigint, integer, bigint, text) is
    'Pauses a partition before the event that could not be handled, until it is resumed (and may have moved the group past it).';

create or replace function penstock.halt_partition(
    p_stream text, p_group text, p_member text, p_partition integer, p_epoch bigint, p_revision integer, p_offset bigint, p_error text
)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.commit_exactly(p_stream, p_group, p_member, p_partition, p_epoch, p_revision, p_offset);
    update penstock.group_offsets
    set halt_error = p_error
    where stream = (penstock.require_stream(p_stream)).id and group_id = p_group and partition = p_partition;
end
$$;
comment on function penstock.halt_partition(text, text, text, integer, bigint, integer, bigint, text) is
    'Commits the events before the one that could not be handled, and notes why its consumer halts there, until that event is done. The next owner of the partition gets the event again.';

create or replace function penstock.note_failure(
    p_stream text, p_group text, p_member text, p_partition integer, p_epoch bigint, p_revision integer, p_offset bigint,
    p_attempt integer, p_error text
)
returns boolean
language sql
security definer
set search_path = penstock, pg_temp
as $$
    with wanted as materialized (
        -- A commit of the same events may be under way for long: a note is not worth waiting for it.
        select reached.ctid as place
        from penstock.group_offsets as reached
        where reached.stream = (penstock.require_consumer_group(p_stream, p_group)).stream
            and reached.group_id = p_group
            and reached.partition = p_partition
            and reached.epoch = p_epoch
            and reached.revision = p_revision
            and reached.next_offset <= p_offset
            and exists (
                select from penstock.slots
                where slots.group_name = (penstock.require_consumer_group(p_stream, p_group)).group_name
                    and slots.slot = p_partition and slots.owner = p_member and slots.epoch = p_epoch
            )
        for no key update of reached skip locked
    ),
    noted as (
        update penstock.group_offsets as reached
        set failing_since = case when reached.failing_offset = p_offset then reached.failing_since else penstock.clock() end,
            failing_offset = p_offset,
            failing_attempt = p_attempt,
            failing_error = left(p_error, 1000)
        from wanted
        where reached.ctid = wanted.place
        returning 1
    )
    select exists (select from noted)
$$;
comment on function penstock.note_failure(text, text, text, integer, bigint, integer, bigint, integer, text) is
    'A consumer says that its handler fails at the event p_offset, at first and then more and more seldom; group_lag shows it until that event is done. False: the partition is no longer this member''s, the event is done, or a commit is under way.';

create or replace function penstock.resume_partitions(p_stream text, p_group text, p_partitions integer[] default null)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    consuming constant penstock.stream_groups := penstock.require_consumer_group(p_stream, p_group);
    resumed integer;
begin
    perform penstock.check_size(cardinality(p_partitions), 10000, 'partitions');
    update penstock.group_offsets
    set paused_at = null,
        pause_reason = null,
        quarantined = false,
        crashes = 0,
        crashed_at = null,
        doubt = 1000
    where stream = consuming.stream
        and group_id = p_group
        and (p_partitions is null or partition = any (p_partitions))
        and paused_at is not null;
    get diagnostics resumed = row_count;
    perform penstock.tell_consumers(consuming.group_name);
    return resumed;
end
$$;
comment on function penstock.resume_partitions(text, text, integer[]) is 'Ends a pause or quarantine of partitions (null: of all). Returns how many were paused.';

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
