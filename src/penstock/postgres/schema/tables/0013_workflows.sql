-- Workflows: jobs that wait for other jobs, and job groups.
--
-- The life of a waiting job. An enqueue with `after` writes its row to waiting_jobs instead of queued_jobs, and one row to job_dependencies
-- for each job that it waits for. So what cannot run yet is outside the hot table, and no claim meets it. When the last of these jobs has
-- ended as the waiting job wants it, the row moves to queued_jobs, in one transaction (release). When one of them ended otherwise, the
-- waiting job is archived as cancelled, and this is an end like every other one: what waits for that job is cancelled in turn.
--
-- Who tells. A job that others wait for is marked (queued_jobs.awaited). Whatever ends a marked job, in whichever transaction, inserts one
-- row into workflow_ticks, with the ids of all such jobs of its batch. It updates nothing and locks nothing, so that settlements never wait
-- for each other because of a workflow; and a settlement without marked jobs does not know that there are workflows. After the commit
-- penstock.resolve_workflows reads the ticks, and releases or cancels what waited. One transaction at a time resolves, by an advisory
-- lock; it takes row locks only where it gets them at once, and leaves the rest for the next call, since the rows may be locked by
-- transactions of callers, which may be long. A tick is deleted in the transaction that did what follows from it: a crash in between
-- changes nothing.
--
-- How the mark comes to the job. An enqueue marks a job that is queued itself, and so keeps it from being claimed until its own transaction
-- has ended, as one that coalesces does. It does not touch a job that runs: a settlement would wait for the caller's transaction. Then the
-- dependency stays unlinked, and the first resolve after the commit marks the job under its row lock, or finds it in the archive. A job goes
-- from waiting_jobs to queued_jobs to archived_jobs and never back; so a look into them in this order, each in a statement of its own, does
-- not miss it.
--
-- Cycles. A job can wait only for jobs that are there when it is enqueued, and for those before it in the same call. So none waits for itself.
-- A group gains children later: a child that is to wait for what waits for its group is refused (check_cycles). Two transactions that do not
-- see each other can still make two groups wait for each other; they wait until one of them is cancelled.

-- Job groups. A group counts jobs, its children, and ends when it is sealed and each child has ended. A job can wait for a group as for a
-- job, and the `then` of a group is such a job. Neither an enqueue of children nor a settlement updates the group: the one writes a tick
-- with the number of the children, the other one with how many ended how, and the resolver adds both up in the row of the group. A tick of
-- an end is never visible without that of the enqueue before it, so the sums can be compared. An enqueue holds the row of the group with a
-- key share lock until its transaction has ended; the resolver ends a group only when it gets the row for itself, at once, and when no tick
-- of it is left. So no child comes to a group that has ended, also not one that was enqueued by a child, or by a process that was slow.
-- Whatever may end a group writes a tick of it, also the seal, which counts no children: a pass ends only groups of its own ticks. The end
-- of a group is that of a job: for what waits for it, and in a tick for the group of which it is a child itself.
--
-- A group that the handler of a job fills (`async with`) belongs to that job until it is sealed (filled_by), whatever becomes of single
-- attempts: a further attempt goes on with it. Its children have ids that follow from what they are (fill_group), so that those of an earlier
-- attempt are found again. The job is marked as if others waited for it, so that its end writes a tick; resolve_workflows cancels
-- a group that is not sealed by then.

-- Durable steps. A handler names its steps, and the result of each is a row in job_steps, which is written while the job is held (the fence:
-- the job is in progress under the lease of the caller). When the job runs again, whatever ended the run before, its handler gets these
-- results instead of doing the steps again. A sleep is a row with its end (due); a wait for a signal a row with its timeout, beside
-- the row of the signal in job_signals; children are a job group whose end the job awaits.
--
-- Who waits holds nothing. The worker settles the job as suspended: it stays in queued_jobs, among the deferred ones, which no
-- claim meets, with the attempt that it has, so that everything that holds for a deferred job holds for it: it can be cancelled, it
-- expires, it counts, and in a pool that blocks it holds its key. What it waits for is in waits_for. It does not go to waiting_jobs: a job
-- goes from waiting_jobs to queued_jobs to archived_jobs and never back, on which all that looks for a job relies.
--
-- What it waits for may come while it is being suspended. A signal, and the end of a group, leave a tick with the job (resumed). The resolver
-- locks the job where it gets the lock at once, and keeps the tick where it does not. The suspension locks the job, and looks for the
-- signal in a statement behind that. So one of them sees the other.
--
-- A signal and the timeout of its wait insert the same row, and the primary key decides which of them was first. So a wait has one
-- outcome, which is there for each further run too. A signal may come before the wait, and before the job has started.
--
-- Steps and signals stay as long as the job is in the archive: prune deletes them with its partition, an erasure with the job.

-- Graphs. A run of a graph is a job group whose children are named steps (graph_steps), enqueued with their dependencies in the transaction
-- that opens and seals the group. So a run is started once for its name, and what releases, ends, cancels and counts is that of jobs and
-- groups. A step of many jobs is a group in this group. A retry is a run of its own: it has the steps that did not succeed as new jobs,
-- and shares the other ones, whose rows name the jobs of the run before. A payload names results of other steps and does not have
-- them: a worker reads them when it starts the job (step_results).

-- The row of a waiting job is that of a queued job without a place in a queue: seq and slot are null.
create table penstock.waiting_jobs (
    like penstock.queued_jobs including defaults including constraints including comments,
    primary key (id)
)
with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);
comment on table penstock.waiting_jobs is
    'Jobs that wait for other jobs, outside the hot table. The columns are those of queued_jobs, where a job goes when it is released.';

create index waiting_jobs_name on penstock.waiting_jobs (name, id);
create index waiting_jobs_expiring on penstock.waiting_jobs (expires_at) where expires_at is not null;
-- Among waiting jobs a unique key is held by the first; key is the empty text where there is none.
create unique index waiting_jobs_unique on penstock.waiting_jobs (name, unique_key, coalesce(key, '')) where coalesces;
create index waiting_jobs_workflow on penstock.waiting_jobs (workflow, id) where workflow is not null;

create table penstock.job_dependencies (
    id bigint generated always as identity primary key,
    job uuid not null,
    after uuid not null,
    at_any_end boolean not null,
    linked boolean not null,
    constraint job_dependencies_self_check check (job <> after)
)
with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);
comment on table penstock.job_dependencies is 'Which waiting job waits for which other job, or job group. A row goes when that has ended.';
comment on column penstock.job_dependencies.id is 'In the order in which they were made.';
comment on column penstock.job_dependencies.job is 'The waiting job.';
comment on column penstock.job_dependencies.after is 'The job, or job group, for whose end it waits.';
comment on column penstock.job_dependencies.at_any_end is 'Whether any end will do; false: the other job has to succeed.';
comment on column penstock.job_dependencies.linked is
    'Whether the other job is marked, so that its end is noticed. The next resolve_workflows links what an enqueue could not.';

create unique index job_dependencies_job on penstock.job_dependencies (job, after);
create index job_dependencies_after on penstock.job_dependencies (after);
create index job_dependencies_unlinked on penstock.job_dependencies (id) where not linked;

create table penstock.workflow_ticks (
    id bigint generated always as identity primary key,
    workflow uuid,
    added integer not null default 0,
    succeeded integer not null default 0,
    failed integer not null default 0,
    cancelled integer not null default 0,
    expired integer not null default 0,
    jobs uuid[],
    statuses penstock.archived_job_status[],
    resumed uuid[],
    noted_at timestamptz not null default clock_timestamp()
)
with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
comment on table penstock.workflow_ticks is
    'Ends of jobs for which others wait, and children of job groups that were enqueued or ended, until resolve_workflows has done what follows from them.';
comment on column penstock.workflow_ticks.id is 'In the order in which they were written.';
comment on column penstock.workflow_ticks.workflow is 'The job group of these children; null: ends of jobs that are in no group.';
comment on column penstock.workflow_ticks.added is
    'Children that were enqueued; negative: that were counted twice, since their ids had jobs already which their enqueue could not see.';
comment on column penstock.workflow_ticks.succeeded is 'Children that succeeded.';
comment on column penstock.workflow_ticks.failed is 'Children that failed.';
comment on column penstock.workflow_ticks.cancelled is 'Children that were cancelled.';
comment on column penstock.workflow_ticks.expired is 'Children that expired.';
comment on column penstock.workflow_ticks.jobs is 'The jobs that ended for which others wait; null: none.';
comment on column penstock.workflow_ticks.statuses is 'How each of them ended.';
comment on column penstock.workflow_ticks.resumed is 'Suspended jobs for which a signal has come, or whose children have ended; null: none.';
comment on column penstock.workflow_ticks.noted_at is
    'When it was written; of what was postponed, when the oldest tick of that pass was. What stays old is a workflow that does not move.';

create index workflow_ticks_workflow on penstock.workflow_ticks (workflow) where workflow is not null;

create type penstock.ended_job as (id uuid, workflow uuid, awaited boolean, status penstock.archived_job_status);
comment on type penstock.ended_job is 'A job that ended, with what a tick needs to know of it.';

create table penstock.job_groups (
    id uuid primary key,
    name text not null unique,
    parent uuid,
    created_at timestamptz not null,
    changed_at timestamptz not null,
    sealed_at timestamptz,
    cancelled_at timestamptz,
    finished_at timestamptz,
    status penstock.archived_job_status,
    on_failure text not null,
    then_job uuid,
    then_name text,
    gathered_by uuid,
    filled_by uuid,
    added bigint not null default 0,
    succeeded bigint not null default 0,
    failed bigint not null default 0,
    cancelled bigint not null default 0,
    expired bigint not null default 0,
    graph text,
    retry_of uuid,
    retried_from text,
    ended_xid xid8,
    name_erased boolean not null default false,
    constraint job_groups_on_failure_check check (on_failure in ('cancel', 'continue')),
    constraint job_groups_retry_check check (retry_of is null or graph is not null)
)
with (fillfactor = 50);
comment on table penstock.job_groups is 'Job groups: any number of jobs, whose common end others can wait for.';
comment on column penstock.job_groups.id is 'Id of the group.';
comment on column penstock.job_groups.name is 'Name of the group: to open it again is the same group.';
comment on column penstock.job_groups.parent is 'The group of which it is a child; null: none.';
comment on column penstock.job_groups.created_at is 'When it was opened.';
comment on column penstock.job_groups.changed_at is 'When ticks of it were folded last, or when it was opened.';
comment on column penstock.job_groups.sealed_at is 'Since when it ends with the last of its children; null: more are to come.';
comment on column penstock.job_groups.cancelled_at is 'When its children began to be cancelled.';
comment on column penstock.job_groups.finished_at is 'When it ended.';
comment on column penstock.job_groups.status is 'How it ended: succeeded when each child did; null: it has not.';
comment on column penstock.job_groups.on_failure is 'cancel: the first child that fails cancels the others; continue: they go on.';
comment on column penstock.job_groups.then_job is 'The job that runs when the group has ended; null: none.';
comment on column penstock.job_groups.then_name is 'The type of this job.';
comment on column penstock.job_groups.gathered_by is 'The job whose handler waits for its children; null: none.';
comment on column penstock.job_groups.filled_by is
    'The job whose handler adds its children: when that job ends and the group is not sealed, it is cancelled; null: none.';
comment on column penstock.job_groups.added is 'Children that were enqueued, as far as their ticks are folded.';
comment on column penstock.job_groups.succeeded is 'Children that succeeded, as far as their ticks are folded.';
comment on column penstock.job_groups.failed is 'Children that failed, likewise.';
comment on column penstock.job_groups.cancelled is 'Children that were cancelled, likewise.';
comment on column penstock.job_groups.expired is 'Children that expired, likewise.';
comment on column penstock.job_groups.graph is 'Of a run of a graph: the name of the workflow; null: a job group that is no run.';
comment on column penstock.job_groups.retry_of is 'The run that this one retries, whose results it shares; null: none.';
comment on column penstock.job_groups.retried_from is
    'The step from which on it runs again; null: the steps that did not succeed.';
comment on column penstock.job_groups.name_erased is 'Whether an erasure removed whom the name names: the history gets the run without its name.';
comment on column penstock.job_groups.ended_xid is
    'Of a run of a graph: the transaction that ended it, by which a reader of the history knows whether it has seen the end; null: it has not ended.';

-- No index knows the numbers of children: to fold ticks is an update that touches none.
create index job_groups_latest on penstock.job_groups (created_at, id);
create index job_groups_open on penstock.job_groups (created_at, id) where finished_at is null;
create index job_groups_parent on penstock.job_groups (parent, created_at, id) where parent is not null;
create index job_groups_gathered on penstock.job_groups (gathered_by) where gathered_by is not null and finished_at is null;
create index job_groups_filled on penstock.job_groups (filled_by)
    where filled_by is not null and sealed_at is null and cancelled_at is null and finished_at is null;
create index job_groups_then on penstock.job_groups (then_job) where then_job is not null;

create table penstock.job_steps (
    at timestamptz not null,
    due timestamptz,
    job uuid not null,
    job_group uuid,
    kind text not null,
    name text not null,
    result jsonb,
    primary key (job, name),
    constraint job_steps_kind_check check (kind in ('step', 'sleep', 'wait', 'gather'))
)
with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);
comment on table penstock.job_steps is 'The durable steps of jobs, which are not done again when a job runs again.';
comment on column penstock.job_steps.at is 'When the step was done; of what waits: when it began to wait.';
comment on column penstock.job_steps.due is 'When a sleep ends, or a wait is over without its signal; null: it has no such time.';
comment on column penstock.job_steps.job is 'The job.';
comment on column penstock.job_steps.job_group is 'The job group of its children, of a step that gathers; null: it is another one.';
comment on column penstock.job_steps.kind is 'step: what a function returned; sleep; wait: for a signal; gather: for children.';
comment on column penstock.job_steps.name is 'Name of the step, which the handler chose.';
comment on column penstock.job_steps.result is 'What the step returned, or the results of its children; null: it has not ended, or it is a sleep or a wait.';

create table penstock.job_signals (
    at timestamptz not null,
    job uuid not null,
    name text not null,
    value jsonb,
    primary key (job, name)
)
with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);
comment on table penstock.job_signals is 'Signals to jobs, and timeouts of waits for signals: whichever came first.';
comment on column penstock.job_signals.at is 'When it came.';
comment on column penstock.job_signals.job is 'The job.';
comment on column penstock.job_signals.name is 'Name of the signal, and of the wait for it.';
comment on column penstock.job_signals.value is 'What was signalled; null: the wait timed out, and a signal that comes now is too late.';

-- The runs of each workflow, and those of all workflows, latest last; and the retry of a run, of which there is at most one.
create index job_groups_graph on penstock.job_groups (graph, created_at, id) where graph is not null;
create index job_groups_runs on penstock.job_groups (created_at, id) where graph is not null;
create index job_groups_ended_runs on penstock.job_groups (ended_xid) where ended_xid is not null;
create unique index job_groups_retry on penstock.job_groups (retry_of) where retry_of is not null;

create table penstock.graph_steps (
    run uuid not null references penstock.job_groups on delete cascade,
    job uuid not null,
    place integer not null,
    jobs integer,
    carried integer not null,
    at_any_end boolean not null,
    shared boolean not null,
    name text not null,
    type text not null,
    after integer[] not null,
    primary key (run, place),
    constraint graph_steps_name_key unique (run, name)
);
comment on table penstock.graph_steps is 'The steps of the runs of graphs. The rows go with the run.';
comment on column penstock.graph_steps.run is 'The run: the job group of which the steps are the children.';
comment on column penstock.graph_steps.job is 'The job of the step, or the job group of its jobs.';
comment on column penstock.graph_steps.place is 'Number of the step in its run, from 1: it waits only for steps with lower numbers.';
comment on column penstock.graph_steps.jobs is 'How many jobs the step has, when it is a job group; null: the step is one job.';
comment on column penstock.graph_steps.carried is 'How many of these succeeded in the runs that this one retries, and are not in its group.';
comment on column penstock.graph_steps.at_any_end is 'Whether any end of the steps before will do; false: they have to succeed.';
comment on column penstock.graph_steps.shared is 'Whether it is a step of an earlier run, which succeeded there and is not run again.';
comment on column penstock.graph_steps.name is 'Name of the step.';
comment on column penstock.graph_steps.type is 'Job type of the step.';
comment on column penstock.graph_steps.after is 'The numbers of the steps for whose end it waits.';

create index graph_steps_job on penstock.graph_steps (job);
