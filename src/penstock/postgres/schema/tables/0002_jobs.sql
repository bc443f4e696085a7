-- Jobs: the tables.
--
-- The life of a job. An enqueue writes one row to queued_jobs. When its time has come the row carries a number,
-- seq, and stands in the ready queue of its type; while its time lies ahead (run_after) seq is null and the row
-- stands among the deferred, which a claim never touches. A claim gives a batch of ready rows to a worker: it
-- sets their status to in-progress and their lease to one new row in leases. The worker settles its jobs in
-- batches too: a settled job leaves queued_jobs and enters archived_jobs in one statement, or, when it failed and
-- has attempts left, goes back to the deferred ones. When the last job of a lease is settled the lease is gone.
-- A lease that ends otherwise (its time is up, or its worker is dead) is recovered by any other worker.
-- A job that cannot be read, or that crashes the workers which run it alone, is archived as failed, with the reason quarantined.
--
-- Attempts. A job has an attempt (1, 2, 3, ...) and the number of attempts that it may have, max_attempts; so has a finished job, whose
-- attempt is the last one that it had, 0 when it never started. A job with its own max_attempts or time_limit has them in options; every
-- other job has null there, which takes no space. The archive keeps them, so that a replay has them too. The trace context of a job
-- (functions/core/tracing.sql) stands there as well, and is not given to a replay. A handler that cannot continue yet
-- snoozes its job: the job goes back among the deferred ones without having used up an attempt, and snoozed_at says that it waits for that
-- reason, until it is claimed and ends otherwise.
--
-- Durable steps. A handler that sleeps, or waits for a signal or for children, suspends its job: it goes back among the deferred ones under the
-- name of what it waits for (waits_for), with the same attempt, until its time has come or penstock.resume_jobs makes it ready. The head of
-- tables/0013_workflows.sql has the rest.
--
-- Logs. A worker writes the lines that its handlers log about once a second, and the last ones before it settles the job. They stand in the
-- row of the job, oldest first, and go with it into the archive. penstock.append_log keeps the newest 100, of each the first 1,000
-- characters.
--
-- A job that its handler finishes in a transaction of its own. penstock.finish archives a job in the transaction of its caller, together
-- with what the handler did there. That transaction may be long, and the lease is shared with the other jobs of its claim, so it does not
-- touch the lease: every settle of another job of the claim would wait for it. It leaves a row in finished_jobs instead. When the
-- transaction has committed, the worker confirms it, or the maintenance of any worker finds it: the row goes, and the job is taken off its
-- lease, once.
--
-- Unique keys with a period. A job that is enqueued with a unique key and a period (unique_for) gets a row in unique_periods. The row holds
-- the key until the period is over and the job has ended, whichever comes last: an enqueue with the same key and a period returns that job.
-- The next enqueue after that takes the row over; maintenance deletes rows that hold nothing any more. An enqueue without a period neither
-- reads nor writes this table.
--
-- Encryption. An encrypted document is stored as an envelope (docs/encryption.md), {"penstock": {"v": 1, "kid": "...", "c": "..."}}, in the
-- place of the document. The database has no key and reads none: it knows by the declaration of the type that a document has to be an
-- envelope, refuses what is not (functions/core/envelopes.sql), and gives a job only to a worker that says that it has the key. encrypted_at
-- stays when encryption is turned off again: from then on both forms may wait, and are read.
--
-- Bounds. A type can have a bound on the jobs that wait, and a pool one on those of each key: an enqueue beyond a bound is refused before
-- anything is written. A type without a bound pays nothing for it.
--
-- Dropped types. An enqueue locks nothing of its type, so one may commit after the type was dropped. The name therefore stays in
-- dropped_types for a while, in which maintenance archives such jobs as cancelled: functions/jobs/dropping.sql.
--
-- Invariants that keep this fast:
--
-- * A claim is a HOT update: no index holds a column that a claim changes (status, lease, updated_at), neither as
--   a key nor in its predicate, and pages are filled to 40 % so that every row has room for its second version.
--   The one exception is a job with a unique key: claiming it frees the key, which must leave the index.
-- * What the jobs of a batch share (worker, start, end) is stored once in leases, not in each job. The number of jobs in flight
--   of a type is therefore the sum over a few lease rows, exact and cheap.
-- * seq is drawn only after the transaction has its xid (see enqueue_many), so that a worker can tell from a
--   snapshot which numbers can no longer appear, and need not look below them again.
-- * The archive is partitioned by retention class, and within a class by time, and is dropped by partition. A claim writes the class of jobs
--   that succeed into the lease, so that a settle looks up nothing.
-- * The first job with a new priority records it in type_priorities, and the first large payload of a type in large_payloads. Neither has a
--   unique index: it would make every other transaction that uses the priority wait for the end of that one, which is the caller's
--   and may be long. So a row may exist more than once, at most once for each transaction that was the first at the same time.
--
-- Crashes. Nothing shows which of the jobs in flight crashed a worker, so none of them fails for it: a job that was lost with its
-- worker goes back to its place, and uses up none of its attempts (max_attempts grows instead, so that the number of the attempt
-- grows). After its second loss the job is a suspect: it waits for a trial (crashes = 2, run_after in the year 9999: no claim sees it).
-- The suspects of one worker are divided into trials, one for each live worker and at least two. A worker that has nothing else in
-- flight runs the jobs of one trial side by side, and nothing else (crashes = 3). Those that end, however they end, are ordinary jobs
-- again. When the worker is lost, those that had not ended are divided into trials again. So innocents take as long as they need
-- themselves, and a cause is alone after few crashes. Only a job that was alone on trial counts the loss of its worker (lone_crashes);
-- with max_crashes of its type it is archived as failed with the reason quarantined. In a pool that blocks, a suspect keeps its number,
-- and so holds its key. When no worker is free for a trial, the suspects of one that is not alone go back as ordinary jobs.
--
-- A loss of a worker says nothing about its jobs, and counts nowhere, when its node went with it: other workers of the node had
-- heartbeats, and all of them went silent too (loss_speaks in functions/worker/losses.sql). The node of a worker is its supervisor, or
-- its machine when it has none. Nor does an orderly end count. A loss that would convict a job, and each after the first lone one, also
-- needs that no other worker was lost at the same time: what ends several workers at once is not the job. So that two causes do not
-- excuse each other, the jobs that have crashed alone are tried one at a time over all workers.
--
-- A job that may start only once needs more: its column begun is set before it starts. A worker or member that promises to do so has a
-- row in holders; when it is lost, the jobs that it had not begun have not started, and go back unchanged. The jobs of any other client
-- count as started when they are claimed. A dispatcher runs no jobs but sends them to a service, under their attempt numbers: its loss
-- uses up the attempts that it had begun, since the service has seen their numbers, and does not make any job a suspect.
--
-- Workers take turns at the places of a limit. A type with a concurrency or a rate limit has a number of places over all workers. The
-- worker that settles a job could take the place that it frees at once, while the others look only at intervals. Therefore a worker that
-- found no place waits with a ticket (place_waiters). A claim leaves their share to the workers with earlier tickets. A settle that frees
-- places, or a claim that leaves some, notifies the worker that has waited longest. A worker that took a place and wants more waits
-- behind all others; one that got all that it can use waits no more. An offer that is not taken within a second is void, so that a
-- worker that crashed or is suspended delays no other. Claims, which the lock of the type puts in one order, and waiting workers write
-- the rows; a settle only reads them, since it may be part of a long transaction of a caller.

create type penstock.delivery_strategy as enum ('at_least_once', 'at_most_once');
create type penstock.job_status as enum ('queued', 'in-progress');
create type penstock.archived_job_status as enum ('succeeded', 'failed', 'expired', 'cancelled');

create sequence penstock.job_seq as bigint;
comment on sequence penstock.job_seq is 'The place of a job in the ready queue of its type and priority.';

create sequence penstock.lease_id as bigint;
comment on sequence penstock.lease_id is 'Numbers leases; a number is never used twice, so it can fence.';

create sequence penstock.place_ticket as bigint;
comment on sequence penstock.place_ticket is 'Orders the workers that wait for a place of a limit.';

create table penstock.jobs (
    name text primary key,
    delivery_strategy penstock.delivery_strategy not null default 'at_least_once',
    max_attempts smallint not null default 5,
    concurrency integer,
    max_waiting integer,
    max_crashes integer default 3,
    visibility_timeout interval not null default '5 minutes',
    time_limit interval,
    backoff_base interval not null default '2 seconds',
    backoff_factor double precision not null default 2,
    backoff_cap interval not null default '1 hour',
    backoff_jitter double precision not null default 0.1,
    rate_limit integer,
    rate_period interval,
    keep_succeeded interval,
    keep_failed interval,
    keep_result boolean not null default false,
    paused_at timestamptz,
    topic text,
    encrypted boolean not null default false,
    encrypted_at timestamptz,
    declaration jsonb,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    constraint jobs_max_attempts_check check (max_attempts > 0),
    constraint jobs_concurrency_check check (concurrency >= 0),
    constraint jobs_max_crashes_check check (max_crashes > 0)
);
comment on table penstock.jobs is 'Job types: how the jobs of a name are delivered, retried and limited.';
comment on column penstock.jobs.name is 'Name of the job type.';
comment on column penstock.jobs.delivery_strategy is 'at_least_once retries; at_most_once starts a job once, whatever happens.';
comment on column penstock.jobs.max_attempts is 'How often a job is started before it is archived as failed.';
comment on column penstock.jobs.concurrency is 'Most jobs in flight at once over all workers; null: no limit, 0: paused.';
comment on column penstock.jobs.max_waiting is
    'Most jobs that wait, ready or deferred: an enqueue beyond it is refused; null: no limit.';
comment on column penstock.jobs.max_crashes is
    'How many workers may be lost while they run nothing but a job before it is archived as failed with the reason quarantined; null: any number.';
comment on column penstock.jobs.visibility_timeout is
    'How long a claimed job belongs to its worker unless the lease is extended.';
comment on column penstock.jobs.time_limit is 'How long a handler may run; null: a little less than the visibility timeout.';
comment on column penstock.jobs.backoff_base is 'Delay before the first retry.';
comment on column penstock.jobs.backoff_factor is 'Each further retry waits this many times longer.';
comment on column penstock.jobs.backoff_cap is 'The longest delay before a retry.';
comment on column penstock.jobs.backoff_jitter is 'Share of the delay that is random, 0 to 1: 0.1 is plus or minus 10 %.';
comment on column penstock.jobs.rate_limit is 'Most jobs started within any rate_period over all workers; null: no limit.';
comment on column penstock.jobs.rate_period is 'The period of rate_limit.';
comment on column penstock.jobs.keep_succeeded is 'How long jobs that succeeded are kept in the archive; null: as long as the table retention says.';
comment on column penstock.jobs.keep_failed is
    'How long jobs that failed, expired or were cancelled are kept in the archive; null: as long as the table retention says.';
comment on column penstock.jobs.keep_result is 'Whether what a handler returns is kept in archived_jobs.result.';
comment on column penstock.jobs.paused_at is 'Since when the type is paused; null: it is not.';
comment on column penstock.jobs.topic is 'The topic of which this is the queue of a subscriber; null: a job type of its own.';
comment on column penstock.jobs.encrypted is
    'Whether payloads, results, progress and errors are stored encrypted: a document that is not is refused.';
comment on column penstock.jobs.encrypted_at is 'Since when there may be encrypted documents; null: there are none.';
comment on column penstock.jobs.declaration is
    'What the application declared last, so that a change made by hand outlives a restart.';
comment on column penstock.jobs.created_at is 'When the type was created.';
comment on column penstock.jobs.updated_at is 'When its options last changed.';

-- Whether any type is encrypted is asked by calls that otherwise need no look at the types.
create index jobs_encrypted on penstock.jobs (name) where encrypted;

create table penstock.dropped_types (
    name text primary key,
    xid xid8 not null,
    dropped_at timestamptz not null,
    look_at timestamptz not null
);
comment on table penstock.dropped_types is
    'Job types that were dropped and not created again, for a year: an enqueue does not create them, and maintenance cancels what transactions enqueue that saw them before.';
comment on column penstock.dropped_types.name is 'Name of the job type.';
comment on column penstock.dropped_types.xid is 'The transaction that dropped it.';
comment on column penstock.dropped_types.dropped_at is 'When it was dropped.';
comment on column penstock.dropped_types.look_at is 'When maintenance looks for such jobs again.';

create index dropped_types_due on penstock.dropped_types (look_at);

create table penstock.type_priorities (
    name text not null,
    priority smallint not null
);
comment on table penstock.type_priorities is
    'Which priorities each job type has ever used: a claim looks into each, lowest first. A priority may be noted more than once.';
comment on column penstock.type_priorities.name is 'Name of the job type.';
comment on column penstock.type_priorities.priority is 'A priority that its jobs have had.';

create index type_priorities_name on penstock.type_priorities (name, priority);

create table penstock.large_payloads (
    name text not null
);
comment on table penstock.large_payloads is
    'Job types and topics that ever had a payload above 16 KiB: a claim of these weighs what it takes. A name may be noted more than once: at most as often as transactions were the first at the same time.';
comment on column penstock.large_payloads.name is 'Name of the job type or topic.';

create index large_payloads_name on penstock.large_payloads (name);

create table penstock.queued_jobs (
    seq bigint,
    lease bigint,
    message bigint,
    run_after timestamptz not null,
    expires_at timestamptz,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    cancel_requested_at timestamptz,
    snoozed_at timestamptz,
    id uuid not null,
    status penstock.job_status not null default 'queued',
    slot integer,
    attempt smallint not null,
    max_attempts smallint not null,
    priority smallint not null default 0,
    crashes smallint not null default 0,
    snoozes smallint,
    coalesces boolean not null default false,
    begun boolean not null default false,
    name text not null,
    key text,
    unique_key text,
    data jsonb not null,
    errors jsonb,
    progress jsonb,
    options jsonb,
    log jsonb,
    replay_of uuid,
    awaited boolean,
    workflow uuid,
    waits_for text,
    trial bigint,
    lone_crashes smallint,
    constraint queued_jobs_pkey primary key (id),
    constraint queued_jobs_attempt_check check (attempt > 0)
)
with (
    fillfactor = 40,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = 200000,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 100000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);
comment on table penstock.queued_jobs is 'Jobs that are not finished: ready, deferred, or in progress. Small and hot.';
comment on column penstock.queued_jobs.seq is 'Place in the ready queue of (name, priority); null: deferred until run_after.';
comment on column penstock.queued_jobs.lease is 'The lease under which a worker holds the job; null while queued.';
comment on column penstock.queued_jobs.message is
    'The topic message of which this is a copy, whose payload it has; then data is null in JSON.';
comment on column penstock.queued_jobs.run_after is 'Not to be started before.';
comment on column penstock.queued_jobs.expires_at is 'No worker gets it afterwards: archived as expired when it waits then, also for a retry or in a step; null: never.';
comment on column penstock.queued_jobs.created_at is 'When it was enqueued.';
comment on column penstock.queued_jobs.updated_at is 'When the row was last written.';
comment on column penstock.queued_jobs.cancel_requested_at is 'When a cancellation was asked for while it was in progress.';
comment on column penstock.queued_jobs.snoozed_at is
    'When its handler put it off until run_after; null: it does not wait for that.';
comment on column penstock.queued_jobs.id is 'Made by the client (UUIDv7 by default); enqueueing it again is the same job.';
comment on column penstock.queued_jobs.status is 'queued, or in-progress while a worker holds it.';
comment on column penstock.queued_jobs.slot is 'In a pool: the slot of its key; null: a job of a plain queue.';
comment on column penstock.queued_jobs.attempt is
    'Number of the attempt that runs or comes next, from 1; fences results of earlier attempts.';
comment on column penstock.queued_jobs.max_attempts is
    'Attempts that the job may have: as it was enqueued, and one more for each that was lost with its worker.';
comment on column penstock.queued_jobs.priority is '-100 to 100, lower first, within a type.';
comment on column penstock.queued_jobs.crashes is
    'Workers lost while they held the job. 2: it is a suspect and waits for its trial (run_after is in the year 9999); 3: it is on trial.';
comment on column penstock.queued_jobs.snoozes is 'How often its handler put it off; null: never.';
comment on column penstock.queued_jobs.coalesces is 'While true, an enqueue with the same unique key returns this job.';
comment on column penstock.queued_jobs.begun is 'Whether its holder, which promised to say so, has begun to start it.';
comment on column penstock.queued_jobs.name is 'Name of the job type.';
comment on column penstock.queued_jobs.key is 'Whose job it is (a tenant, an account); orders jobs in a pool.';
comment on column penstock.queued_jobs.unique_key is 'Coalescing key, see coalesces; in a pool within the jobs of one key.';
comment on column penstock.queued_jobs.data is 'The payload.';
comment on column penstock.queued_jobs.errors is 'One object for each failed attempt, oldest first; null: none failed.';
comment on column penstock.queued_jobs.progress is 'What the handler reported last.';
comment on column penstock.queued_jobs.options is
    'Its own options, in place of those of its type: max_attempts, time_limit (in seconds); its trace context, traceparent; and the jobs for whose end it waited (after, when); null: it has none.';
comment on column penstock.queued_jobs.log is
    'The newest lines that its handler logged, oldest first: objects with at, attempt and line; null: none.';
comment on column penstock.queued_jobs.replay_of is 'The job that this one repeats.';
comment on column penstock.queued_jobs.awaited is
    'Whether jobs in waiting_jobs wait for its end, so that what ends it writes a tick; null: none does.';
comment on column penstock.queued_jobs.workflow is 'The job group of which it is a child, whose end writes a tick too; null: none.';
comment on column penstock.queued_jobs.waits_for is
    'The step for which its handler has suspended it: its sleep, its wait for a signal, or its children; null: it is not suspended. Status waiting until run_after.';

comment on column penstock.queued_jobs.trial is 'Of a suspect: its trial, whose jobs run beside no others; null: it is on trial alone.';
comment on column penstock.queued_jobs.lone_crashes is
    'Workers lost while they ran nothing but this job; null: none. Over all workers one such job at a time is on trial.';

-- The deferred jobs, in order of time over all types.
create index queued_jobs_deferred on penstock.queued_jobs (run_after) where seq is null;
-- The deferred jobs of a type, or of a key in a pool. Only deferred jobs are in it, so that claims do not write it.
create index queued_jobs_deferred_of_type on penstock.queued_jobs (name, key collate "C", id) where seq is null;
create index queued_jobs_expiring on penstock.queued_jobs (expires_at) where expires_at is not null;
-- The ready queue of plain queues. Only enqueue, promotion and retries write it, never a claim.
create unique index queued_jobs_ready on penstock.queued_jobs (name, priority, seq) where seq is not null and slot is null;
-- The ready queues of pools: one for each key, in which its jobs stand in order.
create index queued_jobs_keyed on penstock.queued_jobs (name, slot, key collate "C", seq) where seq is not null and slot is not null;
-- Suspects that wait for their trial.
-- By their time and not by `crashes`: every change of a job compares the old and the new value of each column that an index knows,
-- and this time is such a column already.
create index queued_jobs_isolated on penstock.queued_jobs (name, seq) where run_after = '9999-01-01 00:00:00+00';
-- In a pool a unique key is of its key: the same unique key of another key is another job.
create unique index queued_jobs_unique on penstock.queued_jobs (name, unique_key, (case when slot is not null then key else '' end)) where coalesces;
-- The replays of a job can be found from the job.
create index queued_jobs_replays on penstock.queued_jobs (replay_of) where replay_of is not null;
-- The jobs of a workflow. A job of none, whose column is null, costs a look at a bit.
create index queued_jobs_workflow on penstock.queued_jobs (workflow, id) where workflow is not null;
-- The jobs that wait in a durable step, among those that do not. Only a suspension and its end change this column, which is null in a
-- plain job.
create index queued_jobs_suspended on penstock.queued_jobs (id) where waits_for is not null;

create table penstock.leases (
    id bigint primary key,
    first_seq bigint not null,
    last_seq bigint not null,
    renews bigint,
    origin bigint,
    started_at timestamptz not null,
    expires_at timestamptz not null,
    open_jobs integer not null,
    priority smallint not null,
    keep smallint,
    on_trial integer,
    name text not null,
    worker text not null,
    jobs uuid[],
    cancelled uuid[],
    constraint leases_open_jobs_check check (open_jobs >= 0)
)
with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off,
    toast.autovacuum_vacuum_scale_factor = 0,
    toast.autovacuum_vacuum_threshold = 5000
);
comment on table penstock.leases is 'One row for each batch of jobs that a worker claimed and has not settled entirely.';
comment on column penstock.leases.id is 'Number of the lease, from lease_id.';
comment on column penstock.leases.first_seq is 'Its jobs are those of (name, priority) from here to last_seq that point to it.';
comment on column penstock.leases.last_seq is 'See first_seq.';
comment on column penstock.leases.renews is
    'The lease from which an extend took its jobs: by it a repeated extend, whose first answer was lost, is recognised.';
comment on column penstock.leases.origin is
    'The lease of the claim, from which extends took its jobs: who got this number with the job holds it still, however often it was extended. Null: it is that of a claim itself.';
comment on column penstock.leases.started_at is 'When the batch was claimed.';
comment on column penstock.leases.expires_at is 'When the jobs stop belonging to the worker.';
comment on column penstock.leases.open_jobs is 'Jobs not settled yet; their sum over a type is its number of jobs in flight.';
comment on column penstock.leases.keep is 'Retention class of its jobs that succeed; null: look it up.';
comment on column penstock.leases.on_trial is 'How many jobs are on trial together; null: its jobs are no suspects.';
comment on column penstock.leases.priority is 'Priority of its jobs.';
comment on column penstock.leases.name is 'Name of the job type.';
comment on column penstock.leases.worker is 'Id of the worker, or of the member of a pool, that holds it.';
comment on column penstock.leases.jobs is 'In a pool: the jobs of the batch, which stand in many key queues; null in a plain queue.';
comment on column penstock.leases.cancelled is 'Jobs of this lease that are to be cancelled; the heartbeat tells the worker.';

-- Outside the row and uncompressed: to compress the ids costs a claim more than to write them, and each settle writes the row again.
alter table penstock.leases alter column jobs set storage external;

create index leases_name on penstock.leases (name);
create index leases_worker on penstock.leases (worker);
create index leases_expires_at on penstock.leases (expires_at);
-- Leases of suspects, few and seldom.
create index leases_on_trial on penstock.leases (id) where on_trial is not null;

create table penstock.finished_jobs (
    id uuid primary key,
    lease bigint not null
)
with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
comment on table penstock.finished_jobs is
    'Jobs that were finished in transactions of their callers, and are not taken off their leases yet.';
comment on column penstock.finished_jobs.id is 'Id of the job.';
comment on column penstock.finished_jobs.lease is 'The lease that still counts it.';

create table penstock.unique_periods (
    name text not null references penstock.jobs (name) on delete cascade,
    unique_key text not null,
    key text not null,
    id uuid not null,
    until timestamptz not null,
    look_at timestamptz not null,
    primary key (name, unique_key, key)
);
comment on table penstock.unique_periods is 'Unique keys that are held for a period, and by which job.';
comment on column penstock.unique_periods.name is 'Job type.';
comment on column penstock.unique_periods.unique_key is 'The unique key.';
comment on column penstock.unique_periods.key is
    'In a pool the key of the job, since a unique key is of its key there; elsewhere empty.';
comment on column penstock.unique_periods.id is 'The job that holds the key.';
comment on column penstock.unique_periods.until is 'Until when it holds the key, also when it has ended.';
comment on column penstock.unique_periods.look_at is
    'When maintenance looks whether the row can go: at until, and later again while the job has not ended.';

create index unique_periods_ended on penstock.unique_periods (look_at);

create table penstock.rate_windows (
    name text not null,
    key text not null,
    ends_at timestamptz not null,
    started integer not null,
    primary key (name, key, ends_at)
);
comment on table penstock.rate_windows is
    'Starts of rate-limited job types, and of the keys of pools that limit the rate of each key, summed over hundredths of the period.';
comment on column penstock.rate_windows.name is 'Name of the job type.';
comment on column penstock.rate_windows.key is 'The key; empty, which no key is: the starts of the type.';
comment on column penstock.rate_windows.ends_at is 'End of the hundredth of the period.';
comment on column penstock.rate_windows.started is 'Jobs that were started in it.';

-- Old starts of keys are found whatever their key.
create index rate_windows_keys on penstock.rate_windows (name, ends_at) where key <> '';

create unlogged table penstock.place_waiters (
    name text not null,
    worker text not null,
    channel text not null,
    ticket bigint not null,
    since timestamptz not null,
    offered_at timestamptz,
    primary key (name, worker)
)
with (fillfactor = 50);
comment on table penstock.place_waiters is
    'Workers that wait for a place of a type at its limit; unlogged, since they wait again after a restart.';
comment on column penstock.place_waiters.name is 'The job type.';
comment on column penstock.place_waiters.worker is 'The claimant: a worker, or a member of the pool.';
comment on column penstock.place_waiters.channel is 'It listens on penstock_<channel>.';
comment on column penstock.place_waiters.ticket is 'Its place among the workers that wait.';
comment on column penstock.place_waiters.since is 'When it last said that it waits.';
comment on column penstock.place_waiters.offered_at is 'Since when a place is kept for it; null: none is.';

create table penstock.holders (
    id text primary key,
    kind text not null,
    since timestamptz not null,
    constraint holders_kind_check check (kind in ('worker', 'dispatcher'))
);
comment on table penstock.holders is 'Workers and members that call begin_jobs before they start an at_most_once job.';
comment on column penstock.holders.id is 'Of the worker or member, as in leases.worker.';
comment on column penstock.holders.kind is
    'worker: it runs jobs; dispatcher: it sends them elsewhere under their attempt numbers, after begin_jobs.';
comment on column penstock.holders.since is 'When it promised to call begin_jobs.';

create table penstock.retention_classes (
    keep smallint primary key,
    days smallint not null,
    in_use boolean not null default false,
    constraint retention_classes_days_check check (days >= 1)
);
comment on table penstock.retention_classes is
    'How long finished jobs can be kept: what a job type declares is rounded up to the next class. Each class has partitions of its own.';
comment on column penstock.retention_classes.keep is 'The days for which its jobs are kept; 0: as long as the table retention says.';
comment on column penstock.retention_classes.days is 'The days that one of its partitions covers, so that no class has many.';
comment on column penstock.retention_classes.in_use is 'Whether a job type has ever used it. Partitions are made ahead of time for these only.';

insert into penstock.retention_classes (keep, days, in_use)
values (0, 1, true), (1, 1, false), (3, 1, false), (7, 1, false), (30, 3, false), (90, 7, false), (365, 30, false);

-- Stored, and not an argument of those who prune: a worker may prune, and may not say when.
create table penstock.retention (
    kind text primary key,
    keep interval default null,
    changed_at timestamptz,
    constraint retention_kind_check check (kind in ('jobs', 'history')),
    constraint retention_keep_check check (keep >= interval '0' and keep <= interval '366000 days')
);
comment on table penstock.retention is
    'How long workers keep what has no span of its own. Access admin changes it; a worker may only ask for more.';
comment on column penstock.retention.kind is
    'jobs: finished jobs of types that do not say it (retention class 0), and messages of topics; history: what comes back from lakes.';
comment on column penstock.retention.keep is 'For how long; null: for ever.';
comment on column penstock.retention.changed_at is 'When it was changed last; null: never, it is the default.';

insert into penstock.retention (kind, keep)
values ('jobs', interval '30 days'), ('history', interval '365 days');

-- Neither table of the tree has a primary key but the leaves: one of the whole would have to contain the class.
create table penstock.archived_jobs (
    id uuid not null,
    finished_at timestamptz not null,
    created_at timestamptz not null,
    run_after timestamptz not null,
    xid xid8 not null default pg_current_xact_id(),
    started_at timestamptz,
    expires_at timestamptz,
    message bigint,
    status penstock.archived_job_status not null,
    attempt smallint not null,
    max_attempts smallint not null,
    priority smallint not null,
    keep smallint not null default 0,
    snoozes smallint,
    name text not null,
    worker text,
    reason text,
    signature text,
    key text,
    unique_key text,
    data jsonb not null,
    errors jsonb,
    result jsonb,
    options jsonb,
    log jsonb,
    replay_of uuid,
    workflow uuid,
    constraint archived_jobs_attempt_check check (attempt >= 0)
)
partition by list (keep);
comment on table penstock.archived_jobs is 'Finished jobs, by retention class and time; insert-only.';
comment on column penstock.archived_jobs.id is 'Id of the job.';
comment on column penstock.archived_jobs.finished_at is 'When the job reached its terminal state.';
comment on column penstock.archived_jobs.created_at is 'When it was enqueued.';
comment on column penstock.archived_jobs.run_after is 'When it could start at the earliest.';
comment on column penstock.archived_jobs.xid is 'The transaction that archived the job: what orders the archive by commit.';
comment on column penstock.archived_jobs.started_at is 'When its last attempt was claimed; null: it never was.';
comment on column penstock.archived_jobs.expires_at is
    'It would have been archived as expired when it had waited then; null: never.';
comment on column penstock.archived_jobs.message is
    'The topic message of which this is a copy, whose payload it has; then data is null in JSON.';
comment on column penstock.archived_jobs.status is 'How it ended: succeeded, failed, expired or cancelled.';
comment on column penstock.archived_jobs.attempt is 'Number of its last attempt; 0: it never started.';
comment on column penstock.archived_jobs.max_attempts is 'As in queued_jobs.';
comment on column penstock.archived_jobs.priority is 'As in queued_jobs.';
comment on column penstock.archived_jobs.keep is 'Its retention class: the days for which it is kept; 0: as long as prune is told.';
comment on column penstock.archived_jobs.snoozes is 'As in queued_jobs.';
comment on column penstock.archived_jobs.name is 'Name of the job type.';
comment on column penstock.archived_jobs.worker is 'The worker that held the last attempt.';
comment on column penstock.archived_jobs.reason is
    'Why it ended so, where the status does not say it: quarantined, for a job that cannot be read or that ends its workers; dependency or group, for one that waited for jobs which did not succeed; purged or dropped, with its type.';
comment on column penstock.archived_jobs.signature is
    'Of a job that failed: the signature of its last error, which jobs that failed for the same cause share; otherwise null.';
comment on column penstock.archived_jobs.key is 'As in queued_jobs.';
comment on column penstock.archived_jobs.unique_key is 'As in queued_jobs.';
comment on column penstock.archived_jobs.data is 'The payload.';
comment on column penstock.archived_jobs.errors is 'One object for each failed attempt, oldest first.';
comment on column penstock.archived_jobs.result is 'What the handler returned, when the type keeps results.';
comment on column penstock.archived_jobs.options is 'As in queued_jobs.';
comment on column penstock.archived_jobs.log is 'As in queued_jobs.';
comment on column penstock.archived_jobs.replay_of is 'The job that it repeated.';
comment on column penstock.archived_jobs.workflow is 'As in queued_jobs.';

create index archived_jobs_name on penstock.archived_jobs (name, finished_at);
create index archived_jobs_xid on penstock.archived_jobs (xid);
-- The jobs that did not succeed, which are few and looked for most. Those that succeeded are not in it, so that their settle does not write it.
create index archived_jobs_unsuccessful on penstock.archived_jobs (finished_at, id) where status <> 'succeeded';
-- The failures of one cause, for the first of them and for examples.
create index archived_jobs_signature on penstock.archived_jobs (name, signature, finished_at) where signature is not null;
create index archived_jobs_replays on penstock.archived_jobs (replay_of) where replay_of is not null;
create index archived_jobs_workflow on penstock.archived_jobs (workflow, finished_at) where workflow is not null;
-- The children of a job group that did not succeed, which may be few of many.
create index archived_jobs_workflow_unsuccessful on penstock.archived_jobs (workflow, status, finished_at, id)
where workflow is not null and status <> 'succeeded';

create table penstock.quarantined_payloads (
    id uuid primary key,
    data jsonb not null,
    quarantined_at timestamptz not null
);
comment on table penstock.quarantined_payloads is
    'Payloads that no client can read, of jobs that were quarantined for it: archived_jobs has null instead, so that all others can be read.';
comment on column penstock.quarantined_payloads.id is 'Id of the job.';
comment on column penstock.quarantined_payloads.data is 'The payload.';
comment on column penstock.quarantined_payloads.quarantined_at is 'When the job was quarantined.';
