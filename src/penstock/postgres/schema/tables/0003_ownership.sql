-- Ownership, and pools on it.
--
-- The shape. A group shares slots among members. Its members and slots are rows; four facts make the protocol:
--
-- * `target` says who is to have a slot, `owner` who has it. Only an assignor writes targets, in one transaction under the
--   lock of the group's row; only the members themselves move ownership, slot by slot, whenever they are ready. Nobody
--   waits for anybody but the two that hand over: a slot whose target does not change is not touched at all.
-- * Every change of membership raises `generation`. Targets that were computed for an older one (balanced < generation) are
--   computed anew by whichever member notices first, so a member that dies between joining and assigning harms nothing.
-- * A slot's life: free -> taken by its target, with epoch + 1 -> (the target changes: its owner drains it) -> released, free
--   again. A member that is silent for `dead_after` is evicted by any other: its slots are free at once.
-- * The epoch fences. Whatever a member does to a slot carries the epoch under which it has the slot, and counts only
--   while the slot still has that owner and that epoch. A member stops by its own monotonic clock before others may
--   evict it, so two do not even work side by side; if its clock or the machine fails it, the epoch stops its writes.
--
-- Locks, in this order: the group's row (membership, targets); the member's row (for update: its slots are being taken
-- away; for key share: it claims); slots; jobs; leases. A claim holds its member's row, so what it claims is there to be
-- ended when the slots go away, and none can be claimed afterwards.
--
-- The life of a keyed job is that of any job (see 0001_jobs.sql): the same row, lease, settle and archive. It differs in the
-- line in which it stands: (name, slot, key, seq) instead of (name, priority, seq), and in who may claim it: the owner
-- of its slot alone. An owner walks its keys in a ring and takes the first jobs of each key that is not busy; while an
-- attempt is to be retried the job keeps its place at the head of its key and with it the key's turn. Invariant:
-- a slot without owner has no job in progress (whatever takes the owner away ends the attempts in the same transaction).

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
comment on column penstock.groups.slots is 'Number of slots, 0 to slots - 1; for the assignor custom: how many it has now, one for each key.';
comment on column penstock.groups.assignor is 'Who decides: sticky, jump, or custom (a slot for each key, placed by the application).';
comment on column penstock.groups.generation is 'Grows with every change of members, of what they say of themselves, and of slots.';
comment on column penstock.groups.balanced is 'The generation for which the targets were computed.';
comment on column penstock.groups.members is 'Number of rows in members.';

create table penstock.members (
    group_name text not null references penstock.groups (name),
    id text not null,
    age bigint not null,
    state text not null default 'active',
    metadata jsonb not null default '{}',
    joined_at timestamptz not null,
    seen_at timestamptz not null,
    dead_after interval not null,
    primary key (group_name, id),
    constraint members_state_check check (state in ('active', 'draining'))
)
with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.2, autovacuum_vacuum_threshold = 1000);
comment on table penstock.members is 'Who is in a group; the row is the heartbeat.';
comment on column penstock.members.age is 'Order of joining, oldest lowest.';
comment on column penstock.members.state is 'draining: it stays, but is given no slots.';
comment on column penstock.members.metadata is 'What the member says of itself; a custom assignor sees it.';
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
    changed_at timestamptz not null,
    primary key (group_name, slot)
)
with (fillfactor = 50);
comment on table penstock.slots is 'Who has each slot, and who is to have it.';
comment on column penstock.slots.owner is 'The member that has it; null: free.';
comment on column penstock.slots.target is 'The member that is to have it; null: nobody.';
comment on column penstock.slots.epoch is 'Grows each time it is taken; fences the writes of earlier owners.';
comment on column penstock.slots.placed is 'Whether the assignor has seen it.';
comment on column penstock.slots.settling is 'Work that moved here with its key still runs elsewhere: cannot be taken before that is done.';
comment on column penstock.slots.key is 'With the assignor custom: the key that it stands for.';
comment on column penstock.slots.changed_at is 'When it was last taken or set free.';

create index slots_owner on penstock.slots (group_name, owner);
create index slots_target on penstock.slots (group_name, target);
create index slots_unplaced on penstock.slots (group_name) where not placed;
create unique index slots_key on penstock.slots (group_name, key) where key is not null;

create unlogged table penstock.idle_members (
    group_name text not null,
    member text not null,
    since timestamptz not null,
    primary key (group_name, member)
);
comment on table penstock.idle_members is 'Members that wait for a notification. Enqueues notify only these; unlogged, since it is a hint.';

-- Pools.

create table penstock.pools (
    name text primary key,
    on_retry text not null default 'block',
    key_concurrency integer not null default 1,
    key_rate_limit integer,
    key_rate_period interval,
    declaration jsonb,
    created_at timestamptz not null,
    constraint pools_on_retry_check check (on_retry in ('block', 'skip')),
    constraint pools_key_concurrency_check check (key_concurrency > 0)
);
comment on table penstock.pools is 'Job types whose jobs of one key run in order on one worker; the group has the same name.';
comment on column penstock.pools.on_retry is 'block: a job that is to be retried holds up its key; skip: later jobs of the key pass it.';
comment on column penstock.pools.key_concurrency is 'Most jobs in flight of one key; more than 1 gives up the order within the key.';
comment on column penstock.pools.key_rate_limit is 'Most jobs of one key started within any key_rate_period; null: no limit.';
comment on column penstock.pools.declaration is 'What the application declared last, so that a change made by hand outlives a restart.';

create table penstock.key_weights (
    name text not null references penstock.pools (name),
    key text not null,
    weight integer not null,
    primary key (name, key),
    constraint key_weights_weight_check check (weight between 1 and 1000)
);
comment on table penstock.key_weights is 'Keys that get more than one job a turn.';

create table penstock.key_starts (
    name text not null,
    key text not null,
    ends_at timestamptz not null,
    started integer not null,
    primary key (name, key, ends_at)
);
comment on table penstock.key_starts is 'Starts of keys with a rate limit, summed over hundredths of its period.';

create table penstock.standing_jobs (
    name text not null references penstock.pools (name),
    key text not null,
    slot integer not null,
    data jsonb not null,
    state jsonb,
    version bigint not null default 1,
    wanted boolean not null default true,
    running_by text,
    running_epoch bigint,
    started_at timestamptz,
    failures integer not null default 0,
    retry_at timestamptz,
    error jsonb,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    primary key (name, key)
);
comment on table penstock.standing_jobs is 'Jobs that run on the owner of their key until they are stopped.';
comment on column penstock.standing_jobs.state is 'What the last run left for the next: a small JSON.';
comment on column penstock.standing_jobs.version is 'Grows when the payload is replaced; a run of an earlier one is stopped and started anew.';
comment on column penstock.standing_jobs.wanted is 'False: to be stopped; the row goes when it has stopped.';
comment on column penstock.standing_jobs.running_by is 'The member that runs it, under running_epoch; null: it does not run.';
comment on column penstock.standing_jobs.failures is 'Runs in a row that ended with an error; the next one waits until retry_at.';

create index standing_jobs_slot on penstock.standing_jobs (name, slot);

create table penstock.standing_messages (
    id bigint generated always as identity primary key,
    name text not null,
    key text not null,
    data jsonb not null,
    sent_at timestamptz not null,
    foreign key (name, key) references penstock.standing_jobs (name, key) on delete cascade
);
comment on table penstock.standing_messages is 'Messages to standing jobs that their owner has not taken yet.';

create index standing_messages_key on penstock.standing_messages (name, key, id);

alter table penstock.queued_jobs add column slot integer;
comment on column penstock.queued_jobs.slot is 'In a pool: the slot of its key; null: a job of a plain queue.';

alter table penstock.leases add column jobs uuid[];
comment on column penstock.leases.jobs is 'In a pool: the jobs of the batch, which stand in many lines; null in a plain queue.';

-- The ready line of plain queues leaves out the jobs of pools, which stand in lines of their own.
drop index penstock.queued_jobs_ready;
create unique index queued_jobs_ready on penstock.queued_jobs (name, priority, seq) where seq is not null and slot is null;
create index queued_jobs_keyed on penstock.queued_jobs (name, slot, key collate "C", seq) where seq is not null and slot is not null;

-- Its parameters change.
drop function if exists penstock.insert_jobs(text, jsonb[], uuid[], text[], smallint[], timestamptz[], timestamptz[], text[], uuid, timestamptz, smallint);
drop function if exists penstock.enqueue_one_by_one(text, jsonb[], uuid[], text[], smallint[], timestamptz[], timestamptz[], text[], uuid, timestamptz, smallint);
