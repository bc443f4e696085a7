-- Streams: the tables.
--
-- The life of an event. An append locks the rows of the partitions that it writes to, in order, and puts the events behind
-- the last ones there. No other append to these partitions is possible before it commits or rolls back, so offsets are dense, and
-- the order of offsets is the order of commits: after a reader has read up to an offset, no event appears below it.
-- Events stay until retention drops the segment that they are in; reading changes nothing.
--
-- Invariants that keep this fast:
--
-- * A row holds not one event but a *chunk*: the events of one append for one partition, at most 1,000, in arrays. A
--   batch costs one statement and a row for each partition; an event costs only its bytes.
-- * An append updates no row. The next offset of a partition is not a counter but follows from its last chunk, which is found at
--   the end of an index; a row lock leaves no dead row behind. So a transaction that stays
--   open for long, and holds off vacuum, slows neither appends nor readers.
-- * Segments are tables of their own (events_<number>, like the table event_segment), opened one after another for each
--   stream. Retention drops whole tables: first a segment is retired (its rows in segments and segment_starts go, so that it is
--   no longer found), then, in a later transaction, its table is dropped, when no reader is left in it.
-- * The active segment of a partition changes under the partition's row lock, so each offset is in exactly one segment.
--
-- Groups. A consumer group commits, for each partition, the offset of the next event that it wants, fenced by the epoch of
-- the slot under which the consumer owns the partition (see 0004_groups.sql). A new owner writes its epoch into the row of
-- the partition before it reads the offset there; this waits for a commit that is under way in a handler's transaction, and
-- from then on the old epoch is refused.
--
-- Growth. A key belongs to one of 4,096 buckets, and `routes` says to which partition a bucket goes. With more partitions
-- some buckets move, always from an old partition to a new one. The new partitions begin empty; where the old ones ended then
-- is kept in stream_growths, and a group begins with a new partition only when it has finished the old ones up to there.
--
-- Producers. A producer that numbers its batches has a row with its last one, so that a batch that is sent again is not appended
-- twice. Its name belongs to the database role that appends, and over HTTP to the user too, so that two users can have the same name.
--
-- Loads. A load copies chunks into loaded_chunks (begin_load, end_load). The table is permanent and belongs to the owner of the
-- schema, so that end_load, which runs with the owner's rights, touches nothing that its caller made. A row is seen by no other
-- transaction before end_load appends it and deletes it; what is committed without end_load is pruned after a day.
--
-- Crashes of consumers. An event that crashes its worker must not crash one worker after the other. The method is that of standing jobs
-- (0005_pools.sql). When a member is lost, each of its partitions in which events wait counts a crash, at the offset that the
-- group had reached. After two with at most 1,000 events between them the partition is a suspect: its owner handles its next events
-- while it handles no other suspect (tried), and commits them before it goes on: one at first, then two, four, and so on. When a
-- worker is lost meanwhile, the cause is among those events (doubt), which the next owner handles one by one. An event that
-- crashes its worker alone three times (crashes = 5) is no longer handled, and the consumer does what its policy on_failure says about an event
-- that will not succeed: skip, dead letter, halt, or (also with "retry") quarantine the partition. So a backlog without a
-- cause passes its trial in a dozen commits.
-- As with jobs (0002_jobs.sql), a member that left, or was lost with its node, counts nowhere, and an event that has crashed its worker alone
-- counts no loss at whose time other workers were lost too. Three times, since what else ends a worker does so twice at most before it is
-- a suspect itself, and then has its trials while no other suspect of its process has one.

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
    encrypted boolean not null default false,
    encrypted_at timestamptz,
    declaration jsonb,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    constraint streams_partitions_check check (partitions between 1 and 1024),
    constraint streams_format_check check (format in ('json', 'bytes')),
    constraint streams_compression_check check (compression is null or (compression = 'zstd' and format = 'bytes'))
);
comment on table penstock.streams is 'Streams: ordered, partitioned logs of events.';
comment on column penstock.streams.name is 'Name of the stream.';
comment on column penstock.streams.id is 'Stands for the name in the other tables.';
comment on column penstock.streams.partitions is 'Number of partitions, 0 to partitions - 1; can grow.';
comment on column penstock.streams.routes is 'The partition of each bucket of keys, see bucket_of and partition_of.';
comment on column penstock.streams.format is 'json: events have data; bytes: events have bytes.';
comment on column penstock.streams.compression is
    'zstd: each payload (of the format bytes) is compressed by its producer; null: it is not.';
comment on column penstock.streams.segment_age is
    'A new segment is begun when the active one is older; null: a tenth of keep_age, at most a day.';
comment on column penstock.streams.segment_bytes is
    'A new segment is begun when the active one is larger; at most a tenth of keep_bytes.';
comment on column penstock.streams.segment_events is
    'A new segment is begun when the active one has more events; null: a tenth of keep_events.';
comment on column penstock.streams.keep_age is 'Segments that ended longer ago are dropped; null: none for their age.';
comment on column penstock.streams.keep_bytes is
    'The oldest segments are dropped while the others are larger; null: none for their size.';
comment on column penstock.streams.keep_events is
    'The oldest segments are dropped while the others have more events; null: none for their number.';
comment on column penstock.streams.keep_unread is
    'Whether a segment is kept, whatever its age and size, until every group has read it.';
comment on column penstock.streams.compact is
    'Whether of the events of a key only the latest is kept in segments that are no longer written.';
comment on column penstock.streams.tombstone_age is
    'How long compaction keeps an event without data, which says that its key is gone.';
comment on column penstock.streams.max_event_bytes is 'An append with a larger event is refused.';
comment on column penstock.streams.encrypted is
    'Whether payloads and errors of handlers are stored encrypted: a payload that is not is refused.';
comment on column penstock.streams.encrypted_at is
    'Since when there may be encrypted payloads, also after encryption was turned off; null: there are none.';
comment on column penstock.streams.declaration is
    'What the application declared last, so that a change made by hand outlives a restart.';
comment on column penstock.streams.created_at is 'When it was created.';
comment on column penstock.streams.updated_at is 'When its options last changed.';

create table penstock.stream_partitions (
    stream integer not null references penstock.streams (id),
    partition integer not null,
    width integer not null,
    segment bigint not null,
    primary key (stream, partition)
)
with (fillfactor = 50);
comment on table penstock.stream_partitions is 'One row for each partition: the lock that makes offsets dense.';
comment on column penstock.stream_partitions.stream is 'Id of the stream.';
comment on column penstock.stream_partitions.partition is 'Number of the partition.';
comment on column penstock.stream_partitions.width is
    'Number of partitions of the stream; an append that routed its keys for another number is refused.';
comment on column penstock.stream_partitions.segment is 'The segment that is written.';

create table penstock.segments (
    id bigint primary key,
    stream integer not null references penstock.streams (id),
    table_name text not null,
    opened_at timestamptz not null,
    closed_at timestamptz,
    compacted_at timestamptz,
    dirty_since timestamptz
);
comment on table penstock.segments is 'Parts of streams, one after another.';
comment on column penstock.segments.id is 'Number of the segment, from segment_number.';
comment on column penstock.segments.stream is 'Id of the stream.';
comment on column penstock.segments.table_name is 'Where its events are, in the schema penstock; a table like event_segment.';
comment on column penstock.segments.opened_at is 'When it was begun.';
comment on column penstock.segments.closed_at is 'When the next one was begun; null: it is being written.';
comment on column penstock.segments.compacted_at is 'When it was compacted last; null: never.';
comment on column penstock.segments.dirty_since is
    'Since when it has superseded events that compaction left there because they are few; null: it has none.';

create index segments_stream on penstock.segments (stream, id);

create table penstock.segment_starts (
    stream integer not null,
    partition integer not null,
    segment bigint not null references penstock.segments (id),
    first_offset bigint not null,
    primary key (stream, partition, segment)
);
comment on table penstock.segment_starts is 'Where each segment begins in each partition; it ends where the next begins.';
comment on column penstock.segment_starts.stream is 'Id of the stream.';
comment on column penstock.segment_starts.partition is 'Number of the partition.';
comment on column penstock.segment_starts.segment is 'Number of the segment.';
comment on column penstock.segment_starts.first_offset is 'Offset of its first event in the partition.';

create index segment_starts_segment on penstock.segment_starts (segment);

create table penstock.retired_segments (
    table_name text primary key,
    retired_at timestamptz not null
);
comment on table penstock.retired_segments is 'Tables that are no longer read, to be dropped when the last reader has left.';
comment on column penstock.retired_segments.table_name is 'Name of the table.';
comment on column penstock.retired_segments.retired_at is 'When the segment was retired.';

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
comment on table penstock.event_segment is
    'The shape of the segments of streams; itself empty. A row is a chunk: events of one partition that follow each other.';
comment on column penstock.event_segment.partition is 'Number of the partition.';
comment on column penstock.event_segment.first_offset is
    'Offset of the first event; the others follow, unless the chunk has been compacted.';
comment on column penstock.event_segment.events is
    'How many there are; each array has so many elements, or is null when all of them are.';
comment on column penstock.event_segment.appended_at is 'When they were appended, by the clock of the database.';
comment on column penstock.event_segment.keys is 'Keys of the events; null as element: no key.';
comment on column penstock.event_segment.times is 'When they happened, by their producer.';
comment on column penstock.event_segment.headers is 'Headers of the events: an object of names and texts each.';
comment on column penstock.event_segment.data is
    'Payloads of a stream with the format json; null as element: the key is gone (a tombstone).';
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

create unlogged table penstock.loaded_chunks (
    xid xid8 not null default pg_current_xact_id(),
    place bigint generated always as identity,
    loaded_at timestamptz not null default clock_timestamp(),
    stream text not null,
    partition integer not null,
    events integer not null,
    keys text[],
    times timestamptz[],
    headers json[],
    data json[],
    bytes bytea[],
    constraint loaded_chunks_events_check check (events between 1 and 1000)
);
comment on table penstock.loaded_chunks is
    'Chunks of events that the transaction xid copies into a stream. Unlogged: they live as long as their transaction.';
comment on column penstock.loaded_chunks.xid is
    'The transaction that copied the chunk; only its own end_load appends it. Producers cannot set it.';
comment on column penstock.loaded_chunks.place is 'Order in which the chunks were copied.';
comment on column penstock.loaded_chunks.loaded_at is 'When it was copied.';
comment on column penstock.loaded_chunks.stream is 'Name of the stream.';
comment on column penstock.loaded_chunks.partition is 'As in event_segment.';
comment on column penstock.loaded_chunks.events is 'As in event_segment.';
comment on column penstock.loaded_chunks.keys is 'As in event_segment.';
comment on column penstock.loaded_chunks.times is 'As in event_segment.';
comment on column penstock.loaded_chunks.headers is 'As in event_segment.';
comment on column penstock.loaded_chunks.data is 'As in event_segment.';
comment on column penstock.loaded_chunks.bytes is 'As in event_segment.';

create index loaded_chunks_xid on penstock.loaded_chunks (xid, place);

create table penstock.stream_producers (
    stream integer not null references penstock.streams (id),
    producer text not null,
    role text not null,
    user_name text not null default '',
    sequence bigint not null,
    partitions integer[] not null,
    first_offsets bigint[] not null,
    counts integer[] not null,
    digest numeric,
    seen_at timestamptz not null,
    primary key (stream, producer, role, user_name)
)
with (fillfactor = 50);
comment on table penstock.stream_producers is
    'The last batch of each producer that numbers its batches, so that a batch that is sent again is not appended twice.';
comment on column penstock.stream_producers.stream is 'Id of the stream.';
comment on column penstock.stream_producers.producer is 'Name of the producer.';
comment on column penstock.stream_producers.role is
    'The database role that appends: two roles that use a name do not meet.';
comment on column penstock.stream_producers.user_name is
    'The user of the HTTP API for whom the role appends; empty: the role appends for itself.';
comment on column penstock.stream_producers.sequence is 'Number of its last batch.';
comment on column penstock.stream_producers.partitions is
    'Where its last batch went: with first_offsets and counts the answer to a repeated call.';
comment on column penstock.stream_producers.first_offsets is 'See partitions.';
comment on column penstock.stream_producers.counts is 'See partitions.';
comment on column penstock.stream_producers.digest is
    'Tells its last batch from another one under the same number; null until its first batch is appended.';
comment on column penstock.stream_producers.seen_at is 'When the batch was appended.';

create table penstock.stream_growths (
    stream integer not null references penstock.streams (id),
    width integer not null,
    ends bigint[] not null,
    grown_at timestamptz not null,
    primary key (stream, width)
);
comment on table penstock.stream_growths is 'Each time that a stream got more partitions.';
comment on column penstock.stream_growths.stream is 'Id of the stream.';
comment on column penstock.stream_growths.width is
    'Number of partitions from then on; the new ones are those from cardinality(ends).';
comment on column penstock.stream_growths.ends is 'Where each of the old partitions ended at that moment.';
comment on column penstock.stream_growths.grown_at is 'When it grew.';

create table penstock.stream_groups (
    stream integer not null references penstock.streams (id),
    name text not null,
    group_name text not null unique,
    created_at timestamptz not null,
    primary key (stream, name)
);
comment on table penstock.stream_groups is 'Consumer groups of streams.';
comment on column penstock.stream_groups.stream is 'Id of the stream.';
comment on column penstock.stream_groups.name is 'Name of the group in its stream.';
comment on column penstock.stream_groups.group_name is
    'The name under which its members share the partitions (see groups): stream/group.';
comment on column penstock.stream_groups.created_at is 'When it was declared.';

create table penstock.group_offsets (
    stream integer not null,
    group_id text not null,
    partition integer not null,
    epoch bigint not null default 0,
    revision integer not null default 0,
    next_offset bigint not null,
    committed_at timestamptz,
    paused_at timestamptz,
    pause_reason text,
    quarantined boolean not null default false,
    halt_error text,
    failing_since timestamptz,
    failing_offset bigint,
    failing_attempt integer,
    failing_error text,
    crashes smallint not null default 0,
    crashed_at bigint,
    doubt integer not null default 1000,
    tried integer not null default 0,
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
comment on column penstock.group_offsets.stream is 'Id of the stream.';
comment on column penstock.group_offsets.group_id is 'Name of the group in its stream.';
comment on column penstock.group_offsets.partition is 'Number of the partition.';
comment on column penstock.group_offsets.epoch is
    'Epoch of the slot under which the partition is consumed; a commit under another one is refused.';
comment on column penstock.group_offsets.revision is
    'Grows when the group is moved to another offset; a commit for an earlier one is refused.';
comment on column penstock.group_offsets.next_offset is 'The next event to be consumed; all below are done.';
comment on column penstock.group_offsets.committed_at is 'When next_offset was last committed; null: never.';
comment on column penstock.group_offsets.paused_at is
    'Since when the group does not get events of this partition; null: it does.';
comment on column penstock.group_offsets.pause_reason is
    'The reason: what a caller gave, or the error of the event that could not be handled.';
comment on column penstock.group_offsets.quarantined is 'Whether a failing event paused it.';
comment on column penstock.group_offsets.halt_error is
    'The error at which a consumer halted before the next event; null: none did, or that event is done since.';
comment on column penstock.group_offsets.failing_since is
    'Since when a handler has failed at the event failing_offset; null: none does, or that event is done since.';
comment on column penstock.group_offsets.failing_offset is 'The first event of the batch at which it fails.';
comment on column penstock.group_offsets.failing_attempt is 'The attempt that was noted last. Not every one is.';
comment on column penstock.group_offsets.failing_error is 'Its error.';
comment on column penstock.group_offsets.crashes is
    'Members lost one after the other while the group was near crashed_at. 2: its events are on trial; 3, 4 and 5: the event at crashed_at ended its worker alone, once, twice and three times.';
comment on column penstock.group_offsets.crashed_at is 'How far the group was when a member was lost; null: none was.';
comment on column penstock.group_offsets.doubt is
    'Among how many events from crashed_at on is the one that ended a member, if one did.';
comment on column penstock.group_offsets.tried is
    'How many events of it its owner handles now, and of no other suspect; 0: it is not on trial.';
