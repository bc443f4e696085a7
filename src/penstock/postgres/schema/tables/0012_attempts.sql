-- Attempts count up.
--
-- A job has an attempt (1, 2, 3, ...) and the number of attempts that it may have, max_attempts; so has a finished job, whose attempt is
-- the last one that it had, 0 when it never started. Before, both tables counted down the attempts that were left. What is left is
-- max_attempts - attempt + 1 of a queued job; over Rickover's HTTP API alone it is shown.
--
-- The update of queued_jobs is HOT, since no index has the column. That of the archive writes every row of it once more: a database with
-- a long archive is migrated sooner after penstock prune.

alter table penstock.jobs rename column attempts to max_attempts;
alter table penstock.jobs rename constraint jobs_attempts_check to jobs_max_attempts_check;
-- What was declared is the same declaration under the new name, so that a change made by hand outlives the migration too.
update penstock.jobs
set declaration = declaration - 'attempts' || jsonb_build_object('max_attempts', declaration -> 'attempts')
where declaration ? 'attempts';

alter table penstock.queued_jobs rename column attempts to attempt;
alter table penstock.queued_jobs drop constraint queued_jobs_attempts_check;
update penstock.queued_jobs set attempt = max_attempts - attempt + 1;
alter table penstock.queued_jobs add constraint queued_jobs_attempt_check check (attempt > 0);
comment on column penstock.queued_jobs.attempt is
    'Number of the attempt that runs or comes next, from 1; fences results of earlier attempts.';
comment on column penstock.queued_jobs.max_attempts is
    'Attempts that the job may have: as it was enqueued, and one more for each that was lost with its worker.';

alter table penstock.archived_jobs rename column attempts to max_attempts;
alter table penstock.archived_jobs rename column attempts_used to attempt;
alter table penstock.archived_jobs drop constraint archived_jobs_attempts_check;
update penstock.archived_jobs set max_attempts = attempt + max_attempts - case when status = 'succeeded' then 1 else 0 end;
alter table penstock.archived_jobs add constraint archived_jobs_attempt_check check (attempt >= 0);
comment on column penstock.archived_jobs.attempt is 'Number of its last attempt; 0: it never started.';
comment on column penstock.archived_jobs.max_attempts is 'As in queued_jobs.';
