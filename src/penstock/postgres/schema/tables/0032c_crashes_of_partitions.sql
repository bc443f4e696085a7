-- Crashes of consumers: an event that ends its worker does not end worker after worker. The ideas are those of
-- tables/0032b_crashes_of_standing.sql.
--
-- When a member is lost, each of its partitions in which events wait counts a crash, at the offset that the group had reached. After two
-- with at most 1,000 events between them the partition is a suspect: its owner handles one event of one suspect at a time in the whole
-- process (tried), and commits each before the next one. What ends the worker then is the event at that offset. When that happens for
-- the second time (crashes = 4) the event is not handled any more, and the consumer does what its policy on_failure says about an event
-- that will not succeed: skip, dead letter, halt, or (also with "retry") quarantine the partition.

alter table penstock.group_offsets add column crashes smallint not null default 0;
comment on column penstock.group_offsets.crashes is
    'Members lost one after the other while the group was near crashed_at. 2: events are handled one by one; 3 and 4: the event at crashed_at ended its worker alone, once and twice.';
alter table penstock.group_offsets add column crashed_at bigint;
comment on column penstock.group_offsets.crashed_at is 'How far the group was when a member was lost; null: none was.';
alter table penstock.group_offsets add column tried boolean not null default false;
comment on column penstock.group_offsets.tried is 'Whether its owner handles an event of it now, and of no other suspect.';

-- Its result changes.
drop function if exists penstock.begin_partitions(text, text, text, integer[], bigint[]);
