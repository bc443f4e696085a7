-- Jobs that their handlers finished in transactions of their own.
--
-- penstock.finish archives a job in the transaction of its caller, together with what the handler did there. That transaction may be long,
-- and the lease is shared with the other jobs of its claim, so it does not touch the lease: whoever settles another job of the claim would
-- wait for it. It leaves a row here instead. When the transaction has committed, the worker confirms it, or the maintenance of any worker
-- finds it: the row goes, and the job is taken off its lease, once.

create table penstock.finished_jobs (
    id uuid primary key,
    lease bigint not null
)
with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
comment on table penstock.finished_jobs is
    'Jobs that were finished in transactions of their callers, and are not taken off their leases yet.';
comment on column penstock.finished_jobs.id is 'Id of the job.';
comment on column penstock.finished_jobs.lease is 'The lease that still counts it.';
