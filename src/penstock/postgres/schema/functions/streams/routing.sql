-- Routing: the partition of a key, by way of one of 4,096 buckets; and growth, by which some buckets move to new partitions.

create or replace function penstock.bucket_of(p_key text)
returns integer
language sql
immutable
strict
parallel safe
as $$
    select (penstock.key_hash(p_key) & 4095)::integer
$$;
comment on function penstock.bucket_of(text) is 'The bucket of a key, 0 to 4095: the low twelve bits of its hash.';

create or replace function penstock.routes_of(p_partitions integer)
returns smallint[]
language sql
immutable
strict
parallel safe
as $$
    select penstock.check_limit(p_partitions, 1024, 'number of partitions');
    -- The hash of a bucket's number as text, so that neighbouring buckets do not go together.
    select array_agg(penstock.jump_hash(penstock.key_hash(bucket::text), p_partitions)::smallint order by bucket)
    from generate_series(0, 4095) as bucket
$$;
comment on function penstock.routes_of(integer) is
    'The partition of each bucket in a stream of so many partitions. With more partitions buckets only move to new ones.';

create or replace function penstock.partition_of(p_key text, p_partitions integer)
returns integer
language sql
immutable
strict
parallel safe
as $$
    select penstock.jump_hash(penstock.key_hash(penstock.bucket_of(p_key)::text), p_partitions)
$$;
comment on function penstock.partition_of(text, integer) is 'The partition of a key in a stream of so many partitions.';

create or replace function penstock.lock_partitions(p_stream integer)
returns bigint
language sql
set lock_timeout = '3s'
as $$
    select max(locked.segment)
    from (
        select segment
        from penstock.stream_partitions
        where stream_partitions.stream = p_stream
        order by partition
        for no key update
    ) as locked
$$;
comment on function penstock.lock_partitions(integer) is
    'Part of grow_stream: appends that are under way finish first, and new ones wait. 55P03 when another transaction holds it up for 3 seconds. Returns the active segment.';

create or replace function penstock.grow_stream(p_stream text, p_partitions integer)
returns penstock.streams
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream penstock.streams;
    consuming penstock.stream_groups;
    active bigint;
    grown penstock.streams;
    member text;
begin
    stream := penstock.lock_stream(p_stream);
    if p_partitions is null or p_partitions < stream.partitions or p_partitions > 1024 then
        raise exception 'stream % cannot have % partitions', p_stream, coalesce(p_partitions::text, 'null')
            using errcode = 'PS400', hint = format('It has %s, which can only grow, up to 1,024.', stream.partitions);
    end if;
    if p_partitions = stream.partitions then
        return stream;
    end if;
    active := penstock.lock_partitions(stream.id);
    insert into penstock.stream_growths (stream, width, ends, grown_at)
    select stream.id, p_partitions, array_agg(bounds.next_offset order by bounds.partition), penstock.clock()
    from penstock.stream_bounds(p_stream) as bounds;
    update penstock.stream_partitions set width = p_partitions where stream_partitions.stream = stream.id;
    insert into penstock.stream_partitions (stream, partition, width, segment)
    select stream.id, number, p_partitions, active from generate_series(stream.partitions, p_partitions - 1) as number;
    insert into penstock.segment_starts (stream, partition, segment, first_offset)
    select stream.id, number, active, 0 from generate_series(stream.partitions, p_partitions - 1) as number;
    update penstock.streams
    set partitions = p_partitions,
        routes = penstock.routes_of(p_partitions),
        updated_at = penstock.clock()
    where id = stream.id
    returning * into grown;
    for consuming in select * from penstock.stream_groups where stream_groups.stream = stream.id order by name loop
        perform penstock.lock_group(consuming.group_name);
        insert into penstock.group_offsets (stream, group_id, partition, next_offset)
        select stream.id, consuming.name, number, 0 from generate_series(stream.partitions, p_partitions - 1) as number;
        insert into penstock.slots (group_name, slot, changed_at)
        select consuming.group_name, number, penstock.clock() from generate_series(stream.partitions, p_partitions - 1) as number;
        update penstock.groups
        set slots = p_partitions,
            generation = generation + 1
        where name = consuming.group_name;
        for member in select id from penstock.members where group_name = consuming.group_name order by age limit 2 loop
            perform penstock.tell_member(consuming.group_name, member);
        end loop;
    end loop;
    return grown;
end
$$;
comment on function penstock.grow_stream(text, integer) is
    'Gives a live stream more partitions. The order of each key is kept: a group begins with a new partition when it has finished what the old ones held at this moment.';
