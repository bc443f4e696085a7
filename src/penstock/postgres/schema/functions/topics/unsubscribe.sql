-- The end of subscriptions: by a call, or because they were not renewed in time. The head of tables/0007_topics.sql explains their order.

create or replace function penstock.list_changed(p_topic text)
returns void
language plpgsql
as $$
begin
    update penstock.topics set generation = generation + 1 where name = p_topic;
    perform penstock.wake('{penstock_topics}', p_topic);
end
$$;
comment on function penstock.list_changed(text) is 'Part of subscribe_many, unsubscribe_many and end_expired: a new generation of the list of subscribers, of which processes with a copy of the list are notified.';

create or replace function penstock.has_lapsed(p_expires_at timestamptz, p_ttl interval, p_moment timestamptz)
returns boolean
language sql
stable
as $$
    -- While the server was away no client could renew: after its start each client has a whole time to live to renew.
    select p_ttl is not null
        and p_expires_at <= p_moment
        and pg_postmaster_start_time() + p_ttl <= greatest(p_moment, clock_timestamp())
$$;
comment on function penstock.has_lapsed(timestamptz, interval, timestamptz) is
    'Whether a subscription was not renewed in time. Its time does not run out before the server has been up for so long.';

create or replace function penstock.end_expired(p_topic text, p_moment timestamptz)
returns integer
language plpgsql
as $$
declare
    ended_subscriptions integer;
begin
    -- So many are ended in each publish.
    if not exists (select from penstock.subscriptions where topic = p_topic and ttl is not null and expires_at <= p_moment) then
        return 0;
    end if;
    with ended as (
        delete from penstock.subscriptions
        where topic = p_topic and ttl is not null and expires_at <= p_moment and penstock.has_lapsed(expires_at, ttl, p_moment)
        returning queue, key, ttl
    ),
    queues as (
        -- What waits there is kept for another time to live: a worker that was cut off for so long comes back to it.
        insert into penstock.ended_queues (queue, topic, dropped, ended_at, look_at)
        select ended.queue, p_topic, true, p_moment, p_moment + ended.ttl
        from ended
        where ended.key is null
        on conflict (queue) do nothing
    )
    select count(*) into ended_subscriptions from ended;
    if ended_subscriptions > 0 then
        perform penstock.list_changed(p_topic);
    end if;
    return ended_subscriptions;
end
$$;
comment on function penstock.end_expired(text, timestamptz) is
    'Part of publish, publish_many, subscribe_many and maintain_topics: ends the subscriptions of a topic, whose row the caller holds, that were not renewed in time.';

create or replace function penstock.unsubscribe_many(p_topic text, p_client_ids text[], p_drop boolean default false)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment timestamptz;
    ended_subscriptions integer;
    ended_queue text;
begin
    perform penstock.check_size(cardinality(p_client_ids), 100000, 'client ids');
    perform penstock.lock_topic(p_topic);
    moment := penstock.clock();
    if p_drop then
        -- At once, so that a client that comes back in the next moment does not find it. Maintenance takes the queues away.
        perform penstock.ensure_archive(moment);
        for ended_queue in
            select there.queue from penstock.subscriptions as there
            where there.topic = p_topic and there.client_id = any (p_client_ids) and there.key is null
        loop
            perform penstock.drop_waiting(ended_queue, false, moment);
        end loop;
    end if;
    with ended as (
        delete from penstock.subscriptions
        where topic = p_topic and client_id = any (p_client_ids)
        returning queue, key
    ),
    queues as (
        insert into penstock.ended_queues (queue, topic, dropped, ended_at, look_at)
        select ended.queue, p_topic, coalesce(p_drop, false), moment, moment
        from ended
        where ended.key is null
        on conflict (queue) do nothing
    )
    select count(*) into ended_subscriptions from ended;
    if ended_subscriptions > 0 then
        perform penstock.list_changed(p_topic);
    end if;
    return ended_subscriptions;
end
$$;
comment on function penstock.unsubscribe_many(text, text[], boolean) is 'Ends subscriptions; see unsubscribe. Returns how many there were.';

create or replace function penstock.unsubscribe(p_topic text, p_client_id text, p_drop boolean default false)
returns boolean
language sql
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.unsubscribe_many(p_topic, array[p_client_id], p_drop) > 0
$$;
comment on function penstock.unsubscribe(text, text, boolean) is
    'Ends a subscription; false when there was none. Copies that wait can still be worked, and the queue goes once it is empty; with p_drop they are archived as expired.';
