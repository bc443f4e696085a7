-- Spark: staged writes, and fleets.
--
-- The staged write. A Spark task copies rows into staged_jobs, or chunks into staged_events, under a name of its own; when all tasks
-- of a batch are done, one transaction records the batch in sink_epochs and enqueues or appends the rows of exactly those tasks that
-- reported. A repeated batch finds its record and writes nothing, and a task that ran twice counts once. A row of staged_events is a chunk,
-- as it will be in the stream, so that a commit copies rows without reading their contents. Rows carry the role that staged them, so
-- that no role can use or delete the rows of another one.

create unlogged table penstock.staged_jobs (
    writer text not null,
    role name not null default session_user,
    part text not null,
    place bigint not null,
    staged_at timestamptz not null default clock_timestamp(),
    name text not null,
    data text not null,
    id text,
    made uuid,
    key text,
    priority smallint,
    run_after timestamptz,
    expires_at timestamptz,
    unique_key text
);
comment on table penstock.staged_jobs is
    'Jobs on their way from Spark tasks into the queue. Unlogged: the writer counts what it stages, and repeats what a crash has emptied.';
comment on column penstock.staged_jobs.writer is 'The query or the write that they belong to.';
comment on column penstock.staged_jobs.role is
    'The role that staged it, which alone can commit or discard it. Producers cannot set it.';
comment on column penstock.staged_jobs.part is
    'The attempt of a task that wrote them; only parts that are named at the commit count.';
comment on column penstock.staged_jobs.place is 'Order within the part.';
comment on column penstock.staged_jobs.staged_at is 'When it was staged.';
comment on column penstock.staged_jobs.name is 'Name of the job type.';
comment on column penstock.staged_jobs.data is 'The payload, as JSON text.';
comment on column penstock.staged_jobs.id is 'Id of the job; null: made.';
comment on column penstock.staged_jobs.made is
    'The id of the job when id says none: made where the rows are made, in the tasks, since a commit that makes a million takes its time.';
comment on column penstock.staged_jobs.key is 'As in queued_jobs.';
comment on column penstock.staged_jobs.priority is 'As in queued_jobs; null: 0.';
comment on column penstock.staged_jobs.run_after is 'As in queued_jobs; null: at once.';
comment on column penstock.staged_jobs.expires_at is 'As in queued_jobs.';
comment on column penstock.staged_jobs.unique_key is 'As in queued_jobs.';

create index staged_jobs_part on penstock.staged_jobs (writer, part, place);

create unlogged table penstock.staged_events (
    writer text not null,
    role name not null default session_user,
    part text not null,
    place bigint not null,
    staged_at timestamptz not null default clock_timestamp(),
    stream text not null,
    width integer,
    partition integer not null,
    events integer not null,
    keys text[],
    times timestamptz[],
    headers text[],
    data text[],
    bytes bytea[],
    constraint staged_events_events_check check (events between 1 and 1000)
);
comment on table penstock.staged_events is
    'Events on their way from Spark tasks into streams. Unlogged: the writer counts what it stages, and repeats what a crash has emptied.';
comment on column penstock.staged_events.writer is 'The query or the write that they belong to.';
comment on column penstock.staged_events.role is
    'The role that staged it, which alone can commit or discard it. Producers cannot set it.';
comment on column penstock.staged_events.part is
    'The attempt of a task that wrote them; only parts that are named at the commit count.';
comment on column penstock.staged_events.place is 'Order within the part.';
comment on column penstock.staged_events.staged_at is 'When it was staged.';
comment on column penstock.staged_events.stream is 'Name of the stream.';
comment on column penstock.staged_events.width is
    'The number of partitions that the keys were routed for; null: the writer chose the partition itself.';
comment on column penstock.staged_events.partition is 'As in event_segment.';
comment on column penstock.staged_events.events is 'As in event_segment.';
comment on column penstock.staged_events.keys is 'As in event_segment.';
comment on column penstock.staged_events.times is 'As in event_segment.';
comment on column penstock.staged_events.headers is 'As in event_segment, as text.';
comment on column penstock.staged_events.data is 'As in event_segment, as text.';
comment on column penstock.staged_events.bytes is 'As in event_segment.';

create index staged_events_part on penstock.staged_events (writer, part, place);

create table penstock.sink_epochs (
    writer text not null,
    target text not null,
    role text not null,
    query text,
    epoch bigint not null,
    jobs bigint not null,
    committed_at timestamptz not null,
    offsets jsonb,
    by_column boolean not null default false,
    handed_over boolean not null default false,
    primary key (writer, target, role)
);
comment on table penstock.sink_epochs is
    'The last batch that each writer has committed to each of its targets; it and all before it are never written there again.';
comment on column penstock.sink_epochs.writer is 'Name that the option writer gave, or one made of the id of the query.';
comment on column penstock.sink_epochs.target is
    'What is written: a job type (job invoice), a stream (stream orders), or jobs or streams where a column says which.';
comment on column penstock.sink_epochs.role is
    'The database role that writes: two roles that use a name do not meet.';
comment on column penstock.sink_epochs.query is 'Id of the streaming query, which is in its checkpoint; null: a batch write.';
comment on column penstock.sink_epochs.epoch is 'Number of the batch.';
comment on column penstock.sink_epochs.jobs is 'Rows of the batch.';
comment on column penstock.sink_epochs.committed_at is 'When the batch was committed.';
comment on column penstock.sink_epochs.offsets is
    'Up to where the batch had read the sources of the query, in their order, as its checkpoint has it; null: not known.';
comment on column penstock.sink_epochs.by_column is
    'Whether a column of the rows names the target. The write itself then has a row too, with the target jobs or streams.';
comment on column penstock.sink_epochs.handed_over is
    'Whether the query is refused from now on, and the next query that writes under the name takes it (hand_over_writer).';

create table penstock.fleets (
    name text primary key,
    target text not null,
    wanted integer not null,
    draining boolean not null default false,
    started_at timestamptz not null
);
comment on table penstock.fleets is 'Fleets of workers that a cluster runs.';
comment on column penstock.fleets.name is 'Name of the fleet.';
comment on column penstock.fleets.target is 'MODULE:APP of the workers.';
comment on column penstock.fleets.wanted is 'How many workers it is to have.';
comment on column penstock.fleets.draining is 'Set to tell the workers to stop.';
comment on column penstock.fleets.started_at is 'When it was started.';

create table penstock.fleet_members (
    fleet text not null references penstock.fleets (name) on delete cascade,
    worker text not null,
    host text not null,
    python text not null,
    draining boolean not null default false,
    seen_at timestamptz not null,
    primary key (fleet, worker)
);
comment on table penstock.fleet_members is 'Which worker serves which fleet, refreshed every second.';
comment on column penstock.fleet_members.fleet is 'Name of the fleet.';
comment on column penstock.fleet_members.worker is 'Id of the worker.';
comment on column penstock.fleet_members.host is 'Name of its machine.';
comment on column penstock.fleet_members.python is 'Version of its Python.';
comment on column penstock.fleet_members.draining is 'Set to tell this worker to stop.';
comment on column penstock.fleet_members.seen_at is 'When it last said that it serves the fleet.';
