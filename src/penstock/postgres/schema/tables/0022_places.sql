-- The places of a limit go round.
--
-- A type with a concurrency or a rate limit has so many places over all workers. Whoever settles a job could take the place that
-- this frees at once, while the others only look now and then. Therefore a worker that found none waits with a ticket. A claim leaves
-- their share to those with earlier tickets; what frees places, a settle or a claim that left some, notifies the first in the line. Who
-- took a place and wants more goes to the end of the line; who got all that it can use leaves it. An offer that is not taken
-- within a second is void, so that a worker that died or is stopped holds nobody up.
--
-- The rows are written by claims, which the lock of the type puts in one order, and by waiters; a settle only reads them, since
-- it may stand in a long transaction of a caller.

create sequence penstock.place_ticket as bigint;
comment on sequence penstock.place_ticket is 'Orders those who wait for a place of a limit.';

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
comment on table penstock.place_waiters is 'Workers that wait for a place of a type at its limit; unlogged, since they wait again after a restart.';
comment on column penstock.place_waiters.name is 'The job type.';
comment on column penstock.place_waiters.worker is 'Who claims: a worker, or a member of the pool.';
comment on column penstock.place_waiters.channel is 'It listens on penstock_<channel>.';
comment on column penstock.place_waiters.ticket is 'Its place in the line.';
comment on column penstock.place_waiters.since is 'When it last said so.';
comment on column penstock.place_waiters.offered_at is 'Since when a place is kept for it; null: none is.';
