-- What a database of another build of this version has, as far as it matters here: files of tables that this build does not have or has
-- otherwise, and a job.

create schema penstock;
create table penstock.migrations (
    name text primary key, checksum text not null, version text not null, applied_at timestamptz not null default now()
);
insert into penstock.migrations (name, checksum, version)
select name, md5(name), '0.1.0'
from unnest('{0001_core.sql,0002_jobs.sql,0012_attempts.sql,0034_producers.sql,functions}'::text[]) as name;
create table penstock.protocol (number integer, oldest integer, version text);
insert into penstock.protocol values (1, 1, '0.1.0');
create table penstock.queued_jobs (id uuid primary key, name text not null, data jsonb not null);
insert into penstock.queued_jobs values (gen_random_uuid(), 'invoice', '{"customer": 7}');
create function penstock.claim() returns integer language sql as 'select 1';
