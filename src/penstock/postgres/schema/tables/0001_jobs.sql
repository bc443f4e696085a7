-- Jobs: the tables.
--
-- The life of a job. An enqueue writes one row to queued_jobs. When its time has come the row carries a number,
-- seq, and stands in the ready line of its type; while its time lies ahead (run_after) seq is null and the row
-- stands in the deferred line, which a claim never touches. A claim gives a batch of ready rows to a worker: it
-- turns their status to in-progress and points them at one new row in leases. The worker settles its jobs in
-- batches too: a settled job leaves queued_jobs and enters archived_jobs in one statement, or, when it failed and
-- has attempts left, goes back to the deferred line. When the last job of a lease is settled the lease is gone.
-- A lease that ends otherwise (its time is up, or its worker stopped beating) is recovered by any other worker.
--
-- What keeps this fast, and has to stay true:
--
-- * A claim is a HOT update: no index holds a column that a claim changes (status, lease, updated_at), neither as
--   a key nor in its predicate, and pages are filled to 40 % so that every row has room for its second version.
--   The one exception is a job with a unique key: claiming it frees the key, which must leave the index.
-- * What a batch shared (worker, start, end) stands once in leases, not in each job. The number of jobs in flight
--   of a type is therefore the sum over a few lease rows, exact and cheap.
-- * seq is drawn only after the transaction has its xid (see enqueue_many), so that a worker can tell from a
--   snapshot which numbers can no longer appear, and need not look below them again.
-- * The archive is partitioned by the day a job finished, and is dropped by partition.

create type penstock.delivery_strategy as enum ('at_least_once', 'at_most_once');
create type penstock.job_status as enum ('queued', 'in-progress');
create type penstock.archived_job_status as enum ('succeeded', 'failed', 'expired', 'cancelled');

create sequence penstock.job_seq as bigint;
comment on sequence penstock.job_seq is 'The place of a job in the ready line of its type and priority.';

create sequence penstock.lease_id as bigint;
comment on sequence penstock.lease_id is 'Numbers leases; a number is never used twice, so it can fence.';

create table penstock.jobs (
    name text primary key,
    delivery_strategy penstock.delivery_strategy not null default 'at_least_once',
    attempts smallint not null default 5,
    concurrency integer,
    visibility_timeout interval not null default '5 minutes',
    time_limit interval,
    backoff_base interval not null default '2 seconds',
    backoff_factor double precision not null default 2,
    backoff_cap interval not null default '1 hour',
    backoff_jitter double precision not null default 0.1,
    rate_limit integer,
    rate_period interval,
    keep_result boolean not null default false,
    paused_at timestamptz,
    declaration jsonb,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    constraint jobs_attempts_check check (attempts > 0),
    constraint jobs_concurrency_check check (concurrency >= 0)
);
comment on table penstock.jobs is 'Job types: how the jobs of a name are delivered, retried and limited.';
comment on column penstock.jobs.name is 'Name of the job type.';
comment on column penstock.jobs.delivery_strategy is 'at_least_once retries; at_most_once starts a job once, whatever happens.';
comment on column penstock.jobs.attempts is 'How often a job is started before it is archived as failed.';
comment on column penstock.jobs.concurrency is 'Most jobs in flight at once over all workers; null: no limit, 0: paused.';
comment on column penstock.jobs.visibility_timeout is 'How long a claimed job belongs to its worker unless the lease is extended.';
comment on column penstock.jobs.time_limit is 'How long a handler may run; null: a little less than the visibility timeout.';
comment on column penstock.jobs.backoff_base is 'Delay before the first retry.';
comment on column penstock.jobs.backoff_factor is 'Each further retry waits this many times longer.';
comment on column penstock.jobs.backoff_cap is 'The longest delay before a retry.';
comment on column penstock.jobs.backoff_jitter is 'Share of the delay that is random, 0 to 1: 0.1 is plus or minus 10 %.';
comment on column penstock.jobs.rate_limit is 'Most jobs started within any rate_period over all workers; null: no limit.';
comment on column penstock.jobs.rate_period is 'The period of rate_limit.';
comment on column penstock.jobs.keep_result is 'Whether what a handler returns is kept in archived_jobs.result.';
comment on column penstock.jobs.paused_at is 'Since when the type is paused; null: it is not.';
comment on column penstock.jobs.declaration is 'What the application declared last, so that a change made by hand outlives a restart.';

create table penstock.lanes (
    name text not null,
    priority smallint not null,
    primary key (name, priority)
);
comment on table penstock.lanes is 'Which priorities each job type has ever used: a claim looks into each, lowest first.';

create table penstock.queued_jobs (
    seq bigint,
    lease bigint,
    run_after timestamptz not null,
    expires_at timestamptz,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    cancel_requested_at timestamptz,
    id uuid not null,
    status penstock.job_status not null default 'queued',
    attempts smallint not null,
    max_attempts smallint not null,
    priority smallint not null default 0,
    coalesces boolean not null default false,
    name text not null,
    key text,
    unique_key text,
    data jsonb not null,
    errors jsonb,
    progress jsonb,
    replay_of uuid,
    constraint queued_jobs_pkey primary key (id),
    constraint queued_jobs_attempts_check check (attempts >= 0)
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
comment on column penstock.queued_jobs.seq is 'Place in the ready line of (name, priority); null: deferred until run_after.';
comment on column penstock.queued_jobs.lease is 'The lease under which a worker holds the job; null while queued.';
comment on column penstock.queued_jobs.run_after is 'Not to be started before.';
comment on column penstock.queued_jobs.expires_at is 'Archived as expired when not started by then; null: never.';
comment on column penstock.queued_jobs.cancel_requested_at is 'When somebody asked to cancel it while it was in progress.';
comment on column penstock.queued_jobs.id is 'Made by the client (UUIDv7 by default); enqueueing it again is the same job.';
comment on column penstock.queued_jobs.attempts is 'Attempts that are left, this one included; fences results of earlier attempts.';
comment on column penstock.queued_jobs.max_attempts is 'Attempts that the job had when it was enqueued.';
comment on column penstock.queued_jobs.priority is '-100 to 100, lower first, within a type.';
comment on column penstock.queued_jobs.coalesces is 'While true, an enqueue with the same unique key returns this job.';
comment on column penstock.queued_jobs.key is 'Whose job it is (a tenant, an account); orders jobs in a pool.';
comment on column penstock.queued_jobs.unique_key is 'Coalescing key, see coalesces.';
comment on column penstock.queued_jobs.data is 'The payload.';
comment on column penstock.queued_jobs.errors is 'One object for each failed attempt, oldest first; null: none failed.';
comment on column penstock.queued_jobs.progress is 'What the handler reported last.';
comment on column penstock.queued_jobs.replay_of is 'The job that this one repeats.';

-- The ready line. Only enqueue, promotion and retries write it, never a claim.
create unique index queued_jobs_ready on penstock.queued_jobs (name, priority, seq) where seq is not null;
-- The deferred line, in order of time over all types.
create index queued_jobs_deferred on penstock.queued_jobs (run_after) where seq is null;
create unique index queued_jobs_unique on penstock.queued_jobs (name, unique_key) where coalesces;
create index queued_jobs_expiring on penstock.queued_jobs (expires_at) where expires_at is not null;

create table penstock.leases (
    id bigint primary key,
    first_seq bigint not null,
    last_seq bigint not null,
    started_at timestamptz not null,
    expires_at timestamptz not null,
    open_jobs integer not null,
    priority smallint not null,
    name text not null,
    worker text not null,
    cancelled uuid[],
    constraint leases_open_jobs_check check (open_jobs >= 0)
)
with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);
comment on table penstock.leases is 'One row for each batch of jobs that a worker claimed and has not settled entirely.';
comment on column penstock.leases.first_seq is 'Its jobs are those of (name, priority) from here to last_seq that point to it.';
comment on column penstock.leases.started_at is 'When the batch was claimed.';
comment on column penstock.leases.expires_at is 'When the jobs stop belonging to the worker.';
comment on column penstock.leases.open_jobs is 'Jobs not settled yet; their sum over a type is its number of jobs in flight.';
comment on column penstock.leases.cancelled is 'Jobs of this lease that somebody asked to cancel; the heartbeat tells the worker.';

create index leases_name on penstock.leases (name);
create index leases_worker on penstock.leases (worker);
create index leases_expires_at on penstock.leases (expires_at);

create table penstock.rate_windows (
    name text not null,
    ends_at timestamptz not null,
    started integer not null,
    primary key (name, ends_at)
);
comment on table penstock.rate_windows is 'Starts of rate-limited types, summed over hundredths of their period.';

create table penstock.workers (
    id text primary key,
    host text not null,
    pid integer not null,
    names text[] not null,
    concurrency integer not null,
    state text not null default 'running',
    in_flight integer not null default 0,
    metadata jsonb not null default '{}',
    started_at timestamptz not null,
    seen_at timestamptz not null,
    dead_after interval not null default '10 seconds',
    constraint workers_state_check check (state in ('running', 'draining'))
)
with (fillfactor = 50, vacuum_truncate = off);
comment on table penstock.workers is 'One row for each worker process; its heartbeat.';
comment on column penstock.workers.seen_at is 'Last heartbeat, which a worker sends only while its claim loop makes progress.';
comment on column penstock.workers.dead_after is 'Silent for longer than this, the worker is dead and its jobs are recovered.';
comment on column penstock.workers.metadata is 'What the worker says of itself.';

create unlogged table penstock.idle_workers (
    worker text primary key,
    names text[] not null,
    since timestamptz not null
);
comment on table penstock.idle_workers is 'Workers that wait for a notification. Enqueues notify only these; unlogged, since it is a hint.';

create table penstock.archived_jobs (
    id uuid not null,
    finished_at timestamptz not null,
    created_at timestamptz not null,
    run_after timestamptz not null,
    started_at timestamptz,
    expires_at timestamptz,
    status penstock.archived_job_status not null,
    attempts smallint not null,
    attempts_used smallint not null,
    priority smallint not null,
    name text not null,
    worker text,
    key text,
    unique_key text,
    data jsonb not null,
    errors jsonb,
    result jsonb,
    replay_of uuid,
    constraint archived_jobs_pkey primary key (id, finished_at),
    constraint archived_jobs_attempts_check check (attempts >= 0)
)
partition by range (finished_at);
comment on table penstock.archived_jobs is 'Finished jobs, by day; insert-only.';
comment on column penstock.archived_jobs.finished_at is 'When the job reached its terminal state.';
comment on column penstock.archived_jobs.started_at is 'When its last attempt was claimed; null: it never was.';
comment on column penstock.archived_jobs.attempts is 'Attempts that were left: as given to the worker when it succeeded, one less when it failed.';
comment on column penstock.archived_jobs.attempts_used is 'How often it was claimed and not handed back.';
comment on column penstock.archived_jobs.worker is 'Who held the last attempt.';
comment on column penstock.archived_jobs.errors is 'One object for each failed attempt, oldest first.';
comment on column penstock.archived_jobs.result is 'What the handler returned, when the type keeps results.';

create index archived_jobs_name on penstock.archived_jobs (name, finished_at);

create table penstock.access_grants (
    role_name name not null,
    access text not null,
    primary key (role_name, access)
);
comment on table penstock.access_grants is 'Who was given which access, so that a migration can give it to new functions too.';
