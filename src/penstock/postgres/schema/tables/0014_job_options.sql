-- What a job has beside its type: options of its own, given with the enqueue, and how often its handler put it off.
--
-- A job with its own max_attempts or time_limit has them in options; every other job has null there, which takes no space. The archive
-- keeps them, so that a replay has them too. A handler that cannot go on yet snoozes its job: the job goes back among the deferred ones
-- without having used up an attempt, and snoozed_at says that it waits for that reason, until it is claimed and ends otherwise.

alter table penstock.queued_jobs add column options jsonb;
alter table penstock.queued_jobs add column snoozes smallint;
alter table penstock.queued_jobs add column snoozed_at timestamptz;
comment on column penstock.queued_jobs.options is
    'Its own options, in place of those of its type: max_attempts, time_limit (in seconds); null: it has none.';
comment on column penstock.queued_jobs.snoozes is 'How often its handler put it off; null: never.';
comment on column penstock.queued_jobs.snoozed_at is 'When its handler put it off until run_after; null: it does not wait for that.';

alter table penstock.archived_jobs add column options jsonb;
alter table penstock.archived_jobs add column snoozes smallint;
comment on column penstock.archived_jobs.options is 'As in queued_jobs.';
comment on column penstock.archived_jobs.snoozes is 'As in queued_jobs.';
