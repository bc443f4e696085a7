-- Core: migrations, protocol, access and maintenance.
--
-- A migration writes the row of protocol (postgres/migrate.py says what it means). grant_access writes a row of access_grants for
-- each role, and a migration repeats all grants from there.
--
-- Ids that Penstock derives (functions/core/derived_ids.sql) follow from a secret, which the migration makes and no role reads, so that
-- no role can take such an id before the job that is to have it is there. The secret is a row like any other, and goes with dumps and
-- restores. A further row is a new secret: what was begun before keeps the ids that follow from the old one.
--
-- A process that does maintenance which only one may do at a time locks the row of that work in maintenance. Advisory locks would not
-- do: any login of the database can hold one for ever, and lost jobs would no longer be recovered.

create table penstock.protocol (
    is_row boolean primary key default true,
    number integer not null,
    oldest integer not null,
    version text not null,
    changed_at timestamptz not null default now(),
    constraint protocol_is_row_check check (is_row),
    constraint protocol_range_check check (oldest between 1 and number)
);
comment on table penstock.protocol is 'The protocol that the functions speak. One row.';
comment on column penstock.protocol.is_row is 'Always true: there is one row.';
comment on column penstock.protocol.number is
    'Number of the protocol; it grows when a function that clients call is added or changed.';
comment on column penstock.protocol.oldest is
    'The oldest protocol whose clients still find all that they call; it grows when a function is dropped or means something else.';
comment on column penstock.protocol.version is 'The version of Penstock whose functions these are.';
comment on column penstock.protocol.changed_at is 'When a migration last wrote it.';

create table penstock.access_grants (
    role_name name not null,
    access text not null,
    primary key (role_name)
);
comment on table penstock.access_grants is
    'Which access each role was given, so that a migration can give it to new functions too. A role has one access, so that to give it less takes something away.';
comment on column penstock.access_grants.role_name is 'The role.';
comment on column penstock.access_grants.access is 'Its access: reader, producer, worker, server or admin.';

create table penstock.maintenance (
    name text primary key
);
comment on table penstock.maintenance is
    'Maintenance that one process at a time does for all: a row for each kind, to be locked. Only functions of the owner can lock them.';
comment on column penstock.maintenance.name is
    'The work: recover (jobs of lost workers) or maintain_topics (subscriptions and queues that are over).';
insert into penstock.maintenance (name) values ('recover'), ('maintain_topics');

create table penstock.id_secrets (
    made_at timestamptz primary key,
    inner_key bytea not null,
    outer_key bytea not null,
    constraint id_secrets_length_check check (length(inner_key) = 64 and length(outer_key) = 64)
);
comment on table penstock.id_secrets is
    'Secrets from which derived ids follow, for the owner of the schema alone: grant_access gives no role a right on it.';
comment on column penstock.id_secrets.made_at is 'What begins from here on, until the next secret, has ids that follow from it.';
comment on column penstock.id_secrets.inner_key is 'Key of the inner hash: 64 bytes, of which 61 are random.';
comment on column penstock.id_secrets.outer_key is 'Key of the outer hash, likewise.';

create unlogged table penstock.listeners (
    channel text not null,
    kind text not null,
    subject text not null default '',
    names text[] not null default '{}',
    role name not null default session_user,
    until timestamptz not null,
    primary key (channel, kind, subject),
    constraint listeners_kind_check check (kind in ('jobs', 'keys', 'events', 'history'))
)
with (fillfactor = 50);
comment on table penstock.listeners is
    'Who is idle and waits for a notification. What brings work notifies only these; unlogged, since each row is a hint.';
comment on column penstock.listeners.channel is 'The channel on which the listener listens.';
comment on column penstock.listeners.kind is
    'What it waits for: jobs of a type, keys (jobs of a pool in its slots), events of a stream, or history (jobs in the archive).';
comment on column penstock.listeners.subject is
    'Name of the pool, or id of the stream; of history, the name of the reader, since readers share a channel; of jobs, empty.';
comment on column penstock.listeners.names is
    'Of jobs: the job types. One row has them all, since a process can wait for thousands of queues, and says so again and again.';
comment on column penstock.listeners.role is 'The role that waits; each role has a bounded number of places.';
comment on column penstock.listeners.until is 'Until when the row counts; a listener that still waits says so again before.';

create index listeners_subject on penstock.listeners (kind, subject);
