-- Why things wait: a handler that fails again and again is noted at its partition, and key_state says what holds a key.

alter table penstock.group_offsets add column failing_since timestamptz;
alter table penstock.group_offsets add column failing_offset bigint;
alter table penstock.group_offsets add column failing_attempt integer;
alter table penstock.group_offsets add column failing_because text;
comment on column penstock.group_offsets.failing_since is 'Since when a handler has failed at the event failing_offset; null: none does, or that event is done since.';
comment on column penstock.group_offsets.failing_offset is 'The first event of the batch at which it fails.';
comment on column penstock.group_offsets.failing_attempt is 'The attempt that was noted last. Not every one is.';
comment on column penstock.group_offsets.failing_because is 'Its error.';

-- Their results change.
drop function if exists penstock.key_state(text, text);
drop function if exists penstock.group_lag(text, text);
