-- Schedules: timers and cron schedules.
--
-- A schedule that runs as jobs has a job type of its own name. When a slot (one time of the schedule) is due, one transaction moves
-- next_at and enqueues the run, whose id is derived from name and slot (functions/core/derived_ids.sql):
-- each slot has one run, whatever crashes. The next run is not
-- enqueued while that job is queued or in progress. The job has the outcome of the run; workers copy it here when the job is archived,
-- so that it outlives the archive. A schedule that runs in place is held by one worker (running_by) while it runs.
--
-- A run that is asked for outside the times of a schedule does not move next_at. Where runs are jobs, it is a job at once. A schedule that
-- runs in place keeps the request until a run for it has ended, so that it outlives the worker that took it.

create table penstock.schedules (
    name text primary key,
    kind text not null,
    spec text not null,
    runs_as text not null default 'in-place',
    next_at timestamptz,
    last_at timestamptz,
    job_id uuid,
    running_by text,
    running_until timestamptz,
    updated_at timestamptz not null,
    declared_at timestamptz,
    last_started_at timestamptz,
    last_finished_at timestamptz,
    last_worker text,
    last_outcome text,
    last_error text,
    last_error_at timestamptz,
    failures integer not null default 0,
    requested_at timestamptz,
    constraint schedules_kind_check check (kind in ('every', 'cron')),
    constraint schedules_runs_as_check check (runs_as in ('job', 'in-place', 'per-worker'))
);
comment on table penstock.schedules is 'Timers and cron schedules, with their last run. Look at them with schedule_list().';
comment on column penstock.schedules.name is 'Name of the schedule.';
comment on column penstock.schedules.kind is 'every: an interval; cron: an expression.';
comment on column penstock.schedules.spec is
    'The interval in seconds, or the cron expression with its time zone; when it changes the schedule begins again.';
comment on column penstock.schedules.runs_as is
    'job: each run is a job of the type of the same name; in-place: one worker calls the function itself; per-worker: every worker does.';
comment on column penstock.schedules.next_at is 'When it is due next; null: each worker runs it by itself.';
comment on column penstock.schedules.last_at is 'The time for which it ran last.';
comment on column penstock.schedules.job_id is 'The job of the last run.';
comment on column penstock.schedules.running_by is 'The worker that runs it in place now.';
comment on column penstock.schedules.running_until is 'When others take the worker for dead unless it extends the run.';
comment on column penstock.schedules.updated_at is 'When its times last changed.';
comment on column penstock.schedules.declared_at is 'When a running worker last said that its application declares it.';
comment on column penstock.schedules.last_started_at is 'When the last run that has ended started.';
comment on column penstock.schedules.last_finished_at is
    'When the last run ended; null: it has not, or workers have not noted it yet.';
comment on column penstock.schedules.last_worker is 'The worker of the last run that has ended.';
comment on column penstock.schedules.last_outcome is
    'succeeded, failed, expired, cancelled, or lost: its worker fell silent in the middle of a run in place.';
comment on column penstock.schedules.last_error is 'The error of the last run that failed. A run that succeeds leaves it.';
comment on column penstock.schedules.last_error_at is 'When the last run that failed ended.';
comment on column penstock.schedules.failures is 'Runs in a row that failed, expired or were lost; 0 after one that succeeded.';
comment on column penstock.schedules.requested_at is 'When a run in place was asked for that has not ended; null: none is.';
