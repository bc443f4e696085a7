-- Bounds of what waits: of a job type, and of one key of a pool.
--
-- An enqueue beyond a bound is refused before anything is written. A type without a bound pays nothing for it.

alter table penstock.jobs add column max_waiting integer;
comment on column penstock.jobs.max_waiting is
    'Most jobs that wait, ready or deferred: an enqueue beyond it is refused; null: no limit.';

alter table penstock.pools add column key_max_waiting integer;
comment on column penstock.pools.key_max_waiting is
    'Most jobs of one key that wait, ready or deferred: an enqueue beyond it is refused; null: no limit.';
