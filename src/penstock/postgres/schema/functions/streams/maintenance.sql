-- Maintenance of streams: new segments, retention and compaction. Any worker does all three for all streams, again and again;
-- everything here may run in many processes at once.
--
-- Each step for each stream is a transaction of its own: appends wait only while a new segment is begun, never while old ones
-- are compacted, and what cannot be done for one stream is no matter to the others.

create or replace function penstock.streams_to_maintain()
returns setof text
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
begin
    -- Sizes of files and times alone: to count events costs a look into each partition, which is left to maintain_stream.
    return query
    select stream.name
    from penstock.streams as stream
    cross join lateral (
        select
            count(*) filter (where segment.closed_at is null) as open,
            min(segment.opened_at) filter (where segment.closed_at is null) as opened_at,
            min(segment.closed_at) as closed_at,
            bool_or(segment.closed_at is not null and (segment.compacted_at is null or segment.compacted_at < moment - interval '1 day')) as uncompacted,
            coalesce(sum(pg_relation_size(segment.relation)) filter (where segment.closed_at is null), 0) > 0 as has_events,
            sum(pg_total_relation_size(segment.relation)) filter (where segment.closed_at is null) as open_size,
            case when stream.keep_bytes is not null then sum(pg_total_relation_size(segment.relation)) end as size
        from (
            select each.*, to_regclass(format('penstock.%I', each.table_name)) as relation
            from penstock.segments as each
            where each.stream = stream.id
            order by each.id
            offset 0
        ) as segment
    ) as segments
    where segments.open > 1
        or segments.open_size >= least(stream.segment_bytes, stream.keep_bytes / 10)
        or segments.has_events and (
            stream.segment_events is not null
            or stream.keep_events is not null
            or segments.opened_at <= moment - coalesce(stream.segment_age, least(stream.keep_age / 10, interval '1 day'))
        )
        or segments.closed_at is not null and (
            stream.keep_events is not null or segments.size >= stream.keep_bytes or segments.closed_at <= moment - stream.keep_age
        )
        or stream.compact and segments.uncompacted
    order by stream.id;
end
$$;
comment on function penstock.streams_to_maintain() is
    'The streams in which a segment may have to be begun, retired or compacted, each to be given to maintain_stream, and to compact_stream when maintain_stream asks for it; drop_retired comes last. What is counted in events may be due at any time.';

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
