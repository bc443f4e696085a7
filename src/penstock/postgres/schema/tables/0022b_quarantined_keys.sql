-- A key for which the rule of its pool fails is quarantined: nobody gets it, its jobs wait, and everything else goes on. The error
-- stands at its slot until the rule answers again.

alter table penstock.slots add column error text;
alter table penstock.slots add column failed_at timestamptz;
comment on column penstock.slots.error is 'Why the rule of the application could not place the key, which is quarantined; null: it could.';
comment on column penstock.slots.failed_at is 'When the rule failed last.';

create index slots_quarantined on penstock.slots (group_name, key) where error is not null;
