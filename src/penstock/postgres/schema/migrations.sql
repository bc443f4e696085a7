-- What a migration needs before anything else: the schema and the record of what was applied.

create schema if not exists penstock;

create table if not exists penstock.migrations (
    name text primary key,
    checksum text not null,
    version text not null,
    applied_at timestamptz not null default now()
);
comment on table penstock.migrations is 'Numbered files that were applied, and the state of the functions.';
comment on column penstock.migrations.name is 'Name of the file, or functions.';
comment on column penstock.migrations.checksum is 'SHA-256 of the file, or of all files of functions.';
comment on column penstock.migrations.version is 'The version of Penstock that applied it.';
comment on column penstock.migrations.applied_at is 'When it was applied.';
