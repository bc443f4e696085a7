-- Dead letters: events that could not be handled, in the stream <name>.dead, and back.

create or replace function penstock.readable_headers(p_headers json)
returns jsonb
language sql
immutable
as $$
    select case when jsonb_typeof(given.headers) = 'object' then given.headers else '{}' end
    from (select penstock.readable_json(p_headers::text) as headers) as given
$$;
comment on function penstock.readable_headers(json) is
    'Part of dead_letter and replay_dead: the headers of an event, as far as PostgreSQL can read them (see readable_json); {} when they are no object.';

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
    if stream.encrypted and not (select dead.encrypted from penstock.streams as dead where dead.name = p_stream || '.dead') then
        perform penstock.change_stream(p_stream || '.dead', '{"encrypted": true}');
    end if;
    select
        array_agg(event.data order by event.event_offset) as data,
        array_agg(event.bytes order by event.event_offset) as bytes,
        array_agg(event.key order by event.event_offset) as keys,
        array_agg(penstock.shown_time(event.happened_at) order by event.event_offset) as times,
        array_agg(
            (
                penstock.readable_headers(event.headers) || jsonb_build_object(
                    'dead', jsonb_build_object(
                        'stream', p_stream, 'partition', p_partition, 'offset', event.event_offset, 'group', p_group,
                        'error', penstock.kept_reason(stream, p_error), 'failed_at', penstock.clock()
                    )
                )
            )::json
            order by event.event_offset
        ) as headers
    into letters
    from penstock.read_events(p_stream, p_partition, p_offset, (p_until - p_offset)::integer) as event
    where event.event_offset < p_until
        -- What was replayed for another group lies between the events of a batch, and is not among them.
        and coalesce(penstock.readable_headers(event.headers) #>> '{replayed,group}', p_group) = p_group
        -- Neither is the mark of an erased event.
        and penstock.readable_headers(event.headers) #> '{erased,operation}' is null;
    if letters.keys is null then
        return 0;
    end if;
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

-- Long, since it finds the letters, appends them where they come from, and notes which were replayed, under one lock.
create or replace function penstock.replay_dead(
    p_stream text, p_limit integer default 1000, p_partitions integer[] default null, p_offsets bigint[] default null,
    p_before bigint[] default null
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
    next_letter bigint;
    replayed bigint := 0;
begin
    if p_limit is null
        or p_limit not between 1 and 100000
        or cardinality(p_partitions) is distinct from cardinality(p_offsets)
        or p_before is not null and cardinality(p_partitions) is distinct from cardinality(p_before)
    then
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
            greatest(case when p_partitions is null then reached.next_offset else given.from_offset end, bounds.first_offset) as from_offset,
            given.before_offset
        from penstock.group_offsets as reached
        join penstock.stream_bounds(dead.name) as bounds using (partition)
        left join unnest(p_partitions, p_offsets, p_before) as given (partition, from_offset, before_offset) using (partition)
        where reached.stream = dead.id
            and reached.group_id = 'penstock.replay'
            and (p_partitions is null or given.from_offset is not null)
        order by reached.partition
    loop
        exit when replayed >= p_limit;
        next_letter := place.from_offset;
        loop
            select
                array_agg(event.data order by event.event_offset) filter (where event.is_there) as data,
                array_agg(event.bytes order by event.event_offset) filter (where event.is_there) as bytes,
                array_agg(event.key order by event.event_offset) filter (where event.is_there) as keys,
                array_agg(penstock.shown_time(event.happened_at) order by event.event_offset) filter (where event.is_there) as times,
                array_agg(
                    (
                        -- For the group in which it failed, and no other: groups that have handled it do not get it again.
                        penstock.readable_headers(event.headers) - 'dead' - 'replayed' || case
                            when penstock.readable_headers(event.headers) #>> '{dead,group}' is null then '{}'::jsonb
                            else jsonb_build_object('replayed', penstock.readable_headers(event.headers) -> 'dead')
                        end
                    )::json
                    order by event.event_offset
                ) filter (where event.is_there) as headers,
                max(event.event_offset) + 1 as next_offset
            into letters
            from (
                -- The mark of an erased event is no letter.
                select letter.*, penstock.readable_headers(letter.headers) #> '{erased,operation}' is null as is_there
                from penstock.read_events(dead.name, place.partition, next_letter, (p_limit - replayed)::integer) as letter
                where place.before_offset is null or letter.event_offset < place.before_offset
            ) as event;
            exit when letters.next_offset is null;
            begin
                if letters.keys is not null then
                    perform from penstock.append_many(
                        p_stream,
                        case stream.format when 'json' then letters.data end,
                        letters.keys, letters.headers, letters.times,
                        case stream.format when 'bytes' then letters.bytes end
                    );
                end if;
            exception
                when sqlstate 'PS400' or sqlstate 'PS413' then
                    raise exception 'dead letters of partition % from offset % to before % cannot be appended: %',
                        place.partition, next_letter, letters.next_offset, sqlerrm
                        using errcode = 'PS400',
                              hint = format('Pass over what cannot be: select penstock.seek_group(%L, ''penstock.replay'', ''{%s}'', ''{...}'');', dead.name, place.partition);
            end;
            update penstock.group_offsets
            set next_offset = greatest(next_offset, letters.next_offset),
                committed_at = penstock.clock()
            where group_offsets.stream = dead.id and group_id = 'penstock.replay' and partition = place.partition;
            replayed := replayed + coalesce(cardinality(letters.keys), 0);
            next_letter := letters.next_offset;
            -- What was read may be nothing but marks of erased events.
            exit when letters.keys is not null;
        end loop;
    end loop;
    return replayed;
end
$$;
comment on function penstock.replay_dead(text, integer, integer[], bigint[], bigint[]) is
    'Appends up to p_limit dead letters of <stream>.dead, those that were not replayed before, to the stream again; with p_offsets those from there on, replayed or not, and with p_before only those before these offsets. The header "replayed" says which group put an event aside: consumers of other groups pass over it. Returns how many: call it again until that is 0.';
