-- Workers: the processes that run jobs, their handlers, and the tasks of their leader.
--
-- The life of a worker. It registers with one row in workers, and the row is its heartbeat: a worker sends it only while its claim
-- loop makes progress. When it leaves, or when it is dead, its leases are recovered and the row is deleted; the row stays, marked as dead,
-- while other transactions lock some of the leases. A worker that finds no job writes a row in listeners, so that enqueues notify it.
--
-- Handlers. A worker that starts writes a row in handlers for each handler that it has: what its payloads look like, where it is documented
-- and who answers for it. The row of a handler is written again when a worker says something else of it. It remains when no worker has the
-- handler any more: noted_at says when one last began with it.
--
-- Tasks of the leader are functions that one process of all runs, as long as it lives. A task has a group of one slot (0004_groups.sql)
-- with the name /<task>, which no pool and no consumer group can have. The workers that declare the task are its members, and the owner of
-- the slot runs it. So leadership moves, and is fenced by the epoch, as slots of pools do. The row in leader_tasks says what became of the
-- task under the epoch that wrote last.
--
-- Suspicion. One check never suffices to take a worker for dead. A worker (or a member of a group) that is silent may be dead, or it
-- may have been unable to reach the database: PostgreSQL was restarted and recovered for longer than a silence may last, its machine
-- was suspended, or the network was interrupted. Right after that all workers are silent, and the first one that returns would take all
-- others for dead, their jobs for lost and their at_most_once jobs for failed. So a check that finds a silence of three fifths of
-- dead_after only records the suspicion. A worker that is silent for dead_after, and is still silent half of dead_after after the first
-- check, is dead: while the database was reachable for that long, it could have sent a heartbeat. A heartbeat is later than a suspicion
-- and so ends it; a suspicion from before the start of the server does not count.

-- Losses. What the loss of a worker says about its jobs depends on its node: on whether the processes beside it were lost too (the head
-- of tables/0002_jobs.sql says why). The node of a worker is its supervisor (penstock worker --processes), or its machine. A supervisor
-- reports a process that ended without leaving (end_workers): its jobs are then recovered at once, without waiting for its silence.
-- A row in lost_workers keeps for an hour what a loss said, for the members of its groups, which are evicted at other times, and
-- for losses at the same time.

create table penstock.workers (
    id text primary key,
    host text not null,
    pid integer not null,
    names text[] not null,
    concurrency integer not null,
    state text not null default 'running',
    in_flight integer not null default 0,
    isolates boolean not null default false,
    metadata jsonb not null default '{}',
    halted jsonb not null default '{}',
    key_ids text[] not null default '{}',
    no_key jsonb not null default '{}',
    started_at timestamptz not null,
    seen_at timestamptz not null,
    suspected_at timestamptz,
    dead_after interval not null default '10 seconds',
    blocked_since timestamptz,
    blocked_by text,
    supervisor text,
    ended_at timestamptz,
    ended_how text,
    constraint workers_state_check check (state in ('running', 'draining', 'dead'))
)
with (fillfactor = 50, vacuum_truncate = off);
comment on table penstock.workers is 'One row for each worker process; its heartbeat.';
comment on column penstock.workers.id is 'Id of the worker.';
comment on column penstock.workers.host is 'Name of its machine.';
comment on column penstock.workers.pid is 'Number of its process.';
comment on column penstock.workers.names is 'Job types that it claims.';
comment on column penstock.workers.concurrency is 'Most jobs that it runs at once.';
comment on column penstock.workers.state is
    'running; draining: it stops; dead: it fell silent or left, and some of its leases were locked when the others were recovered.';
comment on column penstock.workers.in_flight is 'Jobs that it held at its last heartbeat.';
comment on column penstock.workers.isolates is 'Whether it empties itself to run jobs alone at this moment.';
comment on column penstock.workers.metadata is
    'What the worker says of itself; names of what it works on as lists: pools, consumers (stream/group), schedules, leader_tasks; version (of Penstock) and code_version (of the application).';
comment on column penstock.workers.halted is
    'Consumers that ended in this worker, stream/group, each with its error; the worker goes on with its other work.';
comment on column penstock.workers.key_ids is 'Ids of the keys of encrypted payloads that it has.';
comment on column penstock.workers.no_key is
    'Job types and pools of its application on which it does not work for want of a key: the id of the key, or null when it has none.';
comment on column penstock.workers.started_at is 'When it registered.';
comment on column penstock.workers.seen_at is 'Last heartbeat, which a worker sends only while its claim loop makes progress.';
comment on column penstock.workers.suspected_at is
    'When a look first found it silent for three fifths of dead_after; counts while it is later than seen_at and the start of the server.';
comment on column penstock.workers.dead_after is 'Silent for longer than this, the worker is dead and its jobs are recovered.';
comment on column penstock.workers.blocked_since is 'Since when its event loop has made no progress; null: it makes progress.';
comment on column penstock.workers.blocked_by is 'What blocks its event loop, as far as that is known: job type and id.';

comment on column penstock.workers.supervisor is 'The supervisor that started it; null: it has none, and its node is its machine.';
comment on column penstock.workers.ended_at is 'When its supervisor said that its process has ended; null: it has not.';
comment on column penstock.workers.ended_how is 'How its process ended, as its supervisor saw it: SIGKILL, exit code 1.';

create table penstock.lost_workers (
    id text primary key,
    process text not null,
    host text not null,
    supervisor text,
    started_at timestamptz not null,
    first_at timestamptz not null,
    last_at timestamptz not null,
    lost_at timestamptz not null,
    how text,
    speaks boolean not null,
    job uuid
);
comment on table penstock.lost_workers is 'Workers that were lost within the last hour.';
comment on column penstock.lost_workers.id is 'Id of the worker.';
comment on column penstock.lost_workers.process is 'Id of its process, with which the ids of its members begin.';
comment on column penstock.lost_workers.host is 'Name of its machine.';
comment on column penstock.lost_workers.supervisor is 'Its supervisor; null: it had none.';
comment on column penstock.lost_workers.started_at is 'When it registered.';
comment on column penstock.lost_workers.first_at is 'It ended after this time: that of its last heartbeat.';
comment on column penstock.lost_workers.last_at is 'It ended before this time: that of the heartbeat that is missing.';
comment on column penstock.lost_workers.lost_at is 'When it was found to be lost.';
comment on column penstock.lost_workers.how is 'How its process ended, as its supervisor saw it; null: it fell silent.';
comment on column penstock.lost_workers.speaks is 'Whether its loss says anything about its jobs: its node was not lost with it.';
comment on column penstock.lost_workers.job is 'The job that was alone on trial in it, and counts its loss; null: none does.';

create table penstock.handlers (
    kind text not null,
    name text not null,
    schema jsonb,
    docs_url text,
    owner text,
    noted_at timestamptz not null,
    primary key (kind, name),
    constraint handlers_kind_check check (kind in ('job', 'pool', 'subscriber', 'consumer', 'schedule', 'leader'))
);
comment on table penstock.handlers is 'What workers say of their handlers, for people: payloads, documentation, owner.';
comment on column penstock.handlers.kind is
    'What has the handler: a job type, pool, subscriber, consumer group, schedule, or task of the leader.';
comment on column penstock.handlers.name is 'Its name; of a consumer group in the form stream/group.';
comment on column penstock.handlers.schema is 'JSON Schema of the payloads; null: any JSON.';
comment on column penstock.handlers.docs_url is 'Where it is documented.';
comment on column penstock.handlers.owner is 'Who answers for it.';
comment on column penstock.handlers.noted_at is 'When a worker last began to work with it.';

create table penstock.leader_tasks (
    name text primary key,
    state text not null default 'waiting',
    worker text,
    epoch bigint not null default 0,
    failures integer not null default 0,
    last_error text,
    last_error_at timestamptz,
    changed_at timestamptz not null,
    constraint leader_tasks_state_check check (state in ('waiting', 'running', 'failed', 'ended'))
);
comment on table penstock.leader_tasks is 'Tasks that one worker of all runs. Look at them with leader_list().';
comment on column penstock.leader_tasks.name is 'Name of the task.';
comment on column penstock.leader_tasks.state is
    'waiting: it never began; running; failed: the leader waits before it starts it again; ended: it returned.';
comment on column penstock.leader_tasks.worker is 'The member that wrote the state.';
comment on column penstock.leader_tasks.epoch is 'The epoch of its leadership; an earlier one cannot write.';
comment on column penstock.leader_tasks.failures is 'How often in a row it failed.';
comment on column penstock.leader_tasks.last_error is 'Its last error.';
comment on column penstock.leader_tasks.last_error_at is 'When it failed last.';
comment on column penstock.leader_tasks.changed_at is 'When the state was written.';
