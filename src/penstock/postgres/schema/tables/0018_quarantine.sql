-- A job that cannot be read, or that ends every worker which runs it, is archived as failed like any other that failed. Its reason
-- says that it is one of these.

alter table penstock.archived_jobs add column reason text;
comment on column penstock.archived_jobs.reason is
    'Why it ended so, where the status does not say it: quarantined, for a job that cannot be read or that ends its workers.';
