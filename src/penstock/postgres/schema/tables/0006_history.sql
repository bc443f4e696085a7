-- History: what the data engine reads and writes beside the queue.
--
-- The archive in commit order. Neither a time nor a sequence number follows the order in which transactions become
-- visible: a reader that remembers the highest one it saw skips what commits later with a lower one. So every archived
-- job carries the number of the transaction that archived it, and a reader remembers a snapshot instead (PgQ's method):
-- what is visible in the next snapshot and was not in the last one is the next batch. A transaction that is still
-- running holds nothing up; it is named in the snapshot, and its jobs are in the batch after its commit.
--
-- The staged write. A Spark task copies rows into staged_jobs under a name of its own; when all tasks of a batch are
-- done, one transaction notes the batch in sink_epochs and enqueues the rows of exactly those tasks whose word counts.
-- A batch that is repeated finds itself noted, and a task that ran twice counts once.
--
-- The lake. A batch of history becomes files, then rows of lake_files, rollups and failure_signatures in one
-- transaction that also notes the batch in lakes. A file that is not noted is not part of the lake.

alter table penstock.archived_jobs add column xid xid8 not null default pg_current_xact_id();
comment on column penstock.archived_jobs.xid is 'The transaction that archived the job: what orders the archive by commit.';
create index archived_jobs_xid on penstock.archived_jobs (xid);

create unlogged table penstock.idle_history_readers (
    reader text primary key,
    since timestamptz not null
);
comment on table penstock.idle_history_readers is 'Readers of the archive that wait for a notification; settles notify only while there are any. Unlogged, since it is a hint.';

create table penstock.pruned_days (
    day date primary key,
    jobs bigint not null,
    last_xid xid8 not null,
    pruned_at timestamptz not null
);
comment on table penstock.pruned_days is 'Days that prune has dropped from the archive: how a reader that was away knows that it missed something.';
comment on column penstock.pruned_days.last_xid is 'The highest transaction number among its jobs.';

create unlogged table penstock.staged_jobs (
    writer text not null,
    part text not null,
    place bigint not null,
    staged_at timestamptz not null default clock_timestamp(),
    name text not null,
    data text not null,
    id text,
    key text,
    priority smallint,
    run_after timestamptz,
    expires_at timestamptz,
    unique_key text
);
comment on table penstock.staged_jobs is 'Jobs on their way from Spark tasks into the queue. Unlogged: whoever stages counts, and repeats what a crash has emptied.';
comment on column penstock.staged_jobs.writer is 'The query or the write that they belong to.';
comment on column penstock.staged_jobs.part is 'The attempt of a task that wrote them; only parts that are named at the commit count.';
comment on column penstock.staged_jobs.place is 'Order within the part.';
create index staged_jobs_part on penstock.staged_jobs (writer, part, place);

create table penstock.sink_epochs (
    writer text primary key,
    epoch bigint not null,
    jobs bigint not null,
    committed_at timestamptz not null
);
comment on table penstock.sink_epochs is 'The last batch that each writer has committed; it and all before it are never written again.';

create table penstock.lakes (
    name text primary key,
    uri text not null,
    batch bigint not null default -1,
    seen text not null default '',
    jobs bigint not null default 0,
    guards boolean not null default true,
    created_at timestamptz not null,
    updated_at timestamptz not null
);
comment on table penstock.lakes is 'Lakes of history, and the last batch that is in each.';
comment on column penstock.lakes.seen is 'Position in the archive up to which its jobs are in the lake.';
comment on column penstock.lakes.guards is 'While true, prune drops a day only when the lake has all of its jobs.';

create table penstock.lake_files (
    lake text not null references penstock.lakes (name) on delete cascade,
    kind text not null,
    day date not null,
    type text not null,
    path text not null,
    batch bigint not null,
    rows bigint not null,
    bytes bigint not null,
    primary key (lake, path),
    constraint lake_files_kind_check check (kind in ('jobs', 'attempts', 'rollups'))
);
comment on table penstock.lake_files is 'The manifest: which files make up a lake. Files that it does not name do not count.';
comment on column penstock.lake_files.path is 'Below the URI of the lake.';
comment on column penstock.lake_files.batch is 'The batch that wrote it; of a compacted file the last one in it.';
create index lake_files_day on penstock.lake_files (lake, kind, day);

create table penstock.rollups (
    lake text not null references penstock.lakes (name) on delete cascade,
    name text not null,
    minute timestamptz not null,
    succeeded bigint not null,
    failed bigint not null,
    expired bigint not null,
    cancelled bigint not null,
    retries bigint not null,
    delay_s double precision not null,
    run_s double precision not null,
    delay_sketch bytea,
    run_sketch bytea,
    delay_p50 double precision,
    delay_p95 double precision,
    delay_p99 double precision,
    run_p50 double precision,
    run_p95 double precision,
    run_p99 double precision,
    hot_keys jsonb not null default '{}',
    primary key (lake, name, minute)
);
comment on table penstock.rollups is 'Finished jobs by type and minute, from the lake: counts, delays and run times in seconds.';
comment on column penstock.rollups.delay_s is 'Sum of the queueing delays: from when an attempt could start to its start.';
comment on column penstock.rollups.run_s is 'Sum of the run times of the last attempts.';
comment on column penstock.rollups.delay_sketch is 'KLL sketch of the delays (Apache DataSketches, doubles), to be merged over minutes.';
comment on column penstock.rollups.hot_keys is 'The keys with the most jobs, and how many.';

create table penstock.worker_use (
    lake text not null references penstock.lakes (name) on delete cascade,
    worker text not null,
    minute timestamptz not null,
    jobs bigint not null,
    busy_s double precision not null,
    primary key (lake, worker, minute)
);
comment on table penstock.worker_use is 'What each worker finished in a minute, and for how many seconds its handlers ran.';

create table penstock.failure_signatures (
    lake text not null references penstock.lakes (name) on delete cascade,
    signature text not null,
    name text not null,
    day date not null,
    kind text not null,
    message text not null,
    sample text not null,
    sample_id uuid not null,
    failures bigint not null,
    first_at timestamptz not null,
    last_at timestamptz not null,
    primary key (lake, name, signature, day)
);
comment on table penstock.failure_signatures is 'Failed attempts by what went wrong: errors whose messages differ only in numbers, ids and quoted words share a signature.';
comment on column penstock.failure_signatures.kind is 'The type of the error, such as ValueError.';
comment on column penstock.failure_signatures.message is 'The message without what varies.';
comment on column penstock.failure_signatures.sample is 'One message as it was.';
comment on column penstock.failure_signatures.sample_id is 'The job of the sample.';

create table penstock.fleets (
    name text primary key,
    target text not null,
    wanted integer not null,
    draining boolean not null default false,
    started_at timestamptz not null
);
comment on table penstock.fleets is 'Fleets of workers that a cluster runs.';
comment on column penstock.fleets.target is 'MODULE:APP of the workers.';
comment on column penstock.fleets.draining is 'Set to tell the workers to stop.';

create table penstock.fleet_members (
    fleet text not null references penstock.fleets (name) on delete cascade,
    worker text not null,
    host text not null,
    python text not null,
    seen_at timestamptz not null,
    primary key (fleet, worker)
);
comment on table penstock.fleet_members is 'Which worker serves which fleet, refreshed every second.';
