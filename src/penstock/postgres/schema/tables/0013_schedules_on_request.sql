-- Schedules: runs on request, and how often a schedule failed.
--
-- A run that is asked for outside the times of a schedule does not move next_at. Where runs are jobs, it is a job at once. A schedule that
-- runs in place keeps the request until a run for it has ended, so that it outlives the worker that took it.

alter table penstock.schedules
    add column failures integer not null default 0,
    add column requested_at timestamptz;
comment on column penstock.schedules.failures is 'Runs in a row that failed, expired or were lost; 0 after one that succeeded.';
comment on column penstock.schedules.requested_at is 'When a run in place was asked for that has not ended; null: none is.';
