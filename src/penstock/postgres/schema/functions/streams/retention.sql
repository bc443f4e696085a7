-- Retention: old segments are retired, so that they are no longer found, and dropped when no reader is left in them.

create or replace function penstock.retire_segments(p_stream text)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    moment constant timestamptz := penstock.clock();
    segment record;
    bytes_left bigint;
    events_left bigint;
    retired integer := 0;
begin
    if num_nonnulls(stream.keep_age, stream.keep_bytes, stream.keep_events) = 0 then
        return 0;
    end if;
    select sum(size), sum(events) into bytes_left, events_left from penstock.stream_segments(p_stream);
    for segment in select * from penstock.stream_segments(p_stream) where closed_at is not null order by segment loop
        bytes_left := bytes_left - segment.size;
        events_left := events_left - segment.events;
        exit when not coalesce(segment.closed_at <= moment - stream.keep_age, false)
            and not coalesce(bytes_left >= stream.keep_bytes, false)
            and not coalesce(events_left >= stream.keep_events, false);
        exit when stream.keep_unread and exists (
            select
            from penstock.group_offsets as reached
            join penstock.segment_starts as following
                on following.stream = reached.stream and following.partition = reached.partition
            where reached.stream = stream.id
                and following.segment = (select min(id) from penstock.segments where segments.stream = stream.id and id > segment.segment)
                and reached.next_offset < following.first_offset
        );
        delete from penstock.segment_starts where segment_starts.segment = segment.segment;
        delete from penstock.segments where id = segment.segment;
        insert into penstock.retired_segments values (segment.table_name, moment);
        retired := retired + 1;
    end loop;
    return retired;
end
$$;
comment on function penstock.retire_segments(text) is
    'Takes the segments that the retention of a stream does not keep out of sight, oldest first, never the active one; drop_retired drops them. Returns how many.';

create or replace function penstock.drop_retired()
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
-- A drop waits for those that still read the table. No new reader comes, so it can as well be tried again later.
set lock_timeout = '50ms'
as $$
declare
    retired text;
    dropped integer := 0;
begin
    for retired in
        select table_name from penstock.retired_segments order by retired_at limit 100 for update skip locked
    loop
        begin
            execute format('drop table if exists penstock.%I', retired);
            delete from penstock.retired_segments where table_name = retired;
            dropped := dropped + 1;
        exception
            when lock_not_available then
                null;
        end;
    end loop;
    return dropped;
end
$$;
comment on function penstock.drop_retired() is 'Drops retired segments that no transaction reads any more. Returns how many.';
