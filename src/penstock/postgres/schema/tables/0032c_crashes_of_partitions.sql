-- Crashes of consumers: an event that ends its worker does not end worker after worker. The ideas are those of
-- tables/0032b_crashes_of_standing.sql.
--
-- When a member is lost, each of its partitions in which events wait counts a crash, at the offset that the group had reached. After two
-- with at most 1,000 events between them the partition is a suspect: its owner handles its next events while it handles no other
-- suspect (tried), and commits them before it goes on: one at first, then two, four, and so on. When a worker is lost meanwhile, what
-- ended it is among those (doubt), which the next owner handles one by one. What ends its worker alone twice (crashes = 4) is not
-- handled any more, and the consumer does what its policy on_failure says about an event that will not succeed: skip, dead letter,
-- halt, or (also with "retry") quarantine the partition. So an innocent backlog is past its trial in a dozen commits.

alter table penstock.group_offsets add column crashes smallint not null default 0;
comment on column penstock.group_offsets.crashes is
    'Members lost one after the other while the group was near crashed_at. 2: its events are on trial; 3 and 4: the event at crashed_at ended its worker alone, once and twice.';
alter table penstock.group_offsets add column crashed_at bigint;
comment on column penstock.group_offsets.crashed_at is 'How far the group was when a member was lost; null: none was.';
alter table penstock.group_offsets add column doubt integer not null default 1000;
comment on column penstock.group_offsets.doubt is 'Among how many events from crashed_at on is the one that ended a member, if one did.';
alter table penstock.group_offsets add column tried integer not null default 0;
comment on column penstock.group_offsets.tried is 'How many events of it its owner handles now, and of no other suspect; 0: it is not on trial.';

-- Its result changes.
drop function if exists penstock.begin_partitions(text, text, text, integer[], bigint[]);
