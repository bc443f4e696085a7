-- Restores: from which backup to which time the database was restored, so that what is outside and ahead of it can be told.
--
-- The first row, number 0, notes the server on which the schema was made. After a restore the server is another one (its identifier), or on
-- another timeline: penstock doctor says so, until fence_restored adds a row. That row notes where the database ended: a position in the archive from before
-- that is behind next_xid, or an offset behind the end of its partition in restored_ends, was read from what is lost.

create table penstock.restores (
    number integer primary key,
    noted_at timestamptz not null,
    system_id text,
    timeline integer,
    next_xid xid8 not null,
    nothing_lost boolean not null default false
);
comment on table penstock.restores is 'Restores of this database; number 0: the server on which the schema was made.';
comment on column penstock.restores.number is 'Number of the restore, from 1. A checkpoint has the number of the last one before it.';
comment on column penstock.restores.noted_at is 'When it was noted.';
comment on column penstock.restores.system_id is 'Identifier of the server; null: it does not show it.';
comment on column penstock.restores.timeline is 'Timeline of the server; null: it does not show it.';
comment on column penstock.restores.next_xid is 'The next transaction of the restored database: no position from before is behind it, unless it saw what is lost.';
comment on column penstock.restores.nothing_lost is 'Whether nothing was lost, as in a move to another server: then there is nothing to be told.';

create table penstock.restored_ends (
    restore integer not null references penstock.restores (number),
    stream integer not null references penstock.streams (id) on delete cascade,
    partition integer not null,
    next_offset bigint not null,
    primary key (stream, restore, partition)
);
comment on table penstock.restored_ends is 'Where each partition of each stream ended at a restore.';
comment on column penstock.restored_ends.restore is 'Number of the restore.';
comment on column penstock.restored_ends.stream is 'Id of the stream.';
comment on column penstock.restored_ends.partition is 'Number of the partition.';
comment on column penstock.restored_ends.next_offset is 'The offset that the next event got. Events from there on, read before the restore, are lost.';
