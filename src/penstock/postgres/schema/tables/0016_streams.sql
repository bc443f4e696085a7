-- Why the consumer of a partition halted; and what holds new partitions back is shown with the lag, whose result changes.

alter table penstock.group_offsets add column halted_because text;
comment on column penstock.group_offsets.halted_because is 'The error at which a consumer halted before the next event; null: none did, or that event is done since.';

drop function if exists penstock.group_lag(text, text);
