-- History: the archive for readers of many rows, and lakes.
--
-- The archive in commit order. Neither a time nor a sequence number follows the order in which transactions become
-- visible: a reader that remembers the highest one it saw skips what commits later with a lower one. So every archived
-- job carries the number of the transaction that archived it, and a reader remembers a snapshot instead (PgQ's method):
-- what is visible in the next snapshot and was not in the last one is the next batch. A transaction that is still
-- running delays nothing: the snapshot names it, and its jobs are in the batch after its commit.
--
-- Runs of workflows are read in the same way: a run has the number of the transaction that ended it.
--
-- The lake. A batch of history becomes files, then rows of lake_files, rollups, run_history and failure_signatures in one
-- transaction that also records the batch in lakes. A file without a row in lake_files is not part of the lake.
--
-- The files are kept until they are deleted by hand. What came back from them into rollups, worker_use, run_history and
-- failure_signatures is for reports and the dashboard, and prune_history deletes it when it is older than the table retention says.

create table penstock.pruned_days (
    day date primary key,
    jobs bigint not null,
    last_xid xid8 not null,
    pruned_at timestamptz not null
);
comment on table penstock.pruned_days is
    'Days that prune has dropped from the archive: how a reader that was away knows that it missed something.';
comment on column penstock.pruned_days.day is 'The day on which the jobs finished.';
comment on column penstock.pruned_days.jobs is 'How many jobs there were.';
comment on column penstock.pruned_days.last_xid is 'The highest transaction number among its jobs.';
comment on column penstock.pruned_days.pruned_at is 'When they were dropped.';

create table penstock.lakes (
    name text primary key,
    uri text not null,
    batch bigint not null default -1,
    seen text not null default '',
    jobs bigint not null default 0,
    guards boolean not null default true,
    erasures bigint not null default 0,
    created_at timestamptz not null,
    updated_at timestamptz not null
);
comment on table penstock.lakes is 'Lakes of history, and the last batch that is in each.';
comment on column penstock.lakes.name is 'Name of the lake.';
comment on column penstock.lakes.uri is 'Folder or bucket in which its files are.';
comment on column penstock.lakes.batch is 'Number of the last batch.';
comment on column penstock.lakes.seen is 'Position in the archive up to which its jobs are in the lake.';
comment on column penstock.lakes.jobs is 'Jobs in the lake.';
comment on column penstock.lakes.erasures is
    'Grows when jobs are erased from it. A batch that was read before that is refused, and read again.';
comment on column penstock.lakes.guards is 'While true, prune drops a day only when the lake has all of its jobs.';
comment on column penstock.lakes.created_at is 'When it was opened first.';
comment on column penstock.lakes.updated_at is 'When the last batch was committed.';

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
    constraint lake_files_kind_check check (kind in ('jobs', 'attempts', 'rollups', 'runs'))
);
comment on table penstock.lake_files is 'The manifest: which files make up a lake. Files that it does not name do not count.';
comment on column penstock.lake_files.lake is 'Name of the lake.';
comment on column penstock.lake_files.kind is 'jobs, attempts, rollups or runs (of workflows).';
comment on column penstock.lake_files.day is 'The day on which its jobs finished.';
comment on column penstock.lake_files.type is 'Job type of its jobs; workflow of its runs.';
comment on column penstock.lake_files.path is 'Below the URI of the lake.';
comment on column penstock.lake_files.batch is 'The batch that wrote it; of a compacted file the last one in it.';
comment on column penstock.lake_files.rows is 'Rows of the file.';
comment on column penstock.lake_files.bytes is 'Size of the file.';

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
comment on column penstock.rollups.lake is 'Name of the lake.';
comment on column penstock.rollups.name is 'Name of the job type.';
comment on column penstock.rollups.minute is 'Start of the minute in which the jobs finished.';
comment on column penstock.rollups.succeeded is 'Jobs that succeeded.';
comment on column penstock.rollups.failed is 'Jobs that failed.';
comment on column penstock.rollups.expired is 'Jobs that expired.';
comment on column penstock.rollups.cancelled is 'Jobs that were cancelled.';
comment on column penstock.rollups.retries is 'Attempts beside the first ones.';
comment on column penstock.rollups.delay_s is 'Sum of the queueing delays: from when an attempt could start to its start.';
comment on column penstock.rollups.run_s is 'Sum of the run times of the last attempts.';
comment on column penstock.rollups.delay_sketch is
    'KLL sketch of the delays (Apache DataSketches, doubles), to be merged over minutes.';
comment on column penstock.rollups.run_sketch is 'KLL sketch of the run times.';
comment on column penstock.rollups.delay_p50 is 'Median of the delays.';
comment on column penstock.rollups.delay_p95 is '95th percentile of the delays.';
comment on column penstock.rollups.delay_p99 is '99th percentile of the delays.';
comment on column penstock.rollups.run_p50 is 'Median of the run times.';
comment on column penstock.rollups.run_p95 is '95th percentile of the run times.';
comment on column penstock.rollups.run_p99 is '99th percentile of the run times.';
comment on column penstock.rollups.hot_keys is 'The keys with the most jobs, and how many.';

create index rollups_minute on penstock.rollups (lake, minute);

create table penstock.worker_use (
    lake text not null references penstock.lakes (name) on delete cascade,
    worker text not null,
    minute timestamptz not null,
    jobs bigint not null,
    busy_s double precision not null,
    primary key (lake, worker, minute)
);
comment on table penstock.worker_use is 'What each worker finished in a minute, and for how many seconds its handlers ran.';
comment on column penstock.worker_use.lake is 'Name of the lake.';
comment on column penstock.worker_use.worker is 'Id of the worker.';
comment on column penstock.worker_use.minute is 'Start of the minute.';
comment on column penstock.worker_use.jobs is 'Jobs that it finished.';
comment on column penstock.worker_use.busy_s is 'Seconds that their last attempts ran.';

create index worker_use_minute on penstock.worker_use (lake, minute);

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
comment on table penstock.failure_signatures is
    'Failed attempts by what went wrong: errors whose messages differ only in numbers, ids and quoted words share a signature.';
comment on column penstock.failure_signatures.lake is 'Name of the lake.';
comment on column penstock.failure_signatures.signature is 'What tells it from the others of its job type.';
comment on column penstock.failure_signatures.name is 'Name of the job type.';
comment on column penstock.failure_signatures.day is 'The day of the failures.';
comment on column penstock.failure_signatures.kind is 'The type of the error, such as ValueError.';
comment on column penstock.failure_signatures.message is 'The message without what varies.';
comment on column penstock.failure_signatures.sample is 'One message as it was.';
comment on column penstock.failure_signatures.sample_id is 'The job of the sample.';
comment on column penstock.failure_signatures.failures is 'How many there were.';
comment on column penstock.failure_signatures.first_at is 'When the first one was.';
comment on column penstock.failure_signatures.last_at is 'When the last one was.';

create index failure_signatures_day on penstock.failure_signatures (lake, day);

create table penstock.run_history (
    lake text not null references penstock.lakes (name) on delete cascade,
    id uuid not null,
    name text not null,
    workflow text not null,
    status penstock.archived_job_status not null,
    retry_of text,
    started_at timestamptz not null,
    finished_at timestamptz not null,
    duration_s double precision not null,
    steps bigint not null,
    shared bigint not null,
    succeeded bigint not null,
    failed bigint not null,
    cancelled bigint not null,
    expired bigint not null,
    primary key (lake, id)
);
comment on table penstock.run_history is 'Runs of workflows that have ended, from the lake, also those that prune has forgotten.';
comment on column penstock.run_history.lake is 'Name of the lake.';
comment on column penstock.run_history.id is 'The run.';
comment on column penstock.run_history.name is 'Id that was given at its start; erased: it named whom an erasure removed.';
comment on column penstock.run_history.workflow is 'Name of the workflow.';
comment on column penstock.run_history.status is 'How it ended.';
comment on column penstock.run_history.retry_of is 'Id of the run that it retried; null: none.';
comment on column penstock.run_history.started_at is 'When it was started.';
comment on column penstock.run_history.finished_at is 'When it ended.';
comment on column penstock.run_history.duration_s is 'Seconds from its start to its end.';
comment on column penstock.run_history.steps is 'How many steps it has.';
comment on column penstock.run_history.shared is 'How many of them succeeded in the run that it retried, and did not run again.';
comment on column penstock.run_history.succeeded is 'How many of the others succeeded.';
comment on column penstock.run_history.failed is 'How many failed.';
comment on column penstock.run_history.cancelled is 'How many were cancelled.';
comment on column penstock.run_history.expired is 'How many expired.';

create index run_history_finished on penstock.run_history (lake, finished_at, id);
create index run_history_workflow on penstock.run_history (lake, workflow, finished_at, id);
