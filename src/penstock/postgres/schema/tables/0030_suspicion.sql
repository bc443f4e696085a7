-- Suspicion: nobody is taken for dead in one look.
--
-- A worker or member that says nothing may be dead, or the database could not be reached: PostgreSQL was restarted and recovered for
-- longer than anybody may be silent, its machine stood still, the network was away. Right after that all are silent, and the first
-- one that comes back would take all others for dead, their jobs for lost and what may be started only once for failed. So a look
-- that finds a silence of three fifths of dead_after only notes the suspicion. Whoever is silent for dead_after, and is still
-- so half of it after the first look, is dead: in that time, when the database can be reached, it could have said that it lives. A
-- heartbeat is later than a suspicion and so ends it; a suspicion from before the start of the server does not count.

alter table penstock.workers add column suspected_at timestamptz;
comment on column penstock.workers.suspected_at is
    'When a look first found it silent for three fifths of dead_after; counts while it is later than seen_at and the start of the server.';
alter table penstock.members add column suspected_at timestamptz;
comment on column penstock.members.suspected_at is
    'When a look first found it silent for three fifths of dead_after; counts while it is later than seen_at and the start of the server.';
