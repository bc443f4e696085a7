-- Publish: one message to all subscribers of a topic, in the caller's transaction. And: what became of it.

create or replace function penstock.check_message(p_topic text, p_data jsonb, p_unique_key text, p_key text)
returns void
language plpgsql
immutable
as $$
begin
    if p_data is null then
        raise exception 'the message for % is null', p_topic
            using errcode = 'PS400', hint = 'Give a JSON payload; JSON null is written ''null''::jsonb.';
    end if;
    if not penstock.is_key(p_unique_key) then
        raise exception 'invalid unique key %', quote_literal(left(p_unique_key, 100))
            using errcode = 'PS400', hint = 'A unique key has 1 to 255 characters and no control characters.';
    end if;
    if not penstock.is_key(p_key) then
        raise exception 'invalid key %', quote_literal(left(p_key, 100))
            using errcode = 'PS400', hint = 'A key has 1 to 255 characters and no control characters.';
    end if;
end
$$;
comment on function penstock.check_message(text, jsonb, text, text) is 'Part of publish and publish_many: raises PS400 or PS413 for a message that cannot be published.';

create or replace function penstock.options_of_copies(p_traceparent text)
returns jsonb
language sql
stable
as $$
    -- One expression, which the planner puts in the place of the call.
    select case
        when coalesce(penstock.valid_traceparent(p_traceparent), penstock.current_traceparent()) is not null
            then jsonb_build_object('traceparent', coalesce(penstock.valid_traceparent(p_traceparent), penstock.current_traceparent()))
    end
$$;
comment on function penstock.options_of_copies(text) is
    'Part of publish and publish_many: the options of the copies of a message with this trace context, or that of the transaction; null: it has none.';

create or replace function penstock.insert_copies(
    p_topic text, p_data jsonb, p_first uuid, p_number bigint, p_moment timestamptz, p_run_after timestamptz, p_expires_at timestamptz,
    p_key text, p_copy_options jsonb
)
returns integer
language plpgsql
as $$
declare
    copies integer;
    -- As copy_id, with the last 64 bits as one number: the first of them is set, so that it has 16 digits.
    prefix constant text := left(p_first::text, 19);
    rest constant bigint := ('x' || translate(right(p_first::text, 17), '-', ''))::bit(64)::bigint;
    sealed constant boolean := penstock.is_envelope(p_data);
begin
    insert into penstock.queued_jobs
    select (
        penstock.new_job(
            (prefix || to_hex(rest + subscriber.number))::uuid, subscriber.queue, 'null', p_moment, type.max_attempts, p_run_after, p_expires_at,
            coalesce(subscriber.key, p_key), p_message => p_number, p_options => p_copy_options
        )
    ).*
    from penstock.subscriptions as subscriber
    cross join lateral (select jobs.max_attempts, jobs.encrypted from penstock.jobs where jobs.name = subscriber.queue offset 0) as type
    where subscriber.topic = p_topic
        and (subscriber.filter is null or p_data @> subscriber.filter)
        and case when type.encrypted and not sealed then penstock.refuse_copy(p_topic, subscriber.queue) else true end
    -- In the order of the queues: neighbours in the ready queue are written together.
    order by subscriber.topic, subscriber.client_id;
    get diagnostics copies = row_count;
    return copies;
end
$$;
comment on function penstock.insert_copies(text, jsonb, uuid, bigint, timestamptz, timestamptz, timestamptz, text, jsonb) is
    'Part of publish: writes a copy for each subscriber, and returns how many.';

create or replace function penstock.insert_coalescing_copies(
    p_topic text, p_data jsonb, p_first uuid, p_number bigint, p_moment timestamptz, p_run_after timestamptz, p_expires_at timestamptz,
    p_unique_key text, p_key text, p_options jsonb, out copies integer, out coalesced uuid[]
)
language plpgsql
as $$
declare
    numbers bigint[];
    rest bigint[];
    standing uuid[];
    sealed constant boolean := penstock.is_envelope(p_data);
begin
    copies := 0;
    coalesced := '{}';
    numbers := array(
        select subscriber.number
        from penstock.subscriptions as subscriber
        where subscriber.topic = p_topic and (subscriber.filter is null or p_data @> subscriber.filter)
        order by subscriber.number
    );
    for tries in 1 .. 100 loop
        insert into penstock.queued_jobs
        select (
            penstock.new_job(
                penstock.copy_id(p_first, subscriber.number), subscriber.queue, 'null', p_moment, type.max_attempts, p_run_after, p_expires_at,
                coalesce(subscriber.key, p_key), p_unique_key => penstock.unique_of(p_unique_key, subscriber.key),
                p_message => p_number, p_options => p_options
            )
        ).*
        from unnest(numbers) as given (number)
        cross join lateral (select * from penstock.subscriptions as found where found.number = given.number offset 0) as subscriber
        cross join lateral (select jobs.max_attempts, jobs.encrypted from penstock.jobs where jobs.name = subscriber.queue offset 0) as type
        where case when type.encrypted and not sealed then penstock.refuse_copy(p_topic, subscriber.queue) else true end
        on conflict do nothing;
        if exists (
            select from penstock.queued_jobs as other
            where other.id between p_first and penstock.last_copy_id(p_first) and other.message is distinct from p_number
        ) then
            -- Another role's job lies among the ids: the caller takes others.
            raise unique_violation;
        end if;
        copies := (select count(*) from penstock.queued_jobs where id between p_first and penstock.last_copy_id(p_first));
        -- As in enqueue: the share lock holds off the claim until the caller commits. A job that is being claimed at this
        -- moment no longer coalesces: for its queue insert again.
        with others as (
            select subscriber.number, other.id
            from unnest(numbers) as given (number)
            cross join lateral (select * from penstock.subscriptions as found where found.number = given.number offset 0) as subscriber
            left join lateral (
                select queued.id
                from penstock.queued_jobs as queued
                where queued.name = subscriber.queue
                    and queued.unique_key = penstock.unique_of(p_unique_key, subscriber.key)
                    and queued.coalesces
                for share of queued
            ) as other on true
        )
        select
            array_agg(others.id) filter (where others.id not between p_first and penstock.last_copy_id(p_first)),
            array_agg(others.number) filter (where others.id is null)
        into standing, rest
        from others;
        coalesced := coalesced || coalesce(standing, '{}');
        if rest is null then
            coalesced := nullif(coalesced, '{}');
            return;
        end if;
        numbers := rest;
    end loop;
    raise exception 'copies for % conflict with others again and again', p_topic
        using errcode = '40001', hint = 'Retry the transaction.';
end
$$;
comment on function penstock.insert_coalescing_copies(text, jsonb, uuid, bigint, timestamptz, timestamptz, timestamptz, text, text, jsonb) is
    'Part of publish: writes a copy for each subscriber in whose queue none with the same unique key waits; coalesced: those that do.';

create or replace function penstock.unique_of(p_unique_key text, p_key text)
returns text
language sql
immutable
parallel safe
as $$
    -- In a queue that several subscribers share, each coalesces for itself; a key has no white space.
    select case when p_key is null then p_unique_key else p_key || ' ' || p_unique_key end
$$;
comment on function penstock.unique_of(text, text) is 'The unique key of a copy.';

create or replace function penstock.idle_subscribers(p_topic text)
returns text[]
language plpgsql
stable
as $$
begin
    -- From the listeners, which are few, to the subscriptions, which can be many.
    return array(
        select distinct waiting.channel
        from (
            select there.channel, row_number() over (partition by subscriber.queue order by random()) as place
            from penstock.listeners as there
            cross join unnest(there.names) as wanted (name)
            cross join lateral (
                select candidate.queue, candidate.topic, candidate.key
                from penstock.subscriptions as candidate
                where candidate.queue = wanted.name
                limit 1
            ) as subscriber
            where there.kind = 'jobs'
                and there.until > clock_timestamp()
                -- A queue that subscribers share may have some of this topic.
                and (subscriber.topic = p_topic or subscriber.key is not null)
        ) as waiting
        -- One more than there is work for, since it may have died; in a queue that subscribers share each brings more.
        where waiting.place <= 2
    );
end
$$;
comment on function penstock.idle_subscribers(text) is 'Part of publish, publish_many and subscribe_many: the channels of workers that wait for copies of a topic, two for each queue.';

create or replace function penstock.write_message(
    p_topic text, p_seq bigint, p_moment timestamptz, p_id uuid, p_data jsonb, p_unique_key text, p_run_after timestamptz,
    p_expires_at timestamptz, p_traceparent text, p_key text, out id uuid, out receivers integer, out coalesced integer
)
language plpgsql
as $$
declare
    message_number constant bigint := nextval('penstock.message_number');
    first_id uuid;
    options jsonb;
    stood_in uuid[];
    tries integer := 0;
begin
    -- Without a trace, which is the common case, the long expression is not even prepared.
    if p_traceparent is not null or current_setting('penstock.traceparent', true) > '' then
        options := penstock.options_of_copies(p_traceparent);
    end if;
    id := coalesce(p_id, penstock.new_id());
    loop
        first_id := penstock.first_copy_id(p_moment, penstock.random_number());
        begin
            if p_unique_key is null then
                receivers := penstock.insert_copies(
                    p_topic, p_data, first_id, message_number, p_moment, p_run_after, p_expires_at, p_key, options
                );
            else
                select copies.copies + coalesce(cardinality(copies.coalesced), 0), copies.coalesced into receivers, stood_in
                from penstock.insert_coalescing_copies(
                    p_topic, p_data, first_id, message_number, p_moment, p_run_after, p_expires_at, p_unique_key, p_key, options
                ) as copies;
            end if;
            exit;
        exception
            when unique_violation then
                -- Another message of this millisecond, or another role's job, has one of these ids.
                tries := tries + 1;
                if tries >= 10 then
                    raise;
                end if;
        end;
    end loop;
    coalesced := coalesce(cardinality(stood_in), 0);
    insert into penstock.topic_messages (
        number, seq, published_at, run_after, expires_at, id, first_copy, receivers, topic, unique_key, key, coalesced, data
    )
    values (
        message_number, p_seq, p_moment, p_run_after, p_expires_at, write_message.id, first_id, write_message.receivers, p_topic, p_unique_key, p_key,
        stood_in, p_data
    )
    on conflict on constraint topic_messages_id_key do nothing;
    if not found then
        raise exception 'message % is being published to another topic', write_message.id
            using errcode = 'PS409', hint = 'Every message needs an id of its own.';
    end if;
end
$$;
comment on function penstock.write_message(text, bigint, timestamptz, uuid, jsonb, text, timestamptz, timestamptz, text, text) is
    'Part of publish and publish_many: writes a message and its copies, for a caller who holds the topic.';

create or replace function penstock.publish(
    p_topic text,
    p_data jsonb default '{}',
    p_id uuid default null,
    p_unique_key text default null,
    p_run_after timestamptz default null,
    p_expires_at timestamptz default null,
    p_traceparent text default null,
    p_key text default null,
    out id uuid,
    out seq bigint,
    out receivers integer,
    out coalesced integer,
    out outcome text
)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    topic penstock.topics;
    moment timestamptz;
    there record;
begin
    if p_data is null or not penstock.is_key(p_unique_key) or not penstock.is_key(p_key) then
        perform penstock.check_message(coalesce(p_topic, 'null'), p_data, p_unique_key, p_key);
    end if;
    if penstock.is_odd(p_data) then
        perform penstock.check_json(p_data, format('the message for %s', p_topic));
    end if;
    if p_run_after is not null or p_expires_at is not null then
        perform penstock.check_times(array[p_run_after, p_expires_at]);
    end if;
    topic := penstock.lock_topic(p_topic);
    if topic.encrypted then
        perform penstock.refuse_plain('topic ' || p_topic, array[p_data]);
    end if;
    if pg_column_size(p_data) > 16384 then
        perform penstock.note_large(p_topic);
    end if;
    if p_id is not null then
        select message.topic, message.id, message.seq, message.receivers, coalesce(cardinality(message.coalesced), 0) as coalesced
        into there
        from penstock.topic_messages as message
        where message.id = p_id;
        if found then
            if there.topic <> p_topic then
                raise exception 'message % was published to another topic', p_id
                    using errcode = 'PS409', hint = 'Every message needs an id of its own.';
            end if;
            id := there.id;
            seq := there.seq;
            receivers := there.receivers;
            coalesced := there.coalesced;
            outcome := 'duplicate';
            return;
        end if;
    end if;
    moment := date_trunc('milliseconds', penstock.clock());
    perform penstock.end_expired(p_topic, moment);
    -- The xid before the first number of a job: see the head of the jobs' tables.
    perform pg_current_xact_id();
    seq := topic.last_seq + 1;
    outcome := 'published';
    select written.id, written.receivers, written.coalesced into id, receivers, coalesced
    from penstock.write_message(
        p_topic, seq, moment, p_id, p_data, p_unique_key, p_run_after, p_expires_at, p_traceparent, p_key
    ) as written;
    update penstock.topics set last_seq = topics.last_seq + 1 where topics.name = p_topic;
    if receivers > coalesced and (p_run_after is null or p_run_after < moment + interval '5 seconds') then
        perform penstock.wake(penstock.idle_subscribers(p_topic), 'jobs');
    end if;
end
$$;
comment on function penstock.publish(text, jsonb, uuid, text, timestamptz, timestamptz, text, text) is
    'Publishes a message to the subscribers that a topic has when the caller''s transaction commits: each gets a copy as a job. p_id: the same id again is the same message (outcome duplicate). p_unique_key: a subscriber in whose queue a copy with this key waits gets no other (counted in coalesced). p_run_after, p_expires_at: of each copy. p_key: key of each copy. p_traceparent: its trace context (W3C); null: that of the transaction (set local penstock.traceparent). Holds the topic until the transaction ends, so publish last. PS404 when there is no such topic.';

create or replace function penstock.publish_json(p_topic text, p_message jsonb)
returns table (id uuid, seq bigint, receivers integer, coalesced integer, outcome text)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    known constant text[] := array['data', 'id', 'unique_key', 'run_after', 'expires_at', 'traceparent', 'key'];
    is_one constant boolean := jsonb_typeof(p_message) is distinct from 'array';
    documents constant jsonb := case when is_one then jsonb_build_array(p_message) else p_message end;
    given record;
begin
    perform penstock.check_documents(documents, known, 'message', '{"data": {"delay": 12}, "unique_key": "JFK"}');
    begin
        select
            array_agg(coalesce(message -> 'data', '{}') order by place) as data,
            array_agg((message ->> 'id')::uuid order by place) as ids,
            array_agg(message ->> 'unique_key' order by place) as unique_keys,
            array_agg(penstock.moment(message -> 'run_after', 'run_after') order by place) as run_after,
            array_agg(penstock.moment(message -> 'expires_at', 'expires_at') order by place) as expires_at,
            array_agg(message ->> 'traceparent' order by place) as traceparents,
            array_agg(message ->> 'key' order by place) as keys
        into given
        from jsonb_array_elements(documents) with ordinality as one (message, place);
    exception
        when data_exception then
            raise exception 'invalid message: %', sqlerrm
                using errcode = 'PS400', hint = 'id is a UUID, run_after and expires_at are times such as "2026-01-31T12:00:00Z", or seconds from now.';
    end;
    if is_one then
        return query
        select published.*
        from penstock.publish(
            p_topic, given.data[1], given.ids[1], given.unique_keys[1], given.run_after[1], given.expires_at[1], given.traceparents[1],
            given.keys[1]
        ) as published;
    else
        return query
        select published.id, published.seq, published.receivers, published.coalesced, published.outcome
        from penstock.publish_many(
            p_topic, coalesce(given.data, '{}'),
            array(select coalesce(one.id, penstock.new_id()) from unnest(given.ids) with ordinality as one (id, place) order by one.place),
            given.unique_keys, given.run_after, given.expires_at, given.traceparents, given.keys
        ) as published
        order by published.ordinal;
    end if;
end
$$;
comment on function penstock.publish_json(text, jsonb) is
    'publish with one JSON parameter: {data, id, unique_key, run_after, expires_at, traceparent, key}, each optional; times are text, or numbers of seconds from now. An array of such objects: publish_many, with a row for each in their order.';
