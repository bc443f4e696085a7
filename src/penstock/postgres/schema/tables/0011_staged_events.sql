-- Events on their way from Spark tasks into streams, as staged_jobs is for jobs (see 0006_history.sql). A row is a chunk, as it
-- will stand in the stream, so that a commit copies rows and looks into none of them.

create unlogged table penstock.staged_events (
    writer text not null,
    part text not null,
    place bigint not null,
    staged_at timestamptz not null default clock_timestamp(),
    stream text not null,
    width integer,
    partition integer not null,
    events integer not null,
    keys text[],
    times timestamptz[],
    headers text[],
    data text[],
    bytes bytea[],
    constraint staged_events_events_check check (events between 1 and 1000)
);
comment on table penstock.staged_events is 'Events on their way from Spark tasks into streams. Unlogged: whoever stages counts, and repeats what a crash has emptied.';
comment on column penstock.staged_events.writer is 'The query or the write that they belong to.';
comment on column penstock.staged_events.part is 'The attempt of a task that wrote them; only parts that are named at the commit count.';
comment on column penstock.staged_events.place is 'Order within the part.';
comment on column penstock.staged_events.width is 'The number of partitions that the keys were routed for; null: the writer chose the partition itself.';
create index staged_events_part on penstock.staged_events (writer, part, place);

alter table penstock.staged_jobs add column made uuid;
comment on column penstock.staged_jobs.made is 'The id of the job when id says none: made where the rows are made, in the tasks, since a commit that makes a million takes its time.';

alter table penstock.fleet_members add column draining boolean not null default false;
comment on column penstock.fleet_members.draining is 'Set to tell this worker to stop.';
