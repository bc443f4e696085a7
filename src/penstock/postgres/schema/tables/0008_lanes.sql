-- The first job with a new priority notes the lane. A unique index would make everybody else who uses that priority wait until
-- that transaction ends, which is the caller's and may be a long one. So a lane may be noted more than once: at most as often
-- as transactions were the first at the same time.

alter table penstock.lanes drop constraint lanes_pkey;
create index lanes_name_priority on penstock.lanes (name, priority);
comment on table penstock.lanes is
    'Which priorities each job type has ever used: a claim looks into each, lowest first. A lane may be noted more than once.';
