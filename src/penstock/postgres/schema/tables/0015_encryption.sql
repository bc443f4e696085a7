-- Encrypted payloads: which job types have them, and which keys workers have.
--
-- An encrypted document is stored as an envelope (docs/encryption.md), {"penstock": {"v": 1, "kid": "...", "c": "..."}}, in the place of the
-- document. The database has no key and reads none: it knows by the declaration that a document has to be an envelope, refuses what is not
-- (functions/core/envelopes.sql), and gives a job only to a worker that says that it has the key. encrypted_at stays when encryption is
-- turned off again: from then on both forms may wait, and are read.

alter table penstock.jobs add column encrypted boolean not null default false;
alter table penstock.jobs add column encrypted_at timestamptz;
comment on column penstock.jobs.encrypted is
    'Whether payloads, results, progress and errors are stored encrypted: a document that is not is refused.';
comment on column penstock.jobs.encrypted_at is 'Since when there may be encrypted documents; null: there are none.';

-- Whether any type is encrypted is asked by calls that otherwise need no look at the types.
create index jobs_encrypted on penstock.jobs (name) where encrypted;

alter table penstock.workers add column key_ids text[] not null default '{}';
alter table penstock.workers add column no_key jsonb not null default '{}';
comment on column penstock.workers.key_ids is 'Ids of the keys of encrypted payloads that it has.';
comment on column penstock.workers.no_key is
    'Job types and pools of its application on which it does not work for want of a key: the id of the key, or null when it has none.';
