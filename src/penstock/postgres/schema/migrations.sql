-- What a migration needs before anything else: the schema and the record of what was applied.

create schema if not exists penstock;

create table if not exists penstock.migrations (
    name text primary key,
    checksum text not null,
    version text not null,
    applied_at timestamptz not null default now()
);
comment on table penstock.migrations is 'Numbered files that were applied, and the state of the functions.';

create or replace function penstock.record_migration(p_name text, p_checksum text, p_version text)
returns void
language sql
as $$
    insert into penstock.migrations (name, checksum, version)
    values (p_name, p_checksum, p_version)
    on conflict (name) do update
    set checksum = excluded.checksum, version = excluded.version, applied_at = now()
$$;
comment on function penstock.record_migration(text, text, text) is 'Part of a migration: notes a file as applied.';
