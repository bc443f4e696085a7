-- Tasks of the leader: functions that one process of all runs, as long as it lives.
--
-- A task has a group of one slot (0004_groups.sql) with the name /<task>, which no pool and no consumer group can have. The workers
-- that declare the task are its members, and the owner of the slot runs it. So leadership moves, and is fenced by the epoch, as slots of
-- pools do. The row here says what became of the task under the epoch that wrote last.

create table penstock.leader_tasks (
    name text primary key,
    state text not null default 'waiting' check (state in ('waiting', 'running', 'failed', 'ended')),
    worker text,
    epoch bigint not null default 0,
    failures integer not null default 0,
    last_error text,
    last_error_at timestamptz,
    changed_at timestamptz not null
);
comment on table penstock.leader_tasks is 'Tasks that one worker of all runs. Look at them with leader_list().';
comment on column penstock.leader_tasks.name is 'Name of the task.';
comment on column penstock.leader_tasks.state is 'waiting: it never began; running; failed: the leader waits before it starts it again; ended: it returned.';
comment on column penstock.leader_tasks.worker is 'The member that wrote the state.';
comment on column penstock.leader_tasks.epoch is 'The epoch of its leadership; an earlier one cannot write.';
comment on column penstock.leader_tasks.failures is 'How often in a row it failed.';
comment on column penstock.leader_tasks.last_error is 'Its last error.';
comment on column penstock.leader_tasks.last_error_at is 'When it failed last.';
comment on column penstock.leader_tasks.changed_at is 'When the state was written.';
