-- Topics: the tables.
--
-- The life of a message. A publish takes the row of its topic, gives the message the next sequence number, and writes one
-- copy for each subscription of that moment, all in one transaction: every subscriber gets it or none. A copy is an ordinary job in
-- the subscriber's queue, `<topic>_<client id>`, which is a job type: it is claimed, retried, settled and archived like any
-- other. The payload is stored once, in topic_messages; a copy only has the number of its message. A message is pruned when nothing
-- refers to it any more, which does not follow the order of numbers. Each topic records the number up to which some are gone
-- (pruned_seq), so that a subscriber that continues from a number is told when messages behind it are missing.
--
-- The life of a subscription. It begins and ends under the lock of its topic's row, so there is one order of publishes,
-- subscribes and unsubscribes for each topic, that of their commits: a subscriber gets exactly the messages between its
-- beginning and its end. A subscription with a time to live ends when it was not renewed in time. That end has its
-- place in the order of the topic too: a row whose time is up still counts until a transaction that holds the topic deletes it, and a
-- later renewal is refused. (If publishers decided by the clock alone, a renewal that commits a moment later would hide a gap.) The
-- queue of a subscription that ended by itself is removed with it; after an unsubscribe the queue is drained first.
--
-- Invariants that keep this fast:
--
-- * The ids of the copies of a message are one range of the primary key: the time of the publish, 26 random bits, and in the last 48 bits
--   the number of the subscription, or for a copy that is made later a derived number (late_copy_ids). So all copies of a message are
--   found, queued or archived, without an index of their own. They begin at topic_messages.first_copy. No role can guess that before the
--   publish, and a publish that meets another job there takes another range. What lies in the range is a copy only when its row has the
--   number of the message, which no caller can give a job.
-- * No index of queued_jobs holds the number of the message: a claim stays a HOT update.
-- * A renewal is a HOT update: no index holds expires_at.
-- * Only the primary key begins with the topic, so that there is one way to look up a subscriber, whatever size the
--   planner assumes for the table.

create sequence penstock.message_number as bigint;
comment on sequence penstock.message_number is 'Numbers messages over all topics.';

create table penstock.topics (
    name text primary key,
    catch_up integer not null default 0,
    last_seq bigint not null default 0,
    pruned_seq bigint not null default 0,
    generation bigint not null default 0,
    encrypted boolean not null default false,
    encrypted_at timestamptz,
    declaration jsonb,
    created_at timestamptz not null,
    constraint topics_catch_up_check check (catch_up >= 0)
)
with (
    fillfactor = 20,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);
comment on table penstock.topics is 'Topics: what is published to one reaches all its subscribers.';
comment on column penstock.topics.name is 'Name of the topic.';
comment on column penstock.topics.catch_up is 'How many of the last messages a new subscriber gets.';
comment on column penstock.topics.last_seq is
    'Sequence number of the last message. Its row lock is what puts publishes and subscribes in order.';
comment on column penstock.topics.encrypted is
    'Whether messages, and what belongs to their copies, are stored encrypted: a message that is not is refused.';
comment on column penstock.topics.encrypted_at is
    'Since when there may be encrypted messages, also after encryption was turned off; null: there are none.';
comment on column penstock.topics.pruned_seq is 'Number of the last message that was pruned; all later ones are there.';
comment on column penstock.topics.generation is
    'Grows with every change of the list of subscribers; tells whether a copy of the list is stale.';
comment on column penstock.topics.declaration is 'What an application declared last.';
comment on column penstock.topics.created_at is 'When it was declared.';

create table penstock.subscriptions (
    topic text not null references penstock.topics (name),
    client_id text not null,
    number bigint not null generated always as identity,
    queue text not null references penstock.jobs (name),
    key text,
    filter jsonb,
    connection text,
    ttl interval,
    expires_at timestamptz,
    after_seq bigint not null,
    created_at timestamptz not null,
    constraint subscriptions_pkey primary key (topic, client_id),
    constraint subscriptions_queue_key unique nulls not distinct (queue, key),
    constraint subscriptions_ttl_check check ((ttl is null) = (expires_at is null))
)
with (fillfactor = 50);
comment on table penstock.subscriptions is 'The subscribers that get a copy of what is published to a topic.';
comment on column penstock.subscriptions.topic is 'Name of the topic.';
comment on column penstock.subscriptions.client_id is
    'Names the subscriber within the topic; all that use one client id share its copies.';
comment on column penstock.subscriptions.number is 'Ends the ids of the copies.';
comment on column penstock.subscriptions.queue is 'The job type of the copies: <topic>_<client id>, or the queue of a bridge.';
comment on column penstock.subscriptions.key is 'Key of the copies: <topic>_<client id> in the queue of a bridge, else null.';
comment on column penstock.subscriptions.filter is 'Only messages that contain this JSON; null: all.';
comment on column penstock.subscriptions.connection is
    'The live connection to an HTTP server that receives the copies, the last one that came; null: none has come.';
comment on column penstock.subscriptions.ttl is 'The subscription ends when it is not renewed for so long; null: it stays.';
comment on column penstock.subscriptions.expires_at is 'When the time to live is over.';
comment on column penstock.subscriptions.after_seq is 'It gets the messages with higher sequence numbers than this.';
comment on column penstock.subscriptions.created_at is 'When it began.';

create unique index subscriptions_number on penstock.subscriptions (number);
create index subscriptions_ttl on penstock.subscriptions (topic) where ttl is not null;

create table penstock.ended_queues (
    queue text primary key,
    topic text not null,
    dropped boolean not null,
    ended_at timestamptz not null,
    look_at timestamptz not null
);
comment on table penstock.ended_queues is 'Queues whose subscription is over; maintenance takes them away.';
comment on column penstock.ended_queues.queue is 'The job type of the copies.';
comment on column penstock.ended_queues.topic is 'Name of the topic.';
comment on column penstock.ended_queues.dropped is
    'Whether waiting copies are archived as expired; otherwise the queue goes once it is empty.';
comment on column penstock.ended_queues.ended_at is 'When the subscription ended.';
comment on column penstock.ended_queues.look_at is 'When maintenance looks again.';

create index ended_queues_due on penstock.ended_queues (look_at);

create table penstock.topic_messages (
    number bigint primary key,
    seq bigint not null,
    published_at timestamptz not null,
    run_after timestamptz,
    expires_at timestamptz,
    id uuid not null,
    first_copy uuid not null,
    receivers integer not null,
    topic text not null,
    unique_key text,
    key text,
    coalesced uuid[],
    data jsonb not null,
    constraint topic_messages_id_key unique (id),
    constraint topic_messages_seq_key unique (topic, seq)
);
comment on table penstock.topic_messages is
    'What was published, once, whatever the number of subscribers. Kept while a copy is queued or archived.';
comment on column penstock.topic_messages.number is 'Number of the message over all topics, from message_number.';
comment on column penstock.topic_messages.seq is 'Sequence number within the topic: dense, in the order of commits.';
comment on column penstock.topic_messages.published_at is 'To the millisecond, as in the ids of the copies.';
comment on column penstock.topic_messages.run_after is 'Its copies do not start before; null: at once.';
comment on column penstock.topic_messages.expires_at is
    'Copies that wait then are archived as expired; null: never.';
comment on column penstock.topic_messages.id is 'Made by the publisher; publishing it again is the same message.';
comment on column penstock.topic_messages.first_copy is 'Where the ids of its copies begin.';
comment on column penstock.topic_messages.receivers is 'How many subscribers got it, those included whose copy coalesced.';
comment on column penstock.topic_messages.topic is 'Name of the topic.';
comment on column penstock.topic_messages.unique_key is
    'Unique key of the copies, which coalesces them for each subscriber; null: none.';
comment on column penstock.topic_messages.key is
    'Key of the copies, except in a queue that subscribers share, where the key names the subscriber; null: none.';
comment on column penstock.topic_messages.coalesced is
    'Queued jobs that stood in for copies with the same unique key; null: none.';
comment on column penstock.topic_messages.data is 'The payload.';
