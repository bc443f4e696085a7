-- Maintenance of topics, which any worker does for all: end what was not renewed, take queues away, prune messages.

create or replace function penstock.drop_waiting(p_queue text, p_deferred boolean, p_moment timestamptz)
returns void
language plpgsql
as $$
declare
    waiting uuid[];
begin
    waiting := array(
        select job.id
        from penstock.queued_jobs as job
        where job.name = p_queue and job.slot is null and job.seq is not null and job.status = 'queued'
        limit 10000
        for update skip locked
    );
    if p_deferred then
        waiting := waiting || array(
            select job.id
            from penstock.queued_jobs as job
            where job.name = p_queue and job.seq is null
            limit 10000
            for update skip locked
        );
    end if;
    perform penstock.archive_waiting(waiting, 'expired', null, null, p_moment);
end
$$;
comment on function penstock.drop_waiting(text, boolean, timestamptz) is
    'Part of unsubscribe and maintain_topics: archives up to 10,000 jobs that wait in a queue as expired, and as many deferred ones if wanted.';

create or replace function penstock.remove_queue(p_topic text, p_queue text, p_deferred boolean, p_moment timestamptz)
returns boolean
language plpgsql
as $$
declare
    ended penstock.ended_queues;
begin
    -- Not waited for: maintenance may hold several topics, and others take them in another order.
    perform from penstock.topics where name = p_topic for no key update skip locked;
    if not found then
        return false;
    end if;
    select * into ended from penstock.ended_queues where queue = p_queue;
    if not found then
        return false;
    end if;
    if exists (select from penstock.pools where name = p_queue) then
        -- A user made a pool of it, which maintenance does not take away.
        delete from penstock.ended_queues where queue = p_queue;
        return false;
    end if;
    -- Against a direct enqueue: see enqueue_many.
    perform from penstock.jobs where name = p_queue for update;
    if ended.dropped then
        perform penstock.drop_waiting(p_queue, p_deferred, p_moment);
    end if;
    if exists (select from penstock.queued_jobs where name = p_queue and slot is null and seq is not null)
        or (p_deferred and exists (select from penstock.queued_jobs where name = p_queue and seq is null)) then
        -- It is not empty yet. A queue that no worker works on is looked at less and less often.
        update penstock.ended_queues
        set look_at = p_moment + least((p_moment - ended_at) / 4 + interval '1 second', interval '10 minutes')
        where queue = p_queue;
        return false;
    end if;
    delete from penstock.type_priorities where name = p_queue;
    delete from penstock.rate_windows where name = p_queue;
    delete from penstock.ended_queues where queue = p_queue;
    delete from penstock.jobs where name = p_queue;
    return true;
end
$$;
comment on function penstock.remove_queue(text, text, boolean, timestamptz) is
    'Part of maintain_topics: takes the queue of an ended subscription away, unless a worker still has its jobs. p_deferred: some of its jobs are deferred.';

create or replace function penstock.maintain_topics(p_limit integer default 1000)
returns table (ended integer, removed integer)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    begun constant timestamptz := clock_timestamp();
    topic_name text;
    due record;
    deferred text[];
begin
    perform penstock.check_limit(p_limit, 10000);
    ended := 0;
    removed := 0;
    -- One at a time is enough.
    if not penstock.try_maintenance('maintain_topics') then
        return next;
        return;
    end if;
    for topic_name in
        select topics.name
        from penstock.topics
        where exists (
            select from penstock.subscriptions as there
            where there.topic = topics.name
                and there.ttl is not null
                and there.expires_at <= moment
                and penstock.has_lapsed(there.expires_at, there.ttl, moment)
        )
        order by topics.name
        for no key update skip locked
    loop
        ended := ended + penstock.end_expired(topic_name, moment);
    end loop;
    perform penstock.ensure_archive(moment);
    -- Deferred jobs have no index by name: one look for all queues.
    if (select true from penstock.ended_queues where look_at <= moment order by look_at limit 1) then
        deferred := array(select distinct job.name from penstock.queued_jobs as job where job.seq is null);
    end if;
    for due in
        select queue, topic from penstock.ended_queues where look_at <= moment order by look_at limit p_limit
    loop
        if penstock.remove_queue(due.topic, due.queue, due.queue = any (deferred), moment) then
            removed := removed + 1;
        end if;
        -- Publishers wait for the topics that this transaction holds: the others come next time.
        exit when clock_timestamp() - begun > interval '200 milliseconds';
    end loop;
    return next;
end
$$;
comment on function penstock.maintain_topics(integer) is
    'Ends the subscriptions that were not renewed in time, and takes the queues of ended subscriptions away. Returns how many of each.';

create or replace function penstock.prune_messages(p_keep interval, p_limit integer default 10000)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    looked_at constant timestamptz := penstock.clock();
    candidates bigint[];
    held text[];
    pruned integer;
begin
    perform penstock.check_limit(p_limit, 100000);
    if p_keep is null or p_keep < interval '0' or p_keep > interval '366000 days' and isfinite(p_keep) then
        raise exception 'cannot keep %', coalesce(p_keep::text, 'null')
            using errcode = 'PS400', hint = 'Give the time for which messages are kept, for example 30 days.';
    end if;
    candidates := array(
        select message.number
        from penstock.topic_messages as message
        join penstock.topics on topics.name = message.topic
        where message.published_at < looked_at - p_keep
            and message.seq <= topics.last_seq - topics.catch_up
            and not exists (
                select from penstock.queued_jobs as job
                where job.id between message.first_copy and penstock.last_copy_id(message.first_copy)
                    and job.message = message.number
            )
            and not exists (
                select from penstock.archived_jobs as job
                where job.id between message.first_copy and penstock.last_copy_id(message.first_copy)
                    and job.message = message.number
                    and job.finished_at >= message.published_at
            )
        order by message.number
        limit p_limit
    );
    -- A subscribe that begins with old messages holds the topic while it copies them: look again, and hold it too. That is
    -- short, since a copy made after the first look can only have been archived after it. Not waited for: there are several.
    held := array(
        select topics.name
        from penstock.topics
        where topics.name = any (array(select distinct message.topic from penstock.topic_messages as message where message.number = any (candidates)))
        order by topics.name
        for no key update skip locked
    );
    with gone as (
        delete from penstock.topic_messages as message
        using penstock.topics
        where message.number = any (candidates)
            and topics.name = message.topic
            and topics.name = any (held)
            and message.seq <= topics.last_seq - topics.catch_up
            and not exists (
                select from penstock.queued_jobs as job
                where job.id between message.first_copy and penstock.last_copy_id(message.first_copy)
                    and job.message = message.number
            )
            and not exists (
                select from penstock.archived_jobs as job
                where job.id between message.first_copy and penstock.last_copy_id(message.first_copy)
                    and job.message = message.number
                    and job.finished_at >= looked_at
            )
        returning message.topic, message.seq
    ),
    noted as (
        update penstock.topics
        set pruned_seq = greatest(topics.pruned_seq, last.seq)
        from (select gone.topic, max(gone.seq) as seq from gone group by gone.topic) as last
        where topics.name = last.topic
    )
    select count(*) into pruned from gone;
    return pruned;
end
$$;
comment on function penstock.prune_messages(interval, integer) is
    'Deletes messages that were published longer ago than p_keep, are not among the last ones that their topic keeps, and have no copy any more, queued or archived. Returns how many, at most p_limit: call it again when it is that many.';

create or replace function penstock.prune_messages_due(p_limit integer default 10000)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    keep constant interval := penstock.kept('jobs');
begin
    perform penstock.check_limit(p_limit, 100000);
    if keep is null then
        return 0;
    end if;
    return penstock.prune_messages(keep, p_limit);
end
$$;
comment on function penstock.prune_messages_due(integer) is
    'As prune_messages, by the stored retention: what a worker calls. Returns how many, at most p_limit: call it until it is 0.';
