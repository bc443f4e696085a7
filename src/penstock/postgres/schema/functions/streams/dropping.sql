-- The end of a stream: what it holds is released in one transaction, and its tables are dropped when the last reader has left them.

create or replace function penstock.lock_stream(p_name text)
returns penstock.streams
language plpgsql
as $$
declare
    locked penstock.streams;
begin
    select * into locked from penstock.streams where name = p_name for update;
    if not found then
        return penstock.require_stream(p_name);
    end if;
    return locked;
end
$$;
comment on function penstock.lock_stream(text) is 'The stream of that name, locked until the transaction ends: for a transaction that changes its partitions or drops it. PS404 when there is none.';

create or replace function penstock.forget_consumer_group(p_consuming penstock.stream_groups)
returns void
language plpgsql
as $$
begin
    delete from penstock.stream_groups where stream = p_consuming.stream and name = p_consuming.name;
    perform penstock.forget_group(p_consuming.group_name);
end
$$;
comment on function penstock.forget_consumer_group(penstock.stream_groups) is
    'Part of drop_consumer_group and drop_stream: removes all rows of a consumer group, which is locked.';

create or replace function penstock.drop_consumer_group(p_stream text, p_group text)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    consuming constant penstock.stream_groups := penstock.require_consumer_group(p_stream, p_group);
begin
    perform penstock.lock_group(consuming.group_name);
    if exists (select from penstock.members where group_name = consuming.group_name) then
        raise exception 'consumer group % of stream % has members', p_group, p_stream
            using errcode = 'PS409', hint = 'Stop its consumers first.';
    end if;
    perform penstock.forget_consumer_group(consuming);
end
$$;
comment on function penstock.drop_consumer_group(text, text) is 'Forgets a consumer group. PS409 while it has members.';

create or replace function penstock.lock_to_drop(p_name text)
returns penstock.streams
language plpgsql
set lock_timeout = '3s'
as $$
declare
    stream penstock.streams;
begin
    -- In the order in which maintain_stream and grow_stream lock.
    perform pg_advisory_xact_lock(hashtext('penstock.maintain_stream'), (penstock.require_stream(p_name)).id);
    stream := penstock.lock_stream(p_name);
    perform from penstock.stream_partitions where stream_partitions.stream = stream.id order by partition for update;
    return stream;
end
$$;
comment on function penstock.lock_to_drop(text) is
    'Part of drop_stream: who maintains or appends finishes first, and new appends wait. 55P03 when another transaction holds it up for 3 seconds.';

create or replace function penstock.drop_stream(p_name text, p_force boolean default false)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.lock_to_drop(p_name);
    consuming penstock.stream_groups;
begin
    for consuming in select * from penstock.stream_groups where stream_groups.stream = stream.id order by name loop
        perform penstock.lock_group(consuming.group_name);
        if p_force is not true and exists (
            select from penstock.members where group_name = consuming.group_name and not penstock.is_silent(members, penstock.clock())
        ) then
            raise exception 'consumer group % of stream % has live members', consuming.name, p_name
                using errcode = 'PS409',
                      hint = format('Stop its consumers first, or drop it under them: penstock streams drop %s --force, or select penstock.drop_stream(%L, p_force => true);', p_name, p_name);
        end if;
        perform penstock.tell_consumers(consuming.group_name);
        perform penstock.forget_consumer_group(consuming);
    end loop;
    perform penstock.wake(penstock.listening('events', stream.id::text), 'events ' || stream.id);
    delete from penstock.listeners where kind = 'events' and subject = stream.id::text;
    -- Readers may be in them, so drop_retired drops them later.
    insert into penstock.retired_segments (table_name, retired_at)
    select table_name, penstock.clock() from penstock.segments where segments.stream = stream.id;
    delete from penstock.segment_starts where segment_starts.stream = stream.id;
    delete from penstock.segments where segments.stream = stream.id;
    delete from penstock.stream_growths where stream_growths.stream = stream.id;
    delete from penstock.stream_producers where stream_producers.stream = stream.id;
    delete from penstock.stream_partitions where stream_partitions.stream = stream.id;
    delete from penstock.streams where id = stream.id;
    raise log 'penstock: stream % was dropped by %', p_name, session_user;
end
$$;
comment on function penstock.drop_stream(text, boolean) is
    'Drops a stream with its events, consumer groups and producers; who reads or consumes it gets PS404. PS409 while a consumer group has live members, unless p_force. Its dead letters, <stream>.dead, are a stream of their own and stay. Workers free the space (drop_retired). The log of the server says who did it.';
