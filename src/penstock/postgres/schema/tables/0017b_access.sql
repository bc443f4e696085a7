-- Who waits and who stages is noted with its role, so that one role cannot use up, take or drop what is another's; and a role has one
-- access, so that to give it less takes something away.

alter table penstock.idle_readers add column role name not null default session_user;
comment on column penstock.idle_readers.role is 'Who waits; each role has a bounded number of places.';

alter table penstock.idle_history_readers add column role name not null default session_user;
comment on column penstock.idle_history_readers.role is 'Who waits; each role has a bounded number of places.';

alter table penstock.staged_jobs add column role name not null default session_user;
comment on column penstock.staged_jobs.role is 'Who staged it, and alone can commit or discard it. Producers cannot set it.';

alter table penstock.staged_events add column role name not null default session_user;
comment on column penstock.staged_events.role is 'Who staged it, and alone can commit or discard it. Producers cannot set it.';

-- Of several accesses of a role the one that holds the others.
delete from penstock.access_grants as less
using penstock.access_grants as more
where less.role_name = more.role_name
    and array_position('{reader,producer,worker,admin}', less.access) < array_position('{reader,producer,worker,admin}', more.access);
alter table penstock.access_grants drop constraint access_grants_pkey;
alter table penstock.access_grants add primary key (role_name);
