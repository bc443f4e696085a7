-- Maintenance of streams: new segments, retention and compaction. Any worker does all three for all streams, again and again;
-- everything here may run in many processes at once.
--
-- Each step for each stream is a transaction of its own: appends wait only while a new segment is begun, never while old ones
-- are compacted, and what cannot be done for one stream is no matter to the others.

create or replace function penstock.streams_to_maintain()
returns setof text
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.forget_listeners();
    delete from penstock.stream_producers where seen_at < penstock.clock() - interval '30 days';
    return query select name from penstock.streams order by id;
end
$$;
comment on function penstock.streams_to_maintain() is
    'Forgets readers and producers that were not seen for long. Returns the streams, each to be given to maintain_stream, and to compact_stream when maintain_stream asks for it; drop_retired comes last.';

create or replace function penstock.try_to_maintain(p_stream integer)
returns boolean
language sql
as $$
    select pg_try_advisory_xact_lock(hashtext('penstock.maintain_stream'), p_stream)
$$;
comment on function penstock.try_to_maintain(integer) is 'Until the transaction ends no other transaction maintains or compacts this stream; false: another one does.';

create or replace function penstock.maintain_stream(p_stream text, out rolled boolean, out retired integer, out compact boolean)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    stream constant penstock.streams := penstock.require_stream(p_stream);
    active record;
    moment constant timestamptz := penstock.clock();
begin
    rolled := false;
    retired := 0;
    compact := false;
    -- One process at a time is enough; the others do not wait for it.
    if not penstock.try_to_maintain(stream.id) then
        return;
    end if;
    retired := penstock.retire_segments(p_stream);
    compact := stream.compact and exists (
        select
        from penstock.segments
        where segments.stream = stream.id
            and closed_at is not null
            and (
                compacted_at is null
                -- Tombstones grow old, and what was left in a segment that was not worth rewriting is dropped after a day.
                or compacted_at < moment - interval '1 day'
            )
    );
    select * into active from penstock.stream_segments(p_stream) where closed_at is null order by segment desc limit 1;
    rolled := exists (
        select from penstock.segments where segments.stream = stream.id and closed_at is null and id < active.segment
    ) or coalesce(
        active.events > 0 and (
            active.size >= least(stream.segment_bytes, stream.keep_bytes / 10)
            or active.events >= least(stream.segment_events, stream.keep_events / 10)
            or active.opened_at <= moment - coalesce(stream.segment_age, least(stream.keep_age / 10, interval '1 day'))
        ),
        false
    );
    if not rolled then
        return;
    end if;
    rolled := penstock.try_to_roll(p_stream);
    compact := compact or (rolled and stream.compact);
end
$$;
comment on function penstock.maintain_stream(text) is
    'Applies the retention of a stream, and begins a new segment when the active one is old or large, in those partitions that have no append in a long transaction: call it again while it says rolled. Returns what was done, and whether there is something to compact. Does nothing while another does it.';
