-- Crashes: what is known of jobs whose worker was lost while it held them.
--
-- Nobody can tell which of the jobs in flight killed a worker. So none of them is condemned for it: a job that was lost with its
-- worker goes back to its place, and no attempt of those that it may fail is used up (max_attempts grows instead, so that the number
-- of the attempt does). After its second crash it waits apart (crashes = 2, run_after in the year 9999: no claim sees it) until some
-- worker has nothing else in hand and runs it alone (crashes = 3). What ends its worker then is archived as failed with the reason
-- quarantined; what survives is an ordinary job again. In a pool that blocks, a job that waits apart keeps its number, and so holds
-- its key.
--
-- A job that may be started only once needs more: a mark (begun) that is written before it starts. A holder that promises to write
-- it stands in holders; what it had not begun when it was lost was not started, and goes back untouched. What others hold counts as
-- started when it is claimed. A dispatcher runs nothing itself but sends jobs elsewhere, under their attempt numbers: its loss uses
-- up the attempt of what it had begun, since that number has been seen, and says nothing against any job.

alter table penstock.queued_jobs add column crashes smallint not null default 0;
comment on column penstock.queued_jobs.crashes is
    'Workers lost while they held the job. 2: it waits to run alone (run_after is in the year 9999); 3: it runs alone.';
alter table penstock.queued_jobs add column begun boolean not null default false;
comment on column penstock.queued_jobs.begun is 'Whether its holder, which promised to say so, has begun to start it.';
comment on column penstock.queued_jobs.max_attempts is
    'Attempts that the job had when it was enqueued, and one more for each that was lost with its worker.';
create index queued_jobs_apart on penstock.queued_jobs (name, seq) where crashes = 2;

create table penstock.holders (
    id text primary key,
    kind text not null,
    since timestamptz not null,
    constraint holders_kind_check check (kind in ('worker', 'dispatcher'))
);
comment on table penstock.holders is 'Workers and members that call begin_jobs before they start an at_most_once job.';
comment on column penstock.holders.id is 'Of the worker or member, as in leases.worker.';
comment on column penstock.holders.kind is 'worker: it runs jobs; dispatcher: it sends them elsewhere under their attempt numbers, after begin_jobs.';
comment on column penstock.holders.since is 'When it promised.';

alter table penstock.workers add column blocked_since timestamptz;
alter table penstock.workers add column blocked_by text;
comment on column penstock.workers.blocked_since is 'Since when its event loop has made no progress; null: it makes progress.';
comment on column penstock.workers.blocked_by is 'What blocks its event loop, as far as that is known: job type and id.';
alter table penstock.workers add column isolates boolean not null default false;
comment on column penstock.workers.isolates is 'Whether it empties itself to run jobs alone at this moment.';
