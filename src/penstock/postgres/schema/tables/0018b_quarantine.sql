-- Large payloads, and those that nobody can read.

create table penstock.large_payloads (
    name text not null
);
comment on table penstock.large_payloads is
    'Job types and topics that ever had a payload above 16 KiB: a claim of these weighs what it takes. A name may be noted more than once: at most as often as transactions were the first at the same time.';
create index large_payloads_name on penstock.large_payloads (name);

-- Which of those that wait are large would have to be measured one by one.
insert into penstock.large_payloads (name)
select jobs.name from penstock.jobs where exists (select from penstock.queued_jobs where queued_jobs.name = jobs.name)
union
select topics.name from penstock.topics;

create table penstock.quarantined_payloads (
    id uuid primary key,
    data jsonb not null,
    quarantined_at timestamptz not null
);
comment on table penstock.quarantined_payloads is
    'Payloads that no client can read, of jobs that were quarantined for it: archived_jobs has null instead, so that all others can be read.';

-- Their parameters and results change.
drop function if exists penstock.find_jobs(uuid[]);
drop function if exists penstock.stored_jobs(uuid[]);
drop function if exists penstock.list_jobs(text, text, text, integer, timestamptz, uuid);
drop function if exists penstock.page_of_jobs(boolean, text[], text, text, timestamptz, timestamptz, integer, timestamptz, uuid);
drop function if exists penstock.job_counts();
drop function if exists penstock.replay(uuid, uuid);
