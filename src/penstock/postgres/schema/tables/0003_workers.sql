-- Workers: the processes that run jobs.
--
-- The life of a worker. It registers with one row in workers, and the row is its heartbeat: a worker sends it only while its claim
-- loop makes progress. When it leaves, or when it is dead, its leases are recovered and the row is deleted; the row stays, marked as dead,
-- while other transactions lock some of the leases. A worker that finds no job writes a row in listeners, so that enqueues notify it.
--
-- Suspicion. One check never suffices to take a worker for dead. A worker (or a member of a group) that is silent may be dead, or it
-- may have been unable to reach the database: PostgreSQL was restarted and recovered for longer than a silence may last, its machine
-- was suspended, or the network was interrupted. Right after that all workers are silent, and the first one that returns would take all
-- others for dead, their jobs for lost and their at_most_once jobs for failed. So a check that finds a silence of three fifths of
-- dead_after only records the suspicion. A worker that is silent for dead_after, and is still silent half of dead_after after the first
-- check, is dead: while the database was reachable for that long, it could have sent a heartbeat. A heartbeat is later than a suspicion
-- and so ends it; a suspicion from before the start of the server does not count.

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
    started_at timestamptz not null,
    seen_at timestamptz not null,
    suspected_at timestamptz,
    dead_after interval not null default '10 seconds',
    blocked_since timestamptz,
    blocked_by text,
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
comment on column penstock.workers.metadata is 'What the worker says of itself.';
comment on column penstock.workers.halted is
    'Consumers that ended in this worker, stream/group, each with its error; the worker goes on with its other work.';
comment on column penstock.workers.started_at is 'When it registered.';
comment on column penstock.workers.seen_at is 'Last heartbeat, which a worker sends only while its claim loop makes progress.';
comment on column penstock.workers.suspected_at is
    'When a look first found it silent for three fifths of dead_after; counts while it is later than seen_at and the start of the server.';
comment on column penstock.workers.dead_after is 'Silent for longer than this, the worker is dead and its jobs are recovered.';
comment on column penstock.workers.blocked_since is 'Since when its event loop has made no progress; null: it makes progress.';
comment on column penstock.workers.blocked_by is 'What blocks its event loop, as far as that is known: job type and id.';
