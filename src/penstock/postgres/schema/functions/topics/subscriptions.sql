-- Subscriptions: subscribe, renew, list; unsubscribe.sql has their end.
--
-- Everything that changes the list of subscribers of a topic holds the topic's row; so does a publish. The head of
-- tables/0007_topics.sql says why.
--
-- Thousands of clients may be given at once, while the planner still takes the tables for empty. So each is looked up for
-- itself, in a lateral subquery that "offset 0" keeps the planner from turning round.

create or replace function penstock.check_subscribers(
    p_topic text, p_client_ids text[], p_ttl interval, p_filters jsonb[], p_queue text
)
returns void
language plpgsql
stable
as $$
declare
    wrong text;
begin
    perform penstock.check_topic(p_topic);
    if coalesce(cardinality(p_client_ids), 0) not between 1 and 100000 then
        raise exception '% client ids', coalesce(cardinality(p_client_ids), 0)
            using errcode = 'PS400', hint = 'Subscribe 1 to 100,000 clients at once.';
    end if;
    if cardinality(p_filters) <> cardinality(p_client_ids) then
        raise exception 'the arrays differ in length'
            using errcode = 'PS400', hint = 'Give one filter for each client id, or null instead of the array.';
    end if;
    perform penstock.check_each_json(p_filters, 'a filter', 65536);
    select coalesce(quote_literal(left(given, 100)), 'null') into wrong
    from unnest(p_client_ids) as given
    where given is null or given !~ '^(?![.]{1,2}$)[^[:space:]/[:cntrl:]]+$' or length(p_topic) + 1 + length(given) > 200
    limit 1;
    if wrong is not null then
        raise exception 'invalid client id: %', wrong
            using errcode = 'PS400',
                  hint = 'A client id has no white space, "/" or control character, is not "." or "..", and has at most 200 characters together with the topic.';
    end if;
    if starts_with(p_topic || '_', 'job_') and p_queue is null then
        raise exception 'topic % cannot have subscribers with queues of their own', p_topic
            using errcode = 'PS400', hint = 'The name of a queue does not begin with "job_".';
    end if;
    if (select count(distinct given) from unnest(p_client_ids) as given) <> cardinality(p_client_ids) then
        raise exception 'a client id is given twice'
            using errcode = 'PS400', hint = 'Give each client id once.';
    end if;
    if p_ttl < interval '1 second' or p_ttl > interval '30 days' then
        raise exception 'invalid time to live: %', p_ttl
            using errcode = 'PS400', hint = 'Use 1 second to 30 days, or null for a subscription that stays.';
    end if;
end
$$;
comment on function penstock.check_subscribers(text, text[], interval, jsonb[], text) is 'Part of subscribe_many: raises PS400 for the first thing that is wrong.';

create or replace function penstock.claim_queues(p_topic text, p_queues text[], p_options jsonb)
returns void
language plpgsql
as $$
declare
    template penstock.jobs;
    taken record;
begin
    if cardinality(p_queues) = 0 then
        return;
    end if;
    -- What waits in the queue of an earlier subscription of the same client is still its own. First of all, since maintenance holds
    -- these rows while it takes a queue away.
    delete from penstock.ended_queues
    where ctid = any (array(
        select there.ctid
        from unnest(p_queues) as given (queue)
        cross join lateral (select ended.ctid from penstock.ended_queues as ended where ended.queue = given.queue offset 0) as there
    ));
    template := penstock.new_type(p_queues[1], coalesce(p_options, '{"keep_result": true}'));
    template.topic := p_topic;
    perform penstock.check_type(template);
    insert into penstock.jobs
    select made.*
    from unnest(p_queues) as given (queue),
        lateral jsonb_populate_record(template, jsonb_build_object('name', given.queue, 'topic', p_topic)) as made
    order by given.queue
    on conflict (name) do nothing;
    select there.name, there.topic into taken
    from unnest(p_queues) as given (queue)
    cross join lateral (select jobs.name, jobs.topic from penstock.jobs where jobs.name = given.queue offset 0) as there
    where there.topic is distinct from p_topic
    limit 1;
    if found then
        -- Not by what: it may be another tenant's.
        raise exception 'the name % is taken', taken.name
            using errcode = 'PS409', hint = 'The queue of a subscriber is named <topic>_<client id>: choose another client id.';
    end if;
    insert into penstock.type_priorities (name, priority)
    select given.queue, 0 from unnest(p_queues) as given (queue)
    where not exists (select from penstock.type_priorities where type_priorities.name = given.queue);
end
$$;
comment on function penstock.claim_queues(text, text[], jsonb) is
    'Part of subscribe_many: makes the job types of the queues that are not there. PS409 when one is something else already.';

-- Long, since all of it happens in one hold of the topic's lock: the subscriptions that are there are renewed, new ones get their queues,
-- and missed messages are copied before the next publish.
create or replace function penstock.subscribe_many(
    p_topic text,
    p_client_ids text[],
    p_ttl interval default null,
    p_filters jsonb[] default null,
    p_since bigint default null,
    p_options jsonb default null,
    p_queue text default null
)
returns table (client_id text, queue text, created boolean, seq bigint, replayed integer, expires_at timestamptz)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    topic penstock.topics;
    moment timestamptz;
    -- The numbers of those that are subscribed; subscriptions with higher numbers than any are new.
    known bigint[];
    highest bigint;
    changed boolean;
    added integer;
    taken text;
    copies jsonb := '{}';
begin
    perform penstock.check_subscribers(p_topic, p_client_ids, p_ttl, p_filters, p_queue);
    topic := penstock.lock_topic(p_topic);
    moment := penstock.clock();
    perform penstock.end_expired(p_topic, moment);
    if p_queue is not null then
        -- Its encryption does not change before this transaction has ended.
        perform from penstock.jobs where name = p_queue for key share;
    end if;
    if p_queue is not null and (select jobs.topic from penstock.require_type(p_queue) as jobs) is not null then
        raise exception '% is the queue of a subscriber', p_queue
            using errcode = 'PS409', hint = 'Several subscriptions can share a job type that was created for it.';
    end if;
    if exists (select from penstock.pools where name = p_queue) then
        raise exception '% is a pool', p_queue
            using errcode = 'PS409', hint = 'The queue of subscriptions is a plain job type, whose jobs can be forwarded to a pool.';
    end if;
    if topic.encrypted then
        if p_options -> 'encrypted' = 'false' then
            raise exception 'topic % is encrypted, and subscriber % has no key', p_topic, left(p_client_ids[1], 100)
                using errcode = 'PS409', hint = 'Connections over HTTP have none: receive it in a worker with the keys, Penstock(keys=[...]).';
        end if;
        perform penstock.refuse_unfit_subscriber(p_topic, coalesce(
            case when p_queue is not null then p_client_ids[1] end,
            (
                select given.client_id from unnest(p_client_ids, p_filters) as given (client_id, filter)
                where given.filter is not null
                limit 1
            )
        ));
    end if;
    known := array(
        select there.number
        from unnest(p_client_ids) as given (client_id)
        cross join lateral (
            select found.number from penstock.subscriptions as found
            where found.topic = p_topic and found.client_id = given.client_id
            offset 0
        ) as there
    );
    select there.client_id into taken
    from unnest(known) as given (number)
    cross join lateral (select * from penstock.subscriptions as found where found.number = given.number offset 0) as there
    where there.queue <> coalesce(p_queue, p_topic || '_' || there.client_id) or (there.key is null) <> (p_queue is null)
    limit 1;
    if taken is not null then
        raise exception 'client % is subscribed to % in another way', taken, p_topic
            using errcode = 'PS409', hint = 'Unsubscribe it first, or choose another client id.';
    end if;
    -- What changes for those that are there: a time to live is a renewal, a filter changes the list.
    changed := false;
    if cardinality(known) > 0 then
        update penstock.subscriptions as there
        set ttl = p_ttl, expires_at = moment + p_ttl
        where there.number = any (known) and (p_ttl is not null or there.ttl is not null);
        update penstock.subscriptions as there
        set filter = other.filter
        from (
            select present.number, given.filter
            from unnest(p_client_ids, p_filters) as given (client_id, filter)
            cross join lateral (
                select found.number, found.filter from penstock.subscriptions as found
                where found.topic = p_topic and found.client_id = given.client_id
                offset 0
            ) as present
            where present.filter is distinct from given.filter
            offset 0
        ) as other
        where there.number = other.number;
        changed := found;
    end if;

    highest := coalesce((select max(there.number) from penstock.subscriptions as there), 0);
    if p_queue is null then
        perform penstock.claim_queues(p_topic, array(
            select p_topic || '_' || given.client_id
            from unnest(p_client_ids) as given (client_id)
            where (
                select there.number from penstock.subscriptions as there where there.topic = p_topic and there.client_id = given.client_id
            ) is null
        ), p_options);
        if topic.encrypted then
            perform penstock.encrypt_queues(array(select p_topic || '_' || given.client_id from unnest(p_client_ids) as given (client_id)));
        end if;
    end if;
    insert into penstock.subscriptions (topic, client_id, queue, key, filter, ttl, expires_at, after_seq, created_at)
    select
        p_topic, given.client_id, coalesce(p_queue, p_topic || '_' || given.client_id),
        case when p_queue is not null then p_topic || '_' || given.client_id end,
        given.filter, p_ttl, moment + p_ttl, topic.last_seq, moment
    from unnest(p_client_ids, p_filters) with ordinality as given (client_id, filter, place)
    where (
        select there.number from penstock.subscriptions as there where there.topic = p_topic and there.client_id = given.client_id
    ) is null
    order by given.place;
    get diagnostics added = row_count;
    perform penstock.check_queues(p_topic, p_after => highest);
    if added > 0 then
        copies := penstock.replay_messages(topic, highest, added, p_since, moment);
    end if;
    if changed or added > 0 then
        perform penstock.list_changed(p_topic);
    end if;
    return query
    select
        there.client_id, there.queue, there.number > highest, topic.last_seq,
        coalesce((copies ->> there.client_id)::integer, 0), there.expires_at
    from unnest(p_client_ids) with ordinality as given (client_id, place)
    cross join lateral (
        select * from penstock.subscriptions as found
        where found.topic = p_topic and found.client_id = given.client_id
        offset 0
    ) as there
    order by given.place;
exception
    when unique_violation then
        raise exception 'the name of a subscriber of % is taken in the queue %', p_topic, p_queue
            using errcode = 'PS409', hint = 'Subscribers are named <topic>_<client id>: choose another client id.';
end
$$;
comment on function penstock.subscribe_many(text, text[], interval, jsonb[], bigint, jsonb, text) is
    'Subscribes up to 100,000 clients to a topic, all or none; see subscribe. p_options with encrypted false: a subscriber that can read nothing that is encrypted (PS409 for an encrypted topic). p_queue: a job type that takes the copies of all of them, each with the key <topic>_<client id>.';

create or replace function penstock.subscribe(
    p_topic text,
    p_client_id text,
    p_ttl interval default null,
    p_filter jsonb default null,
    p_since bigint default null,
    p_options jsonb default null,
    p_queue text default null
)
returns table (client_id text, queue text, created boolean, seq bigint, replayed integer, expires_at timestamptz)
language sql
security definer
set search_path = penstock, pg_temp
as $$
    select * from penstock.subscribe_many(p_topic, array[p_client_id], p_ttl, array[p_filter], p_since, p_options, p_queue)
$$;
comment on function penstock.subscribe(text, text, interval, jsonb, bigint, jsonb, text) is
    'Subscribes a client to a topic: from the commit on, each message is a job in the queue <topic>_<client id>, a job type that is created with p_options. Idempotent; again it renews and takes over p_ttl and p_filter. p_ttl: ends unless renewed in that time. p_filter: only messages that contain it. p_since: starts with the messages after this sequence number (PS409 when they are gone), default: the last ones that the topic keeps. seq: the last message at this moment. PS404 when there is no such topic, PS409 when the name of the queue is taken.';

create or replace function penstock.renew_subscriptions(p_topics text[], p_client_ids text[])
returns table (topic text, client_id text, expires_at timestamptz, seq bigint)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment constant timestamptz := penstock.clock();
begin
    perform penstock.check_size(greatest(cardinality(p_topics), cardinality(p_client_ids)), 100000, 'subscriptions');
    return query
    update penstock.subscriptions as there
    set expires_at = moment + there.ttl
    where there.number = any (array(
            select present.number
            from unnest(p_topics, p_client_ids) as given (topic, client_id)
            cross join lateral (
                select found.number from penstock.subscriptions as found
                where found.topic = given.topic and found.client_id = given.client_id
                offset 0
            ) as present
        ))
        and (there.ttl is null or not penstock.has_lapsed(there.expires_at, there.ttl, moment))
    returning there.topic, there.client_id, there.expires_at, (select topics.last_seq from penstock.topics where topics.name = there.topic);
end
$$;
comment on function penstock.renew_subscriptions(text[], text[]) is
    'Renews subscriptions with a time to live; seq is the last message of the topic at this moment. One that is missing in the answer has ended, and may have missed messages: subscribe again, with the last seq that it got as p_since.';

create or replace function penstock.take_over(p_queue text, p_connection text)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    if p_connection is null or p_connection !~ '^[A-Za-z0-9_.-]{1,100}$' then
        raise exception 'invalid connection: %', coalesce(quote_literal(left(p_connection, 100)), 'null')
            using errcode = 'PS400', hint = 'It has 1 to 100 letters, digits, ".", "-" or "_".';
    end if;
    update penstock.subscriptions set connection = p_connection where queue = p_queue and key is null;
    if not found then
        return false;
    end if;
    -- A hint: the receiver looks up which connection it is.
    perform penstock.tell_all('taken', p_queue);
    return true;
end
$$;
comment on function penstock.take_over(text, text) is
    'A live connection receives from now on what the queue of a subscriber holds, and those that did so before end. Returns whether there is such a queue.';

create or replace function penstock.list_subscribers(p_topic text, p_known_generation bigint default null)
returns table (generation bigint, client_id text, queue text, key text, filter text, ttl interval, expires_at timestamptz, after_seq bigint, created_at timestamptz)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    topic penstock.topics;
begin
    select * into topic from penstock.topics where name = p_topic;
    if topic.generation is not distinct from p_known_generation then
        return query select topic.generation, null::text, null::text, null::text, null::text, null::interval, null::timestamptz, null::bigint, null::timestamptz;
    else
        return query
        select
            topic.generation, there.client_id, there.queue, there.key, there.filter::text, there.ttl, there.expires_at,
            there.after_seq, there.created_at
        from (select topic.name) as chosen
        left join penstock.subscriptions as there
            on there.topic = chosen.name and not penstock.has_lapsed(there.expires_at, there.ttl, penstock.clock())
        order by there.number;
    end if;
end
$$;
comment on function penstock.list_subscribers(text, bigint) is
    'The subscribers of a topic, oldest first, with the generation of the list; one row without a client id when there are none, or when the caller knows this generation already.';
