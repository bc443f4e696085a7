-- Lines that handlers log with their job.
--
-- A worker writes the lines of its jobs about once a second, and the last ones before it settles the job. They stand in the row of the
-- job, oldest first, and go with it into the archive. penstock.append_log keeps the newest 100, of each the first 1,000 characters.

alter table penstock.queued_jobs add column log jsonb;
comment on column penstock.queued_jobs.log is
    'The newest lines that its handler logged, oldest first: objects with at, attempt and line; null: none.';
alter table penstock.archived_jobs add column log jsonb;
comment on column penstock.archived_jobs.log is 'As in queued_jobs.';
