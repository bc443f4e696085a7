-- Crashes of standing jobs: as with jobs (tables/0021_crashes.sql), nobody can tell which of the runs in a process ended it.
--
-- Each run that is lost with its worker counts a crash. After two within ten minutes the job is a suspect: its owner starts suspects
-- beside what is no suspect, but on trial, one at first, then two, four, and so on, each time after those before have survived for a
-- while that grows with their crashes. When a worker is lost during a trial only those on trial count it. So the suspects are sifted
-- with few further crashes, however many there are. One that was on trial alone and had three crashes before is quarantined: it is set
-- aside, with its error, until it is started again.

alter table penstock.standing_jobs add column crashes integer not null default 0;
comment on column penstock.standing_jobs.crashes is
    'Workers lost one after the other while they ran it; with 2 it is on trial when it starts. Begins again at 1 after a run of ten minutes.';
alter table penstock.standing_jobs add column tried_with integer;
comment on column penstock.standing_jobs.tried_with is 'How many suspects its run is on trial with, itself included; null: it is not on trial.';
alter table penstock.standing_jobs add column quarantined_at timestamptz;
comment on column penstock.standing_jobs.quarantined_at is
    'Since when it is set aside, since it ends its workers; null: it is not. Starting it again, or replacing its payload, frees it.';
alter table penstock.standing_jobs add column entered_at timestamptz;
comment on column penstock.standing_jobs.entered_at is 'When the start side of the last run had succeeded; null: not yet, or it failed.';

-- Their parameters or results change.
drop function if exists penstock.standing_of(text, text, integer[], bigint[]);
drop function if exists penstock.begin_standing(text, text, text, integer, bigint, bigint);
drop function if exists penstock.standing_list(text, text, integer, text);
