-- Operations: one change of all jobs that match a filter, such as to cancel them, to replay them, to run them now, or to give them another priority.
--
-- The life of an operation. start_operation writes its row. The maintenance of any worker advances it, a batch at a time: in one
-- transaction it locks the row, looks at the next jobs in the order of their ids, changes those that match, and notes in the row how far it
-- came and what it did. So a batch is done as a whole or not at all, whatever is killed, and no job is changed twice. A queued or running
-- job that another transaction has locked is left for the next pass; the operation ends with a pass that left none. A replay walks over
-- the days of the archive, oldest first, and by id within a day. A prune deletes operations that ended as long ago as finished jobs are kept.
--
-- The life of an erasure (kind erase), which removes all that belongs to one key, or to a value of a field of payloads. It has a row in
-- erasures too, and goes through phases: queue (jobs that wait are deleted, those that run are cancelled, until a pass finds none), archive,
-- streams (segment by segment), messages, signals (those that were stored behind the deletion of their job), rest (what else has the key),
-- lake (by a process that reaches the files of the lakes), and vacuum (by a role that owns the tables). It begins with vacuum when nothing
-- has the key any more, and its filter is redacted then: from there on no row says who was erased.

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
    phase text,
    counts jsonb,
    constraint operations_kind_check check (kind in ('cancel', 'replay', 'purge', 'set-priority', 'run-now', 'erase')),
    constraint operations_state_check check (state in ('running', 'finished', 'cancelled'))
);
comment on table penstock.operations is 'Operations on all jobs that match a filter, and erasures.';
comment on column penstock.operations.id is 'Id of the operation; starting it again is the same operation.';
comment on column penstock.operations.kind is
    'cancel: queued jobs are archived as cancelled, and running ones are told; replay: finished jobs are enqueued again; purge: queued jobs are archived as cancelled, with the reason purged; set-priority: jobs that wait get another priority; run-now: jobs that wait for their time or for a further attempt are due at once; erase: all that belongs to a key or to a value of a field is removed.';
comment on column penstock.operations.state is 'running, finished, or cancelled before its end.';
comment on column penstock.operations.filter is
    'Which jobs: name, status, key, reason, error (type of the last one), signature (of the last one), since and until (when enqueued; archived: when finished); new_priority, what set-priority gives them. Of an erasure key, or field and value, until nothing has them any more; rewrite and skip_unseen.';
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
comment on column penstock.operations.phase is
    'Of an erasure: queue, archive, streams, messages, signals, rest, lake or vacuum, of which it is in one; null: it is none.';
comment on column penstock.operations.counts is
    'Of an erasure: what it has removed, by kind: queued, archived, events, messages, standing, rows, lake.';

create index operations_running on penstock.operations (updated_at) where state = 'running';
create index operations_started on penstock.operations (started_at, id);

create table penstock.erasures (
    operation uuid primary key references penstock.operations (id) on delete cascade,
    since_xid xid8 not null default pg_current_xact_id(),
    phase_at timestamptz not null,
    at_stream integer not null default 0,
    at_segment bigint not null default 0,
    to_segment bigint,
    at_message bigint not null default 0,
    touched text[] not null default '{}',
    lakes text[] not null default '{}',
    vacuum_xid xid8
);
comment on table penstock.erasures is 'How far each erasure is; beside its row in operations.';
comment on column penstock.erasures.operation is 'Id of the operation.';
comment on column penstock.erasures.since_xid is
    'The transaction that started it. What older transactions enqueue is part of it, so it waits for their end.';
comment on column penstock.erasures.phase_at is 'When its phase began.';
comment on column penstock.erasures.at_stream is 'Id of the stream that it has reached.';
comment on column penstock.erasures.at_segment is 'Number of the last segment of that stream that is done.';
comment on column penstock.erasures.to_segment is
    'Number of the last segment of that stream that is part of it; null: the stream is not begun.';
comment on column penstock.erasures.at_message is 'Number of the last message of a topic that it has looked at.';
comment on column penstock.erasures.touched is 'Tables of the archive from which it has deleted rows, which are to be vacuumed.';
comment on column penstock.erasures.lakes is 'Lakes that are done.';
comment on column penstock.erasures.vacuum_xid is
    'The transaction in which it came to the phase signals, and then that in which it came to vacuum. Snapshots from before it see what was deleted.';
