-- A worker in which a consumer halted works on; whoever looks at it sees that.

drop function if exists penstock.worker_list();

alter table penstock.workers add column halted jsonb not null default '{}';
comment on column penstock.workers.halted is 'Consumers that ended in this worker, stream/group, each with its error; the worker goes on with its other work.';
