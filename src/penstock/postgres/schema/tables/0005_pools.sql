-- Pools: keys and their order, and standing jobs.
--
-- The life of a keyed job is that of any job (see 0002_jobs.sql): the same row, lease, settle and archive. Two things differ: its
-- queue is ordered by (name, slot, key, seq) instead of (name, priority, seq), and only the owner of its slot may claim it (see
-- 0004_groups.sql). An owner walks over its keys in a ring and takes the first jobs of each key that is not busy. A job that waits for
-- its retry keeps its place at the head of its key, and so holds the key. Invariant: a slot without an owner has no job in progress
-- (the transaction that removes the owner ends the attempts).
--
-- Paused keys. A paused key has a row in paused_keys until it is resumed; no claim takes jobs of it meanwhile. The row of its pool says
-- whether there is one (keys_paused), so that a claim of a pool without paused keys looks for none: it reads that row anyway. Both are
-- written under the lock of the pool's row.
--
-- The life of a standing job. A start writes its row; the owner of its key runs it. When the key moves, the next owner runs it,
-- with the state that the last run left. A stop makes it unwanted, and the row goes when the run has ended.
--
-- Crashes of standing jobs. As with jobs, nothing shows which of the runs in a process crashed it, so each run that is lost with its
-- worker counts a crash. After two crashes within ten minutes the standing job is a suspect. Its owner starts suspects on trial, beside
-- other runs: one at first, then two, four, and so on, each time after the ones before have survived for a time that grows with their
-- crashes. Those with the fewest crashes come first, and are on trial only with others that have as many: so a suspect does not wait
-- for the long trials of those that have crashed more often, and the cause is soon alone. When a worker is lost during a trial, only
-- the suspects on trial count a crash. So few further crashes find the cause, however many suspects there are. A suspect that is lost
-- for the third time while it is on trial alone, and has survived no trial in between, is quarantined: it does not run, and keeps its
-- error, until it is started again. Once is not enough: a worker that is killed takes with it whatever is on trial; and what else
-- ends a worker does so twice at most before it is a suspect itself. As with jobs, a member that left, or was lost with its node, counts
-- nowhere, and one that has crashed alone counts no loss at whose time other workers were lost too.

create table penstock.pools (
    name text primary key,
    on_retry text not null default 'block',
    key_concurrency integer not null default 1,
    key_rate_limit integer,
    key_rate_period interval,
    key_max_waiting integer,
    keys_paused boolean not null default false,
    declaration jsonb,
    created_at timestamptz not null,
    constraint pools_on_retry_check check (on_retry in ('block', 'skip')),
    constraint pools_key_concurrency_check check (key_concurrency > 0)
);
comment on table penstock.pools is 'Job types whose jobs of one key run in order on one worker; the group has the same name.';
comment on column penstock.pools.name is 'Name of the pool: of its job type and of its group.';
comment on column penstock.pools.on_retry is
    'block: a job that is to be retried holds up its key; skip: later jobs of the key pass it.';
comment on column penstock.pools.key_concurrency is
    'Most jobs in flight of one key; more than 1 gives up the order within the key.';
comment on column penstock.pools.key_rate_limit is 'Most jobs of one key started within any key_rate_period; null: no limit.';
comment on column penstock.pools.key_rate_period is 'The period of key_rate_limit.';
comment on column penstock.pools.key_max_waiting is
    'Most jobs of one key that wait, ready or deferred: an enqueue beyond it is refused; null: no limit.';
comment on column penstock.pools.keys_paused is 'Whether paused_keys has keys of this pool.';
comment on column penstock.pools.declaration is
    'What the application declared last, so that a change made by hand outlives a restart.';
comment on column penstock.pools.created_at is 'When the pool was declared.';

create table penstock.key_weights (
    name text not null references penstock.pools (name),
    key text not null,
    weight integer not null,
    primary key (name, key),
    constraint key_weights_weight_check check (weight between 1 and 1000)
);
comment on table penstock.key_weights is 'Keys that get more than one job a turn.';
comment on column penstock.key_weights.name is 'Name of the pool.';
comment on column penstock.key_weights.key is 'The key.';
comment on column penstock.key_weights.weight is 'Jobs that the key gets in a turn; the other keys get one.';

create table penstock.paused_keys (
    name text not null references penstock.pools (name),
    key text not null,
    paused_at timestamptz not null,
    primary key (name, key)
);
comment on table penstock.paused_keys is 'Keys of pools of which no job is claimed until they are resumed.';
comment on column penstock.paused_keys.name is 'Name of the pool.';
comment on column penstock.paused_keys.key is 'The key.';
comment on column penstock.paused_keys.paused_at is 'Since when it is paused.';

create table penstock.standing_jobs (
    name text not null references penstock.pools (name),
    key text not null,
    slot integer not null,
    data jsonb not null,
    state jsonb,
    version bigint not null default 1,
    wanted boolean not null default true,
    running_by text,
    running_epoch bigint,
    started_at timestamptz,
    entered_at timestamptz,
    failures integer not null default 0,
    crashes integer not null default 0,
    crashes_alone integer not null default 0,
    tried_with integer,
    retry_at timestamptz,
    error jsonb,
    quarantined_at timestamptz,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    primary key (name, key)
);
comment on table penstock.standing_jobs is 'Jobs that run on the owner of their key until they are stopped.';
comment on column penstock.standing_jobs.name is 'Name of the pool.';
comment on column penstock.standing_jobs.key is 'The key; there is one standing job a key.';
comment on column penstock.standing_jobs.slot is 'The slot of the key.';
comment on column penstock.standing_jobs.data is 'The payload.';
comment on column penstock.standing_jobs.state is 'What the last run left for the next: a small JSON.';
comment on column penstock.standing_jobs.version is
    'Grows when the payload is replaced; a run of an earlier one is stopped, and the job started again.';
comment on column penstock.standing_jobs.wanted is 'False: to be stopped; the row goes when it has stopped.';
comment on column penstock.standing_jobs.running_by is 'The member that runs it, under running_epoch; null: it does not run.';
comment on column penstock.standing_jobs.running_epoch is 'Epoch of the slot under which running_by runs it.';
comment on column penstock.standing_jobs.started_at is 'When the current run, or the last one, started.';
comment on column penstock.standing_jobs.entered_at is
    'When the start side of the last run had succeeded; null: not yet, or it failed.';
comment on column penstock.standing_jobs.failures is 'Runs in a row that ended with an error; the next one waits until retry_at.';
comment on column penstock.standing_jobs.crashes is
    'Workers lost one after the other while they ran it; with 2 it is on trial when it starts. Begins again at 1 after a run of ten minutes.';
comment on column penstock.standing_jobs.crashes_alone is
    'Workers lost while it was on trial alone, since it last survived a trial; the second one quarantines it.';
comment on column penstock.standing_jobs.tried_with is
    'How many suspects its run is on trial with, itself included; null: it is not on trial.';
comment on column penstock.standing_jobs.retry_at is 'When a run that failed is repeated; null: at once.';
comment on column penstock.standing_jobs.error is 'Error of the last run that failed.';
comment on column penstock.standing_jobs.quarantined_at is
    'Since when it is quarantined, because it crashes its workers; null: it is not. Starting it again, or replacing its payload, releases it.';
comment on column penstock.standing_jobs.created_at is 'When it was started first.';
comment on column penstock.standing_jobs.updated_at is 'When the row was last written.';

create index standing_jobs_slot on penstock.standing_jobs (name, slot);

create table penstock.standing_messages (
    id bigint generated always as identity primary key,
    name text not null,
    key text not null,
    data jsonb not null,
    sent_at timestamptz not null,
    foreign key (name, key) references penstock.standing_jobs (name, key) on delete cascade
);
comment on table penstock.standing_messages is 'Messages to standing jobs that their owner has not taken yet.';
comment on column penstock.standing_messages.id is 'Order of sending.';
comment on column penstock.standing_messages.name is 'Name of the pool.';
comment on column penstock.standing_messages.key is 'Key of the standing job.';
comment on column penstock.standing_messages.data is 'The message.';
comment on column penstock.standing_messages.sent_at is 'When it was sent.';

create index standing_messages_key on penstock.standing_messages (name, key, id);
