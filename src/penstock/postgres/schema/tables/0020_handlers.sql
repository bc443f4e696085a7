-- What workers say of their handlers.
--
-- A worker that starts writes a row for each handler that it has: what its payloads look like, where it is documented and who answers for it.
-- The row of a handler is written again when a worker says something else of it. It remains when no worker has the handler any more:
-- noted_at says when one last began with it.

create table penstock.handlers (
    kind text not null check (kind in ('job', 'pool', 'subscriber', 'consumer', 'schedule', 'leader')),
    name text not null,
    schema jsonb,
    docs_url text,
    owner text,
    noted_at timestamptz not null,
    primary key (kind, name)
);
comment on table penstock.handlers is 'What workers say of their handlers, for people: payloads, documentation, owner.';
comment on column penstock.handlers.kind is 'What has the handler: a job type, pool, subscriber, consumer group, schedule, or task of the leader.';
comment on column penstock.handlers.name is 'Its name; of a consumer group in the form stream/group.';
comment on column penstock.handlers.schema is 'JSON Schema of the payloads; null: any JSON.';
comment on column penstock.handlers.docs_url is 'Where it is documented.';
comment on column penstock.handlers.owner is 'Who answers for it.';
comment on column penstock.handlers.noted_at is 'When a worker last began to work with it.';
