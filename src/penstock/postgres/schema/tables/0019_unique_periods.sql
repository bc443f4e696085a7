-- Periods of unique keys.
--
-- A job that is enqueued with a unique key and a period (unique_for) gets a row here. The row holds the key until the period is over and the
-- job has ended, whichever comes last: an enqueue with the same key and a period returns that job. The next enqueue after that takes the row
-- over; maintenance deletes rows that hold nothing any more. An enqueue without a period neither reads nor writes this table.

create table penstock.unique_periods (
    name text not null references penstock.jobs (name) on delete cascade,
    unique_key text not null,
    key text not null,
    id uuid not null,
    until timestamptz not null,
    look_at timestamptz not null,
    primary key (name, unique_key, key)
);
comment on table penstock.unique_periods is 'Unique keys that are held for a period, and by which job.';
comment on column penstock.unique_periods.name is 'Job type.';
comment on column penstock.unique_periods.unique_key is 'The unique key.';
comment on column penstock.unique_periods.key is 'In a pool the key of the job, since a unique key is of its key there; elsewhere empty.';
comment on column penstock.unique_periods.id is 'The job that holds the key.';
comment on column penstock.unique_periods.until is 'Until when it holds the key, also when it has ended.';
comment on column penstock.unique_periods.look_at is 'When maintenance looks whether the row can go: at until, and later again while the job has not ended.';

create index unique_periods_ended on penstock.unique_periods (look_at);
