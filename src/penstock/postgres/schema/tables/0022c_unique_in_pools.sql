-- In a pool a unique key is of its key: the same unique key of another key is another job.

drop index penstock.queued_jobs_unique;
create unique index queued_jobs_unique on penstock.queued_jobs (name, unique_key, (case when slot is not null then key else '' end)) where coalesces;
comment on column penstock.queued_jobs.unique_key is 'Coalescing key, see coalesces; in a pool within the jobs of one key.';
