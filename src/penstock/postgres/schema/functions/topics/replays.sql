-- Replays of messages: further copies of what was published before, for one subscriber.

-- Long, since it is one choice of messages with all its limits, and the copies that follow from it.
create or replace function penstock.replay_messages(
    topic penstock.topics, p_after bigint, p_subscriptions integer, p_since bigint, p_moment timestamptz
)
returns jsonb
language plpgsql
as $$
declare
    since constant bigint := coalesce(p_since, greatest(topic.last_seq - topic.catch_up, 0));
    is_shared constant boolean := exists (
        select from penstock.subscriptions as subscriber
        where subscriber.topic = topic.name and subscriber.number > p_after and subscriber.key is not null
    );
    replayed jsonb;
begin
    if p_since is not null then
        perform penstock.check_since(topic, p_since);
    end if;
    if (topic.last_seq - since) * p_subscriptions > 100000 then
        raise exception '% messages of % for % subscribers are too many for one call', topic.last_seq - since, topic.name, p_subscriptions
            using errcode = 'PS413', hint = 'Read them with penstock.read_topic, then subscribe with the sequence number of the last one.';
    end if;
    if since >= topic.last_seq then
        return '{}';
    end if;
    perform pg_current_xact_id();
    -- What waits from an earlier subscription of the same client is still its own, and comes once.
    with standing as materialized (
        select waiting.name, waiting.message
        from penstock.subscriptions as subscriber
        cross join lateral (
            select job.name, job.message
            from penstock.queued_jobs as job
            where job.name = subscriber.queue and job.seq is not null and job.message is not null
            offset 0
        ) as waiting
        where subscriber.topic = topic.name and subscriber.number > p_after and subscriber.key is null
    ),
    -- As columns: the ids are derived in one call, and nothing is joined, since the planner takes the tables for empty.
    kept as (
        select
            array_agg(message.first_copy order by message.seq, subscriber.number) as firsts,
            array_agg(message.number order by message.seq, subscriber.number) as numbers,
            array_agg(message.run_after order by message.seq, subscriber.number) as run_after,
            array_agg(message.expires_at order by message.seq, subscriber.number) as expires_at,
            array_agg(coalesce(subscriber.key, message.key) order by message.seq, subscriber.number) as keys,
            array_agg(penstock.unique_of(message.unique_key, subscriber.key) order by message.seq, subscriber.number) as unique_keys,
            array_agg(subscriber.number order by message.seq, subscriber.number) as subscriptions,
            array_agg(subscriber.queue order by message.seq, subscriber.number) as queues,
            array_agg(type.max_attempts order by message.seq, subscriber.number) as max_attempts
        from penstock.subscriptions as subscriber
        cross join lateral (select jobs.max_attempts from penstock.jobs where jobs.name = subscriber.queue offset 0) as type
        cross join penstock.topic_messages as message
        where subscriber.topic = topic.name
            and subscriber.number > p_after
            and message.topic = topic.name
            and message.seq > since
            and (message.expires_at is null or message.expires_at > p_moment)
            and (subscriber.filter is null or message.data @> subscriber.filter)
            and not exists (
                select from standing where standing.name = subscriber.queue and standing.message = message.number
            )
    ),
    copies as (
        insert into penstock.queued_jobs
        select (
            penstock.new_job(
                wanted.id, wanted.queue, 'null', p_moment, wanted.max_attempts, case when wanted.run_after > p_moment then wanted.run_after end,
                wanted.expires_at, wanted.key, p_unique_key => wanted.unique_key, p_message => wanted.number
            )
        ).*
        from kept
        cross join unnest(
            penstock.late_copy_ids(kept.firsts, kept.numbers, kept.subscriptions), kept.queues, kept.max_attempts, kept.run_after, kept.expires_at,
            kept.keys, kept.unique_keys, kept.numbers
        ) with ordinality as wanted (id, queue, max_attempts, run_after, expires_at, key, unique_key, number, place)
        order by wanted.place
        on conflict do nothing
        returning name, key
    )
    select jsonb_object_agg(counted.client_id, counted.copies) into replayed
    from (
        -- The name of a queue of its own, or the key in one that is shared: <topic>_<client id>.
        select substr(case when is_shared then copies.key else copies.name end, length(topic.name) + 2) as client_id, count(*) as copies
        from copies
        group by 1
    ) as counted;
    perform penstock.wake(penstock.idle_subscribers(topic.name), 'jobs');
    return coalesce(replayed, '{}');
end
$$;
comment on function penstock.replay_messages(penstock.topics, bigint, integer, bigint, timestamptz) is
    'Part of subscribe: copies of the messages that a new subscriber gets from before its time; how many for each client id.';
