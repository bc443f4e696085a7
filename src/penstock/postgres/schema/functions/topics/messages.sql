-- Messages, looked at again: by late joiners, by readers that go on from a sequence number, by publishers that want to know
-- what became of the copies.

create or replace function penstock.read_topic(p_topic text, p_since bigint default null, p_limit integer default 100)
returns table (seq bigint, id uuid, published_at timestamptz, data text, key text)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    topic constant penstock.topics := penstock.require_topic(p_topic);
begin
    perform penstock.check_limit(p_limit, 10000);
    if p_since is not null then
        perform penstock.check_since(topic, p_since);
    end if;
    return query
    select message.seq, message.id, message.published_at, coalesce(penstock.shown(message.data), 'null'), message.key
    from penstock.topic_messages as message
    where message.topic = p_topic and message.seq > coalesce(p_since, 0)
    order by message.seq
    limit p_limit;
end
$$;
comment on function penstock.read_topic(text, bigint, integer) is
    'The messages of a topic after a sequence number (null: from the oldest), without a subscription. PS409 when some of them are gone.';

create or replace function penstock.message_of(p_id uuid)
returns table (topic text, seq bigint, id uuid, published_at timestamptz, unique_key text, key text)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select message.topic, message.seq, message.id, message.published_at, message.unique_key, message.key
    from penstock.topic_messages as message
    where message.number = coalesce(
        (select job.message from penstock.queued_jobs as job where job.id = p_id),
        (select job.message from penstock.archived_jobs as job where job.id = p_id order by job.finished_at desc limit 1)
    )
$$;
comment on function penstock.message_of(uuid) is 'The message of which a job is a copy; no row when it is none.';

create or replace function penstock.messages_of(p_ids uuid[])
returns table (job uuid, seq bigint, id uuid, published_at timestamptz)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
begin
    perform penstock.check_size(cardinality(p_ids), 10000, 'jobs');
    return query
    select copy.id, message.seq, message.id, message.published_at
    from unnest(p_ids) as given (id)
    join penstock.queued_jobs as copy on copy.id = given.id
    join penstock.topic_messages as message on message.number = copy.message;
end
$$;
comment on function penstock.messages_of(uuid[]) is
    'The messages of which queued or running jobs are copies: for a client that claimed some. Jobs that are none are left out.';

create or replace function penstock.id_of_copy(message penstock.topic_messages, subscriber penstock.subscriptions)
returns uuid
language sql
stable
as $$
    select case
        when message.seq > subscriber.after_seq then penstock.copy_id(message.first_copy, subscriber.number)
        else (penstock.late_copy_ids(array[message.first_copy], array[message.number], array[subscriber.number]))[1]
    end
$$;
comment on function penstock.id_of_copy(penstock.topic_messages, penstock.subscriptions) is
    'Part of missed_messages and late_messages: the id of the copy of a message for a subscription.';

create or replace function penstock.missed_messages(p_topic text, p_client_id text, p_since bigint, p_limit integer default 1000)
returns table (seq bigint, id uuid, published_at timestamptz, data text, key text)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    topic constant penstock.topics := penstock.require_topic(p_topic);
    subscriber penstock.subscriptions;
begin
    perform penstock.check_limit(p_limit, 10000);
    perform penstock.check_since(topic, p_since);
    select * into subscriber from penstock.subscriptions where subscriptions.topic = p_topic and client_id = p_client_id;
    if not found then
        raise exception '% is not subscribed to %', left(p_client_id, 100), p_topic
            using errcode = 'PS404', hint = 'The subscription has ended: subscribe again, with p_since.';
    end if;
    return query
    select message.seq, message.id, message.published_at, message.data::text, message.key
    from penstock.topic_messages as message
    cross join lateral (select penstock.id_of_copy(message.*, subscriber) as id) as copy
    where message.topic = p_topic
        and message.seq > p_since
        and (subscriber.filter is null or message.data @> subscriber.filter)
        and (message.expires_at is null or message.expires_at > penstock.clock())
        -- What is still in the queue comes from there.
        and not exists (
            select from penstock.queued_jobs where queued_jobs.id = copy.id and queued_jobs.message = message.number
        )
        -- A message with a unique key may have no copy of its own, since another copy with the key waited.
        and (
            message.unique_key is null
            or exists (
                select from penstock.archived_jobs
                where archived_jobs.id = copy.id and archived_jobs.message = message.number
                    and archived_jobs.finished_at >= message.published_at
            )
        )
    order by message.seq
    limit p_limit;
end
$$;
comment on function penstock.missed_messages(text, text, bigint, integer) is
    'The messages after p_since that are for a subscriber and no longer in its queue: handed out, though perhaps lost on the way. For a subscriber that says which one it saw last. PS409 when some of them are gone, PS404 when it is not subscribed.';

create or replace function penstock.late_messages(
    p_topic text, p_client_id text, p_since bigint, p_last bigint, p_limit integer default 1000
)
returns table (seq bigint, id uuid, published_at timestamptz, data text, key text)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    subscriber penstock.subscriptions;
    seen record;
begin
    perform penstock.check_limit(p_limit, 10000);
    select * into subscriber from penstock.subscriptions where subscriptions.topic = p_topic and client_id = p_client_id;
    select job.started_at, job.run_after > job.created_at or job.attempt > 1 as late
    into seen
    from penstock.topic_messages as message
    join penstock.archived_jobs as job
        on job.id = penstock.id_of_copy(message.*, subscriber)
        and job.message = message.number
        and job.finished_at >= message.published_at
    where message.topic = p_topic and message.seq = p_last;
    if not found then
        return;
    end if;
    -- The copies of one claim are handed out by number, and those that were put off or retried come last.
    return query
    select message.seq, message.id, message.published_at, message.data::text, message.key
    from penstock.archived_jobs as job
    join penstock.topic_messages as message on message.number = job.message
    cross join lateral (select job.run_after > job.created_at or job.attempt > 1 as late) as copy
    where job.name = subscriber.queue
        and job.finished_at >= seen.started_at
        and job.started_at >= seen.started_at
        and job.status = 'succeeded'
        and message.topic = p_topic
        and message.seq < p_since
        and message.seq <> p_last
        and (
            job.started_at > seen.started_at
            or (copy.late and not seen.late)
            or (copy.late = seen.late and message.seq > p_last)
        )
    order by job.started_at, copy.late, message.seq
    limit p_limit;
end
$$;
comment on function penstock.late_messages(text, text, bigint, bigint, integer) is
    'The messages up to p_since that were handed out to a subscriber after p_last, the one that it saw last: late ones, deferred or retried, perhaps lost on the way. No row when that cannot be told.';

create or replace function penstock.messages_at(p_topic text, p_seqs bigint[], p_bytes bigint default 1048576)
returns table (seq bigint, id uuid, published_at timestamptz, data text, key text)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    wanted bigint;
    bytes bigint := 0;
begin
    perform penstock.check_size(cardinality(p_seqs), 10000, 'messages');
    perform penstock.check_limit(p_bytes, 1073741824, 'number of bytes');
    -- One by one, so that no payload is read behind the last one that is returned.
    foreach wanted in array coalesce(p_seqs, '{}') loop
        select message.seq, message.id, message.published_at, message.data::text, message.key
        into seq, id, published_at, data, key
        from penstock.topic_messages as message
        where message.topic = p_topic
            and message.seq = wanted
            and (message.expires_at is null or message.expires_at > penstock.clock());
        continue when not found;
        return next;
        bytes := bytes + octet_length(data);
        exit when bytes >= p_bytes;
    end loop;
end
$$;
comment on function penstock.messages_at(text, bigint[], bigint) is
    'The messages of a topic with these numbers, in this order, until their payloads have p_bytes bytes; those that are gone or have expired are left out.';

create or replace function penstock.unfinished_copies(p_id uuid)
returns boolean
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
declare
    message penstock.topic_messages;
begin
    select * into message from penstock.topic_messages where id = p_id;
    if not found then
        raise exception 'no such message: %', p_id
            using errcode = 'PS404', hint = 'It may have been pruned.';
    end if;
    return exists (
            select from penstock.queued_jobs as job
            where job.id between message.first_copy and penstock.last_copy_id(message.first_copy) and job.message = message.number
        )
        or exists (select from penstock.queued_jobs where id = any (message.coalesced));
end
$$;
comment on function penstock.unfinished_copies(uuid) is 'Whether some receiver of a message has not settled its copy. PS404 when there is no such message.';

create or replace function penstock.receiver_of(p_topic text, p_name text, p_key text, p_message_key text)
returns text
language sql
immutable
parallel safe
as $$
    -- A queue of its own is named after the subscriber. In one that subscribers share, the key of the copy is, whatever key the message has.
    select substr(
        case
            when starts_with(p_name, p_topic || '_') and (p_key is not distinct from p_message_key or not starts_with(p_key, p_topic || '_'))
                then p_name
            else coalesce(p_key, p_name)
        end,
        length(p_topic) + 2
    )
$$;
comment on function penstock.receiver_of(text, text, text, text) is
    'Part of outcomes: the client id of the subscriber that got a copy, from the job''s name and key and the key of its message.';

create or replace function penstock.outcomes(p_id uuid)
returns table (client_id text, job uuid, status text, result text, errors text)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    message penstock.topic_messages;
    first_id uuid;
    last_id uuid;
begin
    select * into message from penstock.topic_messages where id = p_id;
    if not found then
        raise exception 'no such message: %', p_id
            using errcode = 'PS404', hint = 'It may have been pruned.';
    end if;
    first_id := message.first_copy;
    last_id := penstock.last_copy_id(first_id);
    return query
    select penstock.receiver_of(message.topic, job.name, job.key, message.key), job.id, job.status::text, null, job.errors::text
    from penstock.queued_jobs as job
    where job.id between first_id and last_id and job.message = message.number
    union all
    select penstock.receiver_of(message.topic, job.name, job.key, message.key), job.id, job.status::text, job.result::text, job.errors::text
    from penstock.archived_jobs as job
    where job.id between first_id and last_id and job.message = message.number and job.finished_at >= message.published_at
    union all
    select penstock.receiver_of(message.topic, job.name, job.key, (select own.key from penstock.topic_messages as own where own.number = job.message)), job.id, job.status::text, null, job.errors::text
    from penstock.queued_jobs as job
    where job.id = any (message.coalesced)
    union all
    select penstock.receiver_of(message.topic, job.name, job.key, (select own.key from penstock.topic_messages as own where own.number = job.message)), job.id, job.status::text, job.result::text, job.errors::text
    from penstock.archived_jobs as job
    where job.id = any (message.coalesced) and job.finished_at >= message.published_at
    order by 1;
end
$$;
comment on function penstock.outcomes(uuid) is
    'What became of a message at each receiver: the status of its copy (or of the job with which that coalesced), with result and errors. PS404 when there is no such message.';

create or replace function penstock.topic_counts()
returns table (name text, catch_up integer, last_seq bigint, subscribers bigint, messages bigint, bytes bigint, last_published_at timestamptz)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        topics.name, topics.catch_up, topics.last_seq,
        (select count(*) from penstock.subscriptions as there where there.topic = topics.name),
        coalesce(stored.messages, 0), coalesce(stored.bytes, 0), stored.last_published_at
    from penstock.topics
    left join (
        select topic, count(*) as messages, sum(pg_column_size(data)) as bytes, max(published_at) as last_published_at
        from penstock.topic_messages
        group by topic
    ) as stored on stored.topic = topics.name
    order by topics.name
$$;
comment on function penstock.topic_counts() is 'For each topic: its subscribers and what is stored. Reads all messages: for people, not for loops.';

create or replace function penstock.check_since(topic penstock.topics, p_since bigint)
returns void
language plpgsql
stable
as $$
begin
    if p_since < 0 or p_since > topic.last_seq then
        raise exception '% has no message %', topic.name, p_since
            using errcode = 'PS400', hint = format('Its sequence numbers go from 1 to %s; 0 is before the first.', topic.last_seq);
    end if;
    if p_since < topic.pruned_seq then
        raise exception 'messages of % after % are gone', topic.name, p_since
            using errcode = 'PS409', hint = format('All after %s are kept.', topic.pruned_seq);
    end if;
end
$$;
comment on function penstock.check_since(penstock.topics, bigint) is 'Raises unless all messages after this sequence number are there.';
