-- Streams: the tables.
--
-- The life of an event. An append locks the rows of the partitions that it writes to, in order, and puts the events behind
-- the last ones there. Nobody else can append to these partitions before it commits or rolls back, so offsets are dense, and
-- the order of offsets is the order of commits: whoever has read up to an offset will never find something new below it.
-- Events stay until retention drops the segment that they are in; reading changes nothing.
--
-- What keeps this fast, and has to stay true:
--
-- * A row holds not one event but a *chunk*: what one append brought for one partition, at most 1,000 events, in arrays. A
--   batch costs one statement and a row for each partition; an event costs nothing but its bytes.
-- * Nothing that an append touches is updated. The next offset of a partition is not a counter but what stands behind its
--   last chunk, found at the end of an index; a row lock leaves no dead row behind. So a transaction that stays
--   open for long, and holds off vacuum, slows neither appends nor readers.
-- * Segments are tables of their own (events_<number>, like the table event_segment), opened one after another for each
--   stream. Retention drops whole tables: first a segment is retired (its rows in segments and segment_starts go, so that nobody
--   looks there any more), then, in a later transaction, its table is dropped, when no reader is left in it.
-- * The active segment of a partition changes under the partition's row lock, so each offset is in exactly one segment.
--
-- Groups. A consumer group commits, for each partition, the offset of the next event that it wants, fenced by the epoch of
-- the slot under which the consumer owns the partition (see 0003_ownership.sql). A new owner writes its epoch into the row of
-- the partition before it reads the offset there; this waits for a commit that is under way in a handler's transaction, and
-- from then on the old epoch is refused.
--
-- Growth. A key belongs to one of 4,096 buckets, and `routes` says to which partition a bucket goes. With more partitions
-- some buckets move, always from an old partition to a new one. The new partitions begin empty; where the old ones ended then
-- is kept in stream_growths, and a group begins with a new partition only when it has finished the old ones up to there.

create sequence penstock.stream_turn as bigint;
comment on sequence penstock.stream_turn is 'Whose turn it is among the partitions, for events without a key.';

create sequence penstock.segment_number as bigint;
comment on sequence penstock.segment_number is 'Numbers segments; of two segments of a stream the later has the higher number.';

create table penstock.streams (
    name text primary key,
    id integer generated always as identity unique,
    partitions integer not null,
    routes smallint[] not null,
    format text not null default 'json',
    compression text,
    segment_age interval,
    segment_bytes bigint not null default 67108864,
    segment_events bigint,
    keep_age interval,
    keep_bytes bigint,
    keep_events bigint,
    keep_unread boolean not null default false,
    compact boolean not null default false,
    tombstone_age interval not null default '1 day',
    max_event_bytes integer not null default 1048576,
    declaration jsonb,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    constraint streams_partitions_check check (partitions between 1 and 1024),
    constraint streams_format_check check (format in ('json', 'bytes')),
    constraint streams_compression_check check (compression is null or (compression = 'zstd' and format = 'bytes'))
);
comment on table penstock.streams is 'Streams: ordered, partitioned logs of events.';
comment on column penstock.streams.id is 'Stands for the name in the other tables.';
comment on column penstock.streams.partitions is 'Number of partitions, 0 to partitions - 1; can grow.';
comment on column penstock.streams.routes is 'The partition of each bucket of keys, see bucket_of and partition_of.';
comment on column penstock.streams.format is 'json: events have data; bytes: events have bytes.';
comment on column penstock.streams.compression is 'zstd: each payload (of the format bytes) is compressed by its producer; null: it is not.';
comment on column penstock.streams.segment_age is 'A new segment is begun when the active one is older; null: a tenth of keep_age, at most a day.';
comment on column penstock.streams.segment_bytes is 'A new segment is begun when the active one is larger; at most a tenth of keep_bytes.';
comment on column penstock.streams.segment_events is 'A new segment is begun when the active one has more events; null: a tenth of keep_events.';
comment on column penstock.streams.keep_age is 'Segments that ended longer ago are dropped; null: none for their age.';
comment on column penstock.streams.keep_bytes is 'The oldest segments are dropped while the others are larger; null: none for their size.';
comment on column penstock.streams.keep_events is 'The oldest segments are dropped while the others have more events; null: none for their number.';
comment on column penstock.streams.keep_unread is 'Whether a segment is kept, whatever its age and size, until every group has read it.';
comment on column penstock.streams.compact is 'Whether of the events of a key only the latest is kept in segments that are no longer written.';
comment on column penstock.streams.tombstone_age is 'How long compaction keeps an event without data, which says that its key is gone.';
comment on column penstock.streams.max_event_bytes is 'An append with a larger event is refused.';
comment on column penstock.streams.declaration is 'What the application declared last, so that a change made by hand outlives a restart.';

create table penstock.stream_partitions (
    stream integer not null references penstock.streams (id),
    partition integer not null,
    width integer not null,
    segment bigint not null,
    primary key (stream, partition)
)
with (fillfactor = 50);
comment on table penstock.stream_partitions is 'One row for each partition: the lock that makes offsets dense.';
comment on column penstock.stream_partitions.width is 'Number of partitions of the stream; an append that routed its keys for another number is refused.';
comment on column penstock.stream_partitions.segment is 'The segment that is written.';

create table penstock.segments (
    id bigint primary key,
    stream integer not null references penstock.streams (id),
    table_name text not null,
    opened_at timestamptz not null,
    closed_at timestamptz,
    compacted_at timestamptz
);
comment on table penstock.segments is 'Parts of streams, one after another.';
comment on column penstock.segments.table_name is 'Where its events are, in the schema penstock; a table like event_segment.';
comment on column penstock.segments.closed_at is 'When the next one was begun; null: it is being written.';
comment on column penstock.segments.compacted_at is 'When it was compacted last; null: never.';

create index segments_stream on penstock.segments (stream, id);

create table penstock.segment_starts (
    stream integer not null,
    partition integer not null,
    segment bigint not null references penstock.segments (id),
    first_offset bigint not null,
    primary key (stream, partition, segment)
);
comment on table penstock.segment_starts is 'Where each segment begins in each partition; it ends where the next begins.';

create index segment_starts_segment on penstock.segment_starts (segment);

create table penstock.retired_segments (
    table_name text primary key,
    retired_at timestamptz not null
);
comment on table penstock.retired_segments is 'Tables in which nobody looks any more, to be dropped when the last reader has left.';

create table penstock.event_segment (
    partition integer not null,
    first_offset bigint not null,
    events integer not null,
    appended_at timestamptz not null,
    keys text[],
    times timestamptz[],
    headers json[],
    data json[],
    bytes bytea[],
    offsets bigint[],
    primary key (partition, first_offset)
);
comment on table penstock.event_segment is 'The shape of the segments of streams; itself empty. A row is a chunk: events of one partition that follow each other.';
comment on column penstock.event_segment.first_offset is 'Offset of the first event; the others follow, unless the chunk has been compacted.';
comment on column penstock.event_segment.events is 'How many there are; each array has so many elements, or is null when all of them are.';
comment on column penstock.event_segment.appended_at is 'When they were appended, by the clock of the database.';
comment on column penstock.event_segment.times is 'When they happened, by their producer.';
comment on column penstock.event_segment.data is 'Payloads of a stream with the format json; null as element: the key is gone (a tombstone).';
comment on column penstock.event_segment.bytes is 'Payloads of a stream with the format bytes.';
comment on column penstock.event_segment.offsets is 'In a compacted segment: the offsets, which then have gaps.';

do $do$
begin
    -- A log is written and read once each: compression has to be cheap, or not be there. pglz is not cheap.
    alter table penstock.event_segment
        alter column data set compression lz4,
        alter column bytes set compression lz4,
        alter column keys set compression lz4,
        alter column headers set compression lz4;
exception
    when feature_not_supported or invalid_parameter_value then
        alter table penstock.event_segment
            alter column data set storage external,
            alter column bytes set storage external,
            alter column keys set storage external,
            alter column headers set storage external;
end
$do$;

create table penstock.stream_producers (
    stream integer not null references penstock.streams (id),
    producer text not null,
    sequence bigint not null,
    partitions integer[] not null,
    first_offsets bigint[] not null,
    counts integer[] not null,
    seen_at timestamptz not null,
    primary key (stream, producer)
)
with (fillfactor = 50);
comment on table penstock.stream_producers is 'The last batch of each producer that numbers its batches, so that a batch that is sent again is not appended twice.';
comment on column penstock.stream_producers.sequence is 'Number of its last batch.';
comment on column penstock.stream_producers.partitions is 'Where its last batch went: with first_offsets and counts the answer to a repeated call.';

create table penstock.stream_growths (
    stream integer not null references penstock.streams (id),
    width integer not null,
    ends bigint[] not null,
    grown_at timestamptz not null,
    primary key (stream, width)
);
comment on table penstock.stream_growths is 'Each time that a stream got more partitions.';
comment on column penstock.stream_growths.width is 'Number of partitions from then on; the new ones are those from cardinality(ends).';
comment on column penstock.stream_growths.ends is 'Where each of the old partitions ended at that moment.';

create table penstock.stream_groups (
    stream integer not null references penstock.streams (id),
    name text not null,
    group_name text not null unique,
    created_at timestamptz not null,
    primary key (stream, name)
);
comment on table penstock.stream_groups is 'Consumer groups of streams.';
comment on column penstock.stream_groups.group_name is 'The name under which its members share the partitions (see groups): stream/group.';

create table penstock.group_offsets (
    stream integer not null,
    group_id text not null,
    partition integer not null,
    epoch bigint not null default 0,
    revision integer not null default 0,
    next_offset bigint not null,
    committed_at timestamptz,
    paused_at timestamptz,
    paused_because text,
    quarantined boolean not null default false,
    primary key (stream, group_id, partition),
    foreign key (stream, group_id) references penstock.stream_groups (stream, name) on delete cascade
)
with (
    fillfactor = 20,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);
comment on table penstock.group_offsets is 'How far each consumer group is in each partition.';
comment on column penstock.group_offsets.group_id is 'Name of the group in its stream.';
comment on column penstock.group_offsets.epoch is 'Epoch of the slot under which the partition is consumed; a commit under another one is refused.';
comment on column penstock.group_offsets.revision is 'Grows when somebody moves the group to another offset; a commit for an earlier one is refused.';
comment on column penstock.group_offsets.next_offset is 'The next event to be consumed; all below are done.';
comment on column penstock.group_offsets.paused_at is 'Since when the group does not get events of this partition; null: it does.';
comment on column penstock.group_offsets.paused_because is 'Why: what somebody said, or the error of the event that could not be handled.';
comment on column penstock.group_offsets.quarantined is 'Whether a failing event paused it.';

create unlogged table penstock.idle_readers (
    stream integer not null,
    channel text not null,
    since timestamptz not null,
    primary key (stream, channel)
);
comment on table penstock.idle_readers is 'Who waits for events. Appends notify only these; unlogged, since it is a hint.';

create table penstock.schedules (
    name text primary key,
    kind text not null,
    spec text not null,
    next_at timestamptz,
    last_at timestamptz,
    running_by text,
    running_until timestamptz,
    updated_at timestamptz not null,
    constraint schedules_kind_check check (kind in ('every', 'cron'))
);
comment on table penstock.schedules is 'Timers and cron schedules that run once across all workers.';
comment on column penstock.schedules.spec is 'The interval in seconds, or the cron expression with its time zone; when it changes the schedule begins anew.';
comment on column penstock.schedules.next_at is 'When it is due next.';
comment on column penstock.schedules.last_at is 'The time for which it ran last.';
comment on column penstock.schedules.running_by is 'Who runs it now.';
comment on column penstock.schedules.running_until is 'When others take it for dead unless it says so again.';
