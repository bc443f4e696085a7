-- Rates: how many attempts ended in each minute, and how long they waited and ran.
--
-- The life of a row. Every process counts what ends in it, and about once a minute it adds that to the rows of the minute and of the quarter
-- of an hour, by the clock of this database, in which it writes: penstock.note_rates. Rows of minutes go after two hours, those of quarters
-- after 26, with the next write. Histograms of several rows and processes can be added up, so percentiles can be read of any of them.
--
-- What is lost. A process that ends in an orderly way writes what it has. One that is killed takes with it what it counted since its last
-- write, at most a minute of its own attempts; one that cannot reach the database drops a write, rather than that an attempt counts twice.
--
-- Bounds. A process writes of the first thousand job types that it counts in a minute, and of all others together as "others". A quarter
-- has rows of at most some two thousand types; what further types have is added to "others". The row with the empty name is the sum of all.

create table penstock.rates (
    name text not null,
    wide boolean not null,
    at timestamptz not null,
    succeeded bigint not null,
    failed bigint not null,
    retried bigint not null,
    others bigint not null,
    waits double precision[] not null,
    runs double precision[] not null,
    wait_s double precision not null,
    run_s double precision not null,
    constraint rates_pkey primary key (name, wide, at)
)
with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
comment on table penstock.rates is 'How many attempts ended, and how long they waited and ran, by job type and minute or quarter of an hour.';
comment on column penstock.rates.name is 'Name of the job type; "others": of those that have no rows of their own; empty: the sum of all.';
comment on column penstock.rates.wide is 'Whether it is a quarter of an hour; otherwise it is a minute.';
comment on column penstock.rates.at is 'When the minute or quarter begins.';
comment on column penstock.rates.succeeded is 'Attempts that succeeded.';
comment on column penstock.rates.failed is 'Attempts after which the job was archived as failed.';
comment on column penstock.rates.retried is 'Attempts that failed, after which the job went back to the queue.';
comment on column penstock.rates.others is 'Attempts that ended otherwise: cancelled, released, snoozed, suspended.';
comment on column penstock.rates.waits is
    'Attempts by the time from when the job could run to its start: up to 0.001 s, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200 s, and longer. Of attempts of workers alone, so they may be fewer.';
comment on column penstock.rates.runs is 'Attempts by the time that they ran, in the same buckets.';
comment on column penstock.rates.wait_s is 'Sum of the times that are in waits.';
comment on column penstock.rates.run_s is 'Sum of the times that are in runs.';

create index rates_at on penstock.rates (wide, at);
