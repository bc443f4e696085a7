-- Operations: one change of all jobs that match a filter, such as to cancel or to replay them.
--
-- The life of an operation. start_operation writes its row. The maintenance of any worker advances it, a batch at a time: in one
-- transaction it locks the row, looks at the next jobs in the order of their ids, changes those that match, and notes in the row how far it
-- came and what it did. So a batch is done as a whole or not at all, whatever is killed, and no job is changed twice. A queued or running
-- job that another transaction has locked is left for the next pass; the operation ends with a pass that left none. A replay walks over
-- the days of the archive, oldest first, and by id within a day.

create table penstock.operations (
    id uuid primary key,
    kind text not null,
    state text not null default 'running',
    filter jsonb not null,
    started_at timestamptz not null,
    started_by text not null default session_user,
    updated_at timestamptz not null,
    finished_at timestamptz,
    looked_at bigint not null default 0,
    done bigint not null default 0,
    skipped bigint not null default 0,
    failed bigint not null default 0,
    postponed bigint not null default 0,
    at_day date,
    at_id uuid,
    error text,
    constraint operations_kind_check check (kind in ('cancel', 'replay', 'purge')),
    constraint operations_state_check check (state in ('running', 'finished', 'cancelled'))
);
comment on table penstock.operations is 'Operations on all jobs that match a filter.';
comment on column penstock.operations.id is 'Id of the operation; starting it again is the same operation.';
comment on column penstock.operations.kind is
    'cancel: queued jobs are archived as cancelled, and running ones are told; replay: finished jobs are enqueued again; purge: queued jobs are archived as cancelled, with the reason purged.';
comment on column penstock.operations.state is 'running, finished, or cancelled before its end.';
comment on column penstock.operations.filter is
    'Which jobs: name, status, key, reason, error (type of the last one), since and until (when enqueued; archived: when finished).';
comment on column penstock.operations.started_at is 'When it was started. Jobs that are enqueued, or finish, later are not part of it.';
comment on column penstock.operations.started_by is 'The database role that started it.';
comment on column penstock.operations.updated_at is 'When its last batch was done.';
comment on column penstock.operations.finished_at is 'When it ended.';
comment on column penstock.operations.looked_at is 'Jobs that it has looked at, matching or not, in all passes.';
comment on column penstock.operations.done is 'Jobs that it has changed.';
comment on column penstock.operations.skipped is 'Matching jobs that it left as they are: replayed already.';
comment on column penstock.operations.failed is 'Matching jobs that it could not change; error says why the last of them.';
comment on column penstock.operations.postponed is 'Jobs of this pass that other transactions had locked, for the next pass.';
comment on column penstock.operations.at_day is 'In the archive: the day that it has reached.';
comment on column penstock.operations.at_id is 'The id up to which it has come, in this pass or day; null: it is at the beginning.';
comment on column penstock.operations.error is 'Why the last job that could not be changed could not.';

create index operations_running on penstock.operations (updated_at) where state = 'running';
create index operations_started on penstock.operations (started_at, id);
