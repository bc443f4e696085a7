-- Erasure in streams. An event that is erased stays as a mark under its offset, without key, payload and time, so that offsets stay dense:
-- its header "erased" names the operation, and consumers pass over it.
--
-- A segment with such events is rewritten, as compaction does: into a table of its own, which takes the place of the old one, and the old one is
-- dropped when no reader is left in it. The active segment is closed first.

create or replace function penstock.erased_places(p_table text, p_subject jsonb, p_until timestamptz)
returns table (partition integer, first_offset bigint, places integer[])
language plpgsql
stable
as $$
begin
    if p_subject ? 'job' then
        return;
    elsif p_subject ? 'key' then
        return query execute format(
            $select$
                select chunk.partition, chunk.first_offset, array_positions(chunk.keys, $1)
                from penstock.%I as chunk
                where chunk.appended_at <= $2 and chunk.keys @> array[$1]
            $select$,
            p_table
        )
        using p_subject ->> 'key', p_until;
    else
        return query execute format(
            $select$
                select chunk.partition, chunk.first_offset, found.places
                from penstock.%I as chunk
                cross join lateral (
                    select array_agg(event.place::integer order by event.place) as places
                    from unnest(chunk.data) with ordinality as event (data, place)
                    where penstock.field_of_json(event.data, $1) = $2
                ) as found
                where chunk.appended_at <= $3 and chunk.data is not null and found.places is not null
            $select$,
            p_table
        )
        using string_to_array(p_subject ->> 'field', '.'), p_subject ->> 'value', p_until;
    end if;
end
$$;
comment on function penstock.erased_places(text, jsonb, timestamptz) is
    'Part of erasures: the chunks of a segment that have events to be erased, and the places of these in their arrays.';

create or replace function penstock.copy_without(p_table text, p_to text, p_partitions integer[], p_firsts bigint[], p_hits jsonb, p_mark json)
returns void
language plpgsql
as $$
begin
    execute format(
        $insert$
            insert into penstock.%2$I (partition, first_offset, events, appended_at, keys, times, headers, data, bytes, offsets)
            select stored.*
            from (
                select
                    chunk.partition, chunk.first_offset, chunk.events, chunk.appended_at, chunk.keys, chunk.times, chunk.headers,
                    chunk.data, chunk.bytes, chunk.offsets
                from penstock.%1$I as chunk
                where not exists (
                    select from unnest($1, $2) as hit (partition, first_offset)
                    where hit.partition = chunk.partition and hit.first_offset = chunk.first_offset
                )
                union all
                select
                    chunk.partition, chunk.first_offset, chunk.events, chunk.appended_at, kept.keys, kept.times, kept.headers, kept.data,
                    kept.bytes, chunk.offsets
                from unnest($1, $2) with ordinality as hit (partition, first_offset, number)
                join penstock.%1$I as chunk using (partition, first_offset)
                cross join lateral (
                    select
                        case when count(walked.key) > 0 then array_agg(walked.key order by walked.place) end as keys,
                        case when count(walked.time) > 0 then array_agg(walked.time order by walked.place) end as times,
                        array_agg(walked.header order by walked.place) as headers,
                        case when chunk.data is not null then array_agg(walked.data order by walked.place) end as data,
                        case when chunk.bytes is not null then array_agg(walked.bytes order by walked.place) end as bytes
                    from (
                        select
                            event.place,
                            case when not mark.here then event.key end as key,
                            case when not mark.here then event.time end as time,
                            case when mark.here then $4 else event.header end as header,
                            case when not mark.here then event.data end as data,
                            case when not mark.here then event.bytes end as bytes
                        from unnest(
                            chunk.keys, chunk.times, chunk.headers, chunk.data, chunk.bytes, array_fill(null::integer, array[chunk.events])
                        ) with ordinality as event (key, time, header, data, bytes, filler, place)
                        cross join lateral (select ($3 -> (hit.number - 1)::integer) @> to_jsonb(event.place) as here) as mark
                    ) as walked
                ) as kept
            ) as stored
            order by stored.partition, stored.first_offset
        $insert$,
        p_table, p_to
    )
    using p_partitions, p_firsts, p_hits, p_mark;
end
$$;
comment on function penstock.copy_without(text, text, integer[], bigint[], jsonb, json) is
    'Part of erase_events: copies the table of a segment to a new one, with a mark in the place of each event that is erased. p_hits: for each chunk of p_partitions and p_firsts the places of these.';

create or replace function penstock.erase_segment(p_stream penstock.streams, p_segment penstock.segments, operation penstock.operations)
returns bigint
language plpgsql
as $$
declare
    rewritten text;
    partitions integer[];
    firsts bigint[];
    hits jsonb;
    erased bigint;
begin
    select array_agg(hit.partition order by hit.partition, hit.first_offset), array_agg(hit.first_offset order by hit.partition, hit.first_offset),
        jsonb_agg(to_jsonb(hit.places) order by hit.partition, hit.first_offset), sum(cardinality(hit.places))
    into partitions, firsts, hits, erased
    from penstock.erased_places(p_segment.table_name, operation.filter, operation.started_at) as hit;
    rewritten := format('events_%s_%s', p_segment.id, nextval('penstock.segment_number'));
    execute format('create table penstock.%I (like penstock.event_segment including all)', rewritten);
    perform penstock.copy_without(
        p_segment.table_name, rewritten, partitions, firsts, hits,
        json_build_object('erased', json_build_object('operation', operation.id))
    );
    update penstock.segments set table_name = rewritten where id = p_segment.id;
    insert into penstock.retired_segments values (p_segment.table_name, penstock.clock());
    -- What a handler said about an event, or about a batch with it, may quote it.
    update penstock.group_offsets as reached
    set failing_error = case when reached.failing_error is not null then 'erased' end,
        halt_error = case when reached.halt_error is not null then 'erased' end,
        pause_reason = case when reached.quarantined and reached.pause_reason is not null then 'erased' else reached.pause_reason end
    where reached.stream = p_stream.id
        and (reached.failing_error is not null or reached.halt_error is not null or reached.quarantined)
        and exists (
            select from unnest(partitions, firsts) as hit (partition, first_offset)
            where hit.partition = reached.partition and hit.first_offset between reached.next_offset - 1000 and reached.next_offset + 10000
        );
    return erased;
end
$$;
comment on function penstock.erase_segment(penstock.streams, penstock.segments, penstock.operations) is
    'Part of erase_events: rewrites a closed segment without what is to be erased. Returns how many events that were.';

create or replace function penstock.erase_events(
    operation penstock.operations, inout state penstock.erasures, out erased bigint, out left_over integer
)
language plpgsql
as $$
declare
    stream penstock.streams;
    segment penstock.segments;
    hit boolean;
begin
    erased := 0;
    left_over := 0;
    select * into stream from penstock.streams where id >= state.at_stream order by id limit 1;
    if not found then
        state.at_stream := null;
        return;
    end if;
    if stream.id <> state.at_stream or state.to_segment is null then
        state.at_stream := stream.id;
        state.at_segment := 0;
        state.to_segment := (select max(segments.id) from penstock.segments where segments.stream = stream.id);
    end if;
    -- Neither retention nor compaction writes or drops segments meanwhile.
    if not penstock.try_to_maintain(stream.id) then
        left_over := 1;
        return;
    end if;
    loop
        select * into segment
        from penstock.segments
        where segments.stream = stream.id and segments.id > state.at_segment and segments.id <= state.to_segment
        order by segments.id
        limit 1;
        if not found then
            state.at_stream := stream.id + 1;
            state.to_segment := null;
            return;
        end if;
        hit := exists (select from penstock.erased_places(segment.table_name, operation.filter, operation.started_at));
        if hit and segment.closed_at is null then
            -- Appends go to the next segment, in one partition after another.
            perform penstock.try_to_roll(stream.name);
            select * into segment from penstock.segments where segments.id = segment.id;
            if segment.closed_at is null then
                left_over := 1;
                return;
            end if;
        end if;
        if hit then
            erased := penstock.erase_segment(stream, segment, operation);
        end if;
        state.at_segment := segment.id;
        -- One that is rewritten is enough for a transaction.
        exit when hit;
    end loop;
end
$$;
comment on function penstock.erase_events(penstock.operations, penstock.erasures) is
    'Part of advance_erasure: looks through the segments of a stream, from where it came to the next one that has something to be erased, and rewrites that. Returns how many events were erased, and left_over when another transaction is in the way. at_stream is null after the last stream.';
