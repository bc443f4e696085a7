-- Paused keys of pools, and the deferred jobs of a type.
--
-- A paused key has a row in paused_keys until it is resumed; no claim takes jobs of it meanwhile. The row of its pool says whether there is
-- one (keys_paused), so that a claim of a pool without paused keys looks for none: it reads that row anyway. Both are written under the lock
-- of the pool's row.

alter table penstock.pools add column keys_paused boolean not null default false;
comment on column penstock.pools.keys_paused is 'Whether paused_keys has keys of this pool.';

create table penstock.paused_keys (
    name text not null references penstock.pools (name),
    key text not null,
    paused_at timestamptz not null,
    primary key (name, key)
);
comment on table penstock.paused_keys is 'Keys of pools of which no job is claimed until they are resumed.';
comment on column penstock.paused_keys.name is 'Name of the pool.';
comment on column penstock.paused_keys.key is 'The key.';
comment on column penstock.paused_keys.paused_at is 'Since when it is paused.';

-- The deferred jobs of a type, or of a key in a pool. Only deferred jobs are in it, so that claims do not write it.
create index queued_jobs_deferred_of_type on penstock.queued_jobs (name, key collate "C", id) where seq is null;
