-- Groups: ownership of slots by members.
--
-- A group shares slots among members. Its members and slots are rows. The protocol consists of four rules:
--
-- * `target` says which member is to have a slot, `owner` which one has it. Only an assignor writes targets, in one transaction under
--   the lock of the group's row; only the members themselves move ownership, slot by slot, whenever they are ready. Only
--   the two members of a handover wait for each other; a slot whose target does not change is not written at all.
-- * Every change of membership raises `generation`. Targets that were computed for an older one (balanced < generation) are
--   computed again by the first member that notices, so a member that crashes between joining and assigning does no harm.
-- * A slot's life: free -> taken by its target, with epoch + 1 -> (the target changes: its owner drains it) -> released, free
--   again. A member that is silent for `dead_after` is evicted by any other (0003_workers.sql says when it counts as silent): its
--   slots are free at once.
-- * The epoch fences. Whatever a member does to a slot carries the epoch under which it has the slot, and counts only
--   while the slot still has that owner and that epoch. A member stops by its own monotonic clock before others may
--   evict it, so two members never work on a slot at the same time; should its clock fail, the epoch stops its writes.
--
-- Locks, in this order: the group's row (membership, targets); the member's row (for update: its slots are being taken
-- away; for key share: it claims); slots; jobs; leases. A claim locks its member's row: the transaction that takes slots
-- away waits for it and ends the jobs that it claimed, and no claim for these slots can follow.
--
-- What is encrypted needs a member that has the key of encryption. A member says which it has, by their ids (members.key_ids). An owner that
-- finds work for which it lacks a key says so of the slot (need_keys): as long as there are members with that key, assignors give the slot
-- to one of them. What was said is forgotten after an hour, and said again where work still waits.
--
-- A key for which the rule of its pool fails is quarantined: no member gets it, its jobs wait, and all other keys continue. Its
-- slot keeps the error until the rule returns an answer again.

create sequence penstock.member_age as bigint;
comment on sequence penstock.member_age is 'Orders members by when they joined.';

create sequence penstock.slot_number as integer;
comment on sequence penstock.slot_number is 'Numbers the slots of groups with a slot for each key.';

create table penstock.groups (
    name text primary key,
    slots integer not null,
    assignor text not null,
    generation bigint not null default 0,
    balanced bigint not null default 0,
    members integer not null default 0,
    created_at timestamptz not null,
    constraint groups_slots_check check (slots >= 0)
)
with (fillfactor = 50);
comment on table penstock.groups is 'Groups of members that share slots: one for each pool, one for each consumer group.';
comment on column penstock.groups.name is 'Name of the pool, or stream/group of the consumer group.';
comment on column penstock.groups.slots is
    'Number of slots, 0 to slots - 1; for the assignor custom: how many it has now, one for each key.';
comment on column penstock.groups.assignor is
    'Who decides: sticky, jump, or custom (a slot for each key, placed by the application).';
comment on column penstock.groups.generation is
    'Grows with every change of members, of what they say of themselves, and of slots.';
comment on column penstock.groups.balanced is 'The generation for which the targets were computed.';
comment on column penstock.groups.members is 'Number of rows in members.';
comment on column penstock.groups.created_at is 'When it was declared.';

create table penstock.members (
    group_name text not null references penstock.groups (name),
    id text not null,
    session uuid not null,
    age bigint not null,
    state text not null default 'active',
    metadata jsonb not null default '{}',
    key_ids text[],
    joined_at timestamptz not null,
    seen_at timestamptz not null,
    suspected_at timestamptz,
    dead_after interval not null,
    primary key (group_name, id),
    constraint members_state_check check (state in ('active', 'draining'))
)
with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.2, autovacuum_vacuum_threshold = 1000);
comment on table penstock.members is 'The members of groups; the row is the heartbeat.';
comment on column penstock.members.group_name is 'Name of the group.';
comment on column penstock.members.id is 'Name of the member within the group.';
comment on column penstock.members.session is
    'Made by the member for this membership; tells it from another one under the same id.';
comment on column penstock.members.age is 'Order of joining, oldest lowest.';
comment on column penstock.members.state is 'draining: it stays, but is given no slots.';
comment on column penstock.members.metadata is 'What the member says of itself; a custom assignor sees it.';
comment on column penstock.members.key_ids is 'Ids of the keys of encrypted payloads that it has; null: it does not say.';
comment on column penstock.members.joined_at is 'When it joined.';
comment on column penstock.members.seen_at is 'Its last heartbeat.';
comment on column penstock.members.suspected_at is
    'When a look first found it silent for three fifths of dead_after; counts while it is later than seen_at and the start of the server.';
comment on column penstock.members.dead_after is 'Silent for longer than this, it is evicted by any other member.';

create unique index members_age on penstock.members (group_name, age);

create table penstock.slots (
    group_name text not null references penstock.groups (name),
    slot integer not null,
    owner text,
    target text,
    epoch bigint not null default 0,
    placed boolean not null default false,
    settling boolean not null default false,
    key text,
    error text,
    key_ids text[] not null default '{}',
    needed_at timestamptz,
    changed_at timestamptz not null,
    failed_at timestamptz,
    primary key (group_name, slot)
)
with (fillfactor = 50);
comment on table penstock.slots is 'The owner of each slot, and its target.';
comment on column penstock.slots.group_name is 'Name of the group.';
comment on column penstock.slots.slot is 'Number of the slot.';
comment on column penstock.slots.owner is 'The member that has it; null: free.';
comment on column penstock.slots.target is 'The member that is to have it; null: none.';
comment on column penstock.slots.epoch is 'Grows each time it is taken; fences the writes of earlier owners.';
comment on column penstock.slots.placed is 'Whether the assignor has seen it.';
comment on column penstock.slots.settling is
    'Work that moved here with its key still runs elsewhere: cannot be taken before that is done.';
comment on column penstock.slots.key is 'With the assignor custom: the key that it stands for.';
comment on column penstock.slots.error is
    'Why the rule of the application could not place the key, which is quarantined; null: it could.';
comment on column penstock.slots.key_ids is
    'Ids of the keys of encrypted payloads that an owner lacked for the work in it, latest first: it goes to a member that has them.';
comment on column penstock.slots.needed_at is 'When an owner said so last.';
comment on column penstock.slots.changed_at is 'When it was last taken or set free.';
comment on column penstock.slots.failed_at is 'When the rule failed last.';

create index slots_owner on penstock.slots (group_name, owner);
create index slots_target on penstock.slots (group_name, target);
create index slots_unplaced on penstock.slots (group_name) where not placed;
create unique index slots_key on penstock.slots (group_name, key) where key is not null;
create index slots_needing on penstock.slots (group_name) where key_ids <> '{}';
create index slots_quarantined on penstock.slots (group_name, key) where error is not null;
