-- Publish many: as publish, for thousands of messages in one statement.

create or replace function penstock.insert_many_copies(
    p_topic text, p_data jsonb[], p_ids uuid[], p_numbers bigint[], p_last_seq bigint, p_moment timestamptz
)
returns table (id uuid, seq bigint, receivers integer)
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
    return query
    with given as (
        select
            message.data, message.id, message.number, p_last_seq + message.place as seq,
            left(penstock.first_copy_id(p_moment, message.number)::text, 24) as prefix
        from unnest(p_data, p_ids, p_numbers) with ordinality as message (data, id, number, place)
    ),
    copies as (
        insert into penstock.queued_jobs (id, name, seq, run_after, created_at, updated_at, attempts, max_attempts, key, data, message)
        select
            wanted.copy_id, wanted.queue, nextval('penstock.job_seq'), p_moment, p_moment, p_moment,
            wanted.attempts, wanted.attempts, wanted.key, 'null', wanted.number
        from (
            select
                (given.prefix || lpad(to_hex(subscriber.number), 12, '0'))::uuid as copy_id,
                subscriber.queue, subscriber.key, type.attempts, given.number
            from given
            join penstock.subscriptions as subscriber on subscriber.topic = p_topic
            cross join lateral (select jobs.attempts from penstock.jobs where jobs.name = subscriber.queue offset 0) as type
            where subscriber.filter is null or given.data @> subscriber.filter
            order by given.seq, subscriber.client_id
            offset 0
        ) as wanted
        returning message
    ),
    counted as (
        select copies.message, count(*)::integer as copies from copies group by copies.message
    )
    insert into penstock.topic_messages (number, seq, published_at, id, receivers, topic, data)
    select given.number, given.seq, p_moment, given.id, coalesce(counted.copies, 0), p_topic, given.data
    from given
    left join counted on counted.message = given.number
    returning topic_messages.id, topic_messages.seq, topic_messages.receivers;
end
$$;
comment on function penstock.insert_many_copies(text, jsonb[], uuid[], bigint[], bigint, timestamptz) is
    'Part of publish_many: writes the messages and their copies.';

create or replace function penstock.publish_many(p_topic text, p_data jsonb[], p_ids uuid[] default null)
returns table (ordinal integer, id uuid, seq bigint, receivers integer, outcome text)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    size constant integer := coalesce(cardinality(p_data), 0);
    topic penstock.topics;
    moment timestamptz;
    ids uuid[] := p_ids;
    numbers bigint[];
    fresh integer[];
    other text;
begin
    if size > 10000 then
        raise exception '% messages are too many for one call', size
            using errcode = 'PS413', hint = 'Publish at most 10,000 messages at once.';
    end if;
    if coalesce(cardinality(p_ids), size) <> size or array_position(p_ids, null) is not null then
        raise exception 'there are not as many ids as messages'
            using errcode = 'PS400', hint = 'Give one id for each message, or null instead of the array.';
    end if;
    if (select count(distinct given) from unnest(p_ids) as given) <> coalesce(cardinality(p_ids), 0) then
        raise exception 'an id is given twice'
            using errcode = 'PS400', hint = 'Every message needs an id of its own.';
    end if;
    for place in 1 .. size loop
        perform penstock.check_message(coalesce(p_topic, 'null'), p_data[place], null);
    end loop;
    topic := penstock.lock_topic(p_topic);
    moment := date_trunc('milliseconds', penstock.clock());
    perform penstock.end_expired(p_topic, moment);
    if size::bigint * (select count(*) from penstock.subscriptions as there where there.topic = p_topic) > 1000000 then
        raise exception '% messages to all subscribers of % are too many copies for one call', size, p_topic
            using errcode = 'PS413', hint = 'A call writes at most 1,000,000 copies: publish fewer messages at once.';
    end if;
    select message.topic into other
    from penstock.topic_messages as message
    where message.id = any (p_ids) and message.topic <> p_topic
    limit 1;
    if found then
        raise exception 'a message with one of the ids was published to %', other
            using errcode = 'PS409', hint = 'Every message needs an id of its own.';
    end if;
    perform pg_current_xact_id();
    numbers := array(select nextval('penstock.message_number') from generate_series(1, size));
    if ids is null then
        ids := array(select penstock.first_copy_id(moment, given.number) from unnest(numbers) with ordinality as given (number, place) order by given.place);
    end if;
    fresh := array(
        select given.place::integer
        from unnest(ids) with ordinality as given (id, place)
        where not exists (select from penstock.topic_messages as message where message.id = given.id)
        order by given.place
    );
    return query
    with published as (
        select *
        from penstock.insert_many_copies(
            p_topic,
            array(select p_data[place] from unnest(fresh) with ordinality as chosen (place, line) order by line),
            array(select ids[place] from unnest(fresh) with ordinality as chosen (place, line) order by line),
            array(select numbers[place] from unnest(fresh) with ordinality as chosen (place, line) order by line),
            topic.last_seq,
            moment
        )
    )
    select
        given.place::integer, given.id, coalesce(published.seq, there.seq), coalesce(published.receivers, there.receivers),
        case when published.id is not null then 'published' else 'duplicate' end
    from unnest(ids) with ordinality as given (id, place)
    left join published on published.id = given.id
    left join penstock.topic_messages as there on there.id = given.id
    order by given.place;
    update penstock.topics set last_seq = topics.last_seq + cardinality(fresh) where topics.name = p_topic;
    if cardinality(fresh) > 0 then
        perform penstock.wake_subscribers(p_topic);
    end if;
end
$$;
comment on function penstock.publish_many(text, jsonb[], uuid[]) is
    'Publishes up to 10,000 messages in their order, all or none; see publish. One statement and one change of the topic''s row, whatever their number.';
