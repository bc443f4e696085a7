-- Loads: millions of events at once, all or none. They come by COPY into penstock.loaded_chunks, where only their own transaction
-- sees them, without any lock on the stream, and are then appended by one statement.

create or replace function penstock.check_chunk()
returns trigger
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(new.stream);
begin
    -- Here and not in end_load: nothing more is copied after the first bad chunk, and what is stored may be compressed.
    perform penstock.check_lists(
        array[array_dims(new.data), array_dims(new.bytes), array_dims(new.keys), array_dims(new.headers), array_dims(new.times)]
    );
    if penstock.check_events(stream, new.data, new.bytes, new.keys, new.headers, new.times) <> new.events
        or new.partition not between 0 and stream.partitions - 1
    then
        raise exception 'partitions or numbers of events do not fit the events'
            using errcode = 'PS400', hint = 'Each row has as many payloads, in the format of the stream, as it says in events.';
    end if;
    return new;
end
$$;
comment on function penstock.check_chunk() is 'Trigger of loaded_chunks: checks each chunk that is copied as check_events does for an append.';

create or replace trigger loaded_chunks_check
before insert on penstock.loaded_chunks
for each row execute function penstock.check_chunk();

create or replace function penstock.gather_partitions(p_stream penstock.streams, out width integer, out active bigint)
language plpgsql
as $$
declare
    oldest bigint;
begin
    select min(locked.width), max(locked.segment), min(locked.segment)
    into width, active, oldest
    from (
        select partitions.width, partitions.segment
        from penstock.stream_partitions as partitions
        where partitions.stream = p_stream.id
        order by partitions.partition
        for no key update
    ) as locked;
    if oldest < active then
        perform penstock.move_to_segment(p_stream.id, p_stream.name, active, null);
    end if;
end
$$;
comment on function penstock.gather_partitions(penstock.streams) is
    'Part of end_load and commit_staged_events: locks all partitions of a stream and moves them to the active segment. Returns their number and the segment.';

create or replace function penstock.begin_load(p_stream text)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
begin
    delete from penstock.loaded_chunks as chunk where chunk.xid = pg_current_xact_id() and chunk.stream = p_stream;
    return stream.partitions;
end
$$;
comment on function penstock.begin_load(text) is
    'Begins to load events. Then copy into penstock.loaded_chunks (stream, partition, events, keys, times, headers, data, bytes), a row for each chunk, in this transaction, before end_load. PS413 for an event larger than max_event_bytes. Returns the number of partitions for which to route keys.';

create or replace function penstock.end_load(p_stream text, p_width integer)
returns table (partition integer, first_offset bigint, events bigint)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    gathered record;
begin
    gathered := penstock.gather_partitions(stream);
    if gathered.width is distinct from p_width then
        perform penstock.require_stream(p_stream);
        raise exception 'stream % does not have % partitions', p_stream, p_width
            using errcode = 'PS412', hint = 'It has grown meanwhile: begin again.';
    end if;
    return query execute format(
        $insert$
            with inserted as (
                insert into penstock.%1$I (partition, first_offset, events, appended_at, keys, times, headers, data, bytes)
                select
                    chunk.partition,
                    bounds.next_offset + sum(chunk.events) over (partition by chunk.partition order by chunk.place) - chunk.events,
                    chunk.events, $1, chunk.keys, chunk.times, chunk.headers, chunk.data, chunk.bytes
                from penstock.loaded_chunks as chunk
                left join penstock.stream_bounds($3) as bounds using (partition)
                where chunk.xid = $2 and chunk.stream = $3
                returning partition, first_offset, events
            )
            select partition, min(first_offset), sum(events)::bigint from inserted group by partition order by partition
        $insert$,
        'events_' || gathered.active
    )
    using penstock.clock(), pg_current_xact_id(), p_stream;
    delete from penstock.loaded_chunks as chunk where chunk.xid = pg_current_xact_id() and chunk.stream = p_stream;
    perform penstock.wake(penstock.listening('events', stream.id::text), 'events ' || stream.id);
end
$$;
comment on function penstock.end_load(text, integer) is
    'Appends what this transaction copied into penstock.loaded_chunks for the stream since begin_load. Returns the first offset and the number of events by partition.';
