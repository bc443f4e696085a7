-- Publish many: as publish, for thousands of messages in one statement.

create or replace function penstock.insert_many_copies(
    p_topic text, p_data jsonb[], p_ids uuid[], p_run_after timestamptz[], p_expires_at timestamptz[], p_numbers bigint[],
    p_last_seq bigint, p_moment timestamptz, p_traceparents text[], p_keys text[]
)
returns integer
language plpgsql
as $$
declare
    written integer;
    -- One for all: no two messages of the call have the same range.
    random constant bigint := penstock.random_number();
begin
    with given as (
        select
            message.data, message.id, message.run_after, message.expires_at, message.number, message.key, p_last_seq + message.place as seq,
            penstock.options_of_copies(message.traceparent) as options,
            penstock.first_copy_id(p_moment, random + message.place) as first_copy, penstock.is_envelope(message.data) as sealed
        from unnest(p_data, p_ids, p_run_after, p_expires_at, p_numbers, p_traceparents, p_keys) with ordinality
            as message (data, id, run_after, expires_at, number, traceparent, key, place)
    ),
    copies as (
        insert into penstock.queued_jobs
        select (
            penstock.new_job(
                wanted.copy_id, wanted.queue, 'null', p_moment, wanted.max_attempts, wanted.run_after, wanted.expires_at, wanted.key,
                p_message => wanted.number, p_options => wanted.options
            )
        ).*
        from (
            select
                (left(given.first_copy::text, 24) || lpad(to_hex(subscriber.number), 12, '0'))::uuid as copy_id,
                subscriber.queue, coalesce(subscriber.key, given.key) as key, type.max_attempts, given.number, given.run_after, given.expires_at, given.options
            from given
            join penstock.subscriptions as subscriber on subscriber.topic = p_topic
            cross join lateral (select jobs.max_attempts, jobs.encrypted from penstock.jobs where jobs.name = subscriber.queue offset 0) as type
            where (subscriber.filter is null or given.data @> subscriber.filter)
                and case when type.encrypted and not given.sealed then penstock.refuse_copy(p_topic, subscriber.queue) else true end
            order by given.seq, subscriber.client_id
            offset 0
        ) as wanted
        returning message
    ),
    counted as (
        select copies.message, count(*)::integer as copies from copies group by copies.message
    )
    insert into penstock.topic_messages (number, seq, published_at, run_after, expires_at, id, first_copy, receivers, topic, key, data)
    select
        given.number, given.seq, p_moment, given.run_after, given.expires_at, given.id, given.first_copy, coalesce(counted.copies, 0), p_topic,
        given.key, given.data
    from given
    left join counted on counted.message = given.number
    on conflict on constraint topic_messages_id_key do nothing;
    get diagnostics written = row_count;
    return written;
end
$$;
comment on function penstock.insert_many_copies(text, jsonb[], uuid[], timestamptz[], timestamptz[], bigint[], bigint, timestamptz, text[], text[]) is
    'Part of publish_many: writes messages without unique keys, and their copies. Returns how many messages.';

create or replace function penstock.check_messages(
    p_topic text, p_data jsonb[], p_ids uuid[], p_unique_keys text[], p_run_after timestamptz[], p_expires_at timestamptz[],
    p_traceparents text[], p_keys text[]
)
returns void
language plpgsql
immutable
as $$
declare
    size constant integer := coalesce(cardinality(p_data), 0);
begin
    if size > 10000 then
        raise exception '% messages are too many for one call', size
            using errcode = 'PS413', hint = 'Publish at most 10,000 messages at once.';
    end if;
    perform penstock.check_lists(array[
        array_dims(p_data), array_dims(p_ids), array_dims(p_unique_keys), array_dims(p_run_after), array_dims(p_expires_at),
        array_dims(p_traceparents), array_dims(p_keys)
    ]);
    if coalesce(cardinality(p_ids), size) <> size or array_position(p_ids, null) is not null then
        raise exception 'there are not as many ids as messages'
            using errcode = 'PS400', hint = 'Give one id for each message, or null instead of the array.';
    end if;
    if coalesce(cardinality(p_unique_keys), size) <> size
        or coalesce(cardinality(p_run_after), size) <> size
        or coalesce(cardinality(p_expires_at), size) <> size
        or coalesce(cardinality(p_traceparents), size) <> size
        or coalesce(cardinality(p_keys), size) <> size then
        raise exception 'the arrays differ in length'
            using errcode = 'PS400', hint = 'Give one element for each message, or null instead of an array.';
    end if;
    if (select count(distinct given) from unnest(p_ids) as given) <> coalesce(cardinality(p_ids), 0) then
        raise exception 'an id is given twice'
            using errcode = 'PS400', hint = 'Every message needs an id of its own.';
    end if;
    perform penstock.check_each_json(p_data, format('a message for %s', p_topic));
    perform penstock.check_times(p_run_after || p_expires_at);
    for place in 1 .. size loop
        perform penstock.check_message(coalesce(p_topic, 'null'), p_data[place], p_unique_keys[place], p_keys[place]);
    end loop;
end
$$;
comment on function penstock.check_messages(text, jsonb[], uuid[], text[], timestamptz[], timestamptz[], text[], text[]) is
    'Part of publish_many: raises PS400 or PS413 for the first thing that is wrong.';

-- Long, since all of it happens in one hold of the topic's lock: the checks that need the topic's rows, both ways of writing copies, the
-- change of the topic's row, and the answer.
create or replace function penstock.publish_many(
    p_topic text,
    p_data jsonb[],
    p_ids uuid[] default null,
    p_unique_keys text[] default null,
    p_run_after timestamptz[] default null,
    p_expires_at timestamptz[] default null,
    p_traceparents text[] default null,
    p_keys text[] default null
)
returns table (ordinal integer, id uuid, seq bigint, receivers integer, outcome text, coalesced integer)
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
    fresh integer[];
    written integer;
    tries integer := 0;
begin
    perform penstock.check_messages(p_topic, p_data, p_ids, p_unique_keys, p_run_after, p_expires_at, p_traceparents, p_keys);
    topic := penstock.lock_topic(p_topic);
    if topic.encrypted then
        perform penstock.refuse_plain('topic ' || p_topic, p_data);
    end if;
    if exists (select from unnest(p_data) as given where pg_column_size(given) > 16384) then
        perform penstock.note_large(p_topic);
    end if;
    moment := date_trunc('milliseconds', penstock.clock());
    perform penstock.end_expired(p_topic, moment);
    if size::bigint * (select count(*) from penstock.subscriptions as there where there.topic = p_topic) > 1000000 then
        raise exception '% messages to all subscribers of % are too many copies for one call', size, p_topic
            using errcode = 'PS413', hint = 'A call writes at most 1,000,000 copies: publish fewer messages at once.';
    end if;
    -- Neither which id it is nor whose, which is for none who guesses.
    if exists (select from penstock.topic_messages as message where message.id = any (p_ids) and message.topic <> p_topic) then
        raise exception 'a message with one of the ids was published to another topic'
            using errcode = 'PS409', hint = 'Every message needs an id of its own.';
    end if;
    perform pg_current_xact_id();
    if ids is null then
        ids := array(select penstock.new_id() from generate_series(1, size));
    end if;
    fresh := array(
        select given.place::integer
        from unnest(ids) with ordinality as given (id, place)
        where not exists (select from penstock.topic_messages as message where message.id = given.id)
        order by given.place
    );
    if num_nonnulls(variadic coalesce(p_unique_keys, '{}')) > 0 then
        -- One after another: a message may coalesce with a copy of the one before it.
        for nth in 1 .. cardinality(fresh) loop
            perform penstock.write_message(
                p_topic, topic.last_seq + nth, moment, ids[fresh[nth]], p_data[fresh[nth]], p_unique_keys[fresh[nth]],
                p_run_after[fresh[nth]], p_expires_at[fresh[nth]], p_traceparents[fresh[nth]], p_keys[fresh[nth]]
            );
        end loop;
    elsif cardinality(fresh) > 0 then
        loop
            begin
                written := penstock.insert_many_copies(
                    p_topic,
                    array(select p_data[place] from unnest(fresh) with ordinality as chosen (place, nth) order by nth),
                    array(select ids[place] from unnest(fresh) with ordinality as chosen (place, nth) order by nth),
                    array(select p_run_after[place] from unnest(fresh) with ordinality as chosen (place, nth) order by nth),
                    array(select p_expires_at[place] from unnest(fresh) with ordinality as chosen (place, nth) order by nth),
                    array(select nextval('penstock.message_number') from unnest(fresh)),
                    topic.last_seq,
                    moment,
                    array(select p_traceparents[place] from unnest(fresh) with ordinality as chosen (place, nth) order by nth),
                    array(select p_keys[place] from unnest(fresh) with ordinality as chosen (place, nth) order by nth)
                );
                exit;
            exception
                when unique_violation then
                    -- As in write_message.
                    tries := tries + 1;
                    if tries >= 10 then
                        raise;
                    end if;
            end;
        end loop;
        if written <> cardinality(fresh) then
            raise exception 'a message with one of the ids is being published to another topic'
                using errcode = 'PS409', hint = 'Every message needs an id of its own.';
        end if;
    end if;
    if cardinality(fresh) > 0 then
        update penstock.topics set last_seq = topics.last_seq + cardinality(fresh) where topics.name = p_topic;
        if exists (select from unnest(fresh) as place where p_run_after[place] < moment + interval '5 seconds' is not false) then
            perform penstock.wake(penstock.idle_subscribers(p_topic), 'jobs');
        end if;
    end if;
    return query
    select
        given.place::integer, given.id, there.seq, there.receivers,
        case when there.seq > topic.last_seq then 'published' else 'duplicate' end,
        coalesce(cardinality(there.coalesced), 0)
    from unnest(ids) with ordinality as given (id, place)
    cross join lateral (select * from penstock.topic_messages as message where message.id = given.id offset 0) as there
    order by given.place;
end
$$;
comment on function penstock.publish_many(text, jsonb[], uuid[], text[], timestamptz[], timestamptz[], text[], text[]) is
    'Publishes up to 10,000 messages in their order, all or none; the arrays are what publish takes, null for the default of all. One change of the topic''s row, whatever their number; messages without unique keys are written in one statement.';
