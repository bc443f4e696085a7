-- Leases that are renewed, and workers that died, leave a trace until all that follows from it is done.

alter table penstock.leases add column renews bigint;
comment on column penstock.leases.renews is 'The lease from which an extend took its jobs: by it a repeated extend, whose first answer was lost, is recognised.';

alter table penstock.workers drop constraint workers_state_check;
alter table penstock.workers add constraint workers_state_check check (state in ('running', 'draining', 'dead'));
comment on column penstock.workers.state is 'running; draining: it stops; dead: it fell silent or left, and some of its leases were locked when the others were recovered.';
