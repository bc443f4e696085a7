-- The rule that no plain payload comes into an encrypted queue, and who may switch encryption off.

create or replace function penstock.check_encrypted_option(p_what text, p_options jsonb)
returns void
language plpgsql
immutable
as $$
begin
    if p_options ? 'encrypted' and jsonb_typeof(p_options -> 'encrypted') <> 'boolean' then
        raise exception 'encrypted of % must be true or false, not %', p_what, left(p_options ->> 'encrypted', 100)
            using errcode = 'PS400', hint = 'It says whether what belongs to it is stored encrypted.';
    end if;
end
$$;
comment on function penstock.check_encrypted_option(text, jsonb) is
    'Part of what declares and changes job types, topics and streams: raises PS400 unless the option encrypted is true or false.';

create or replace function penstock.may_administer()
returns boolean
language sql
stable
as $$
    select has_function_privilege(session_user, 'penstock.change_topic(text, jsonb)', 'execute')
$$;
comment on function penstock.may_administer() is
    'Part of what turns encryption off: whether the role that is logged in has the access admin, or owns the schema.';

create or replace function penstock.check_queues(p_topic text default null, p_queue text default null, p_after bigint default 0)
returns void
language plpgsql
stable
as $$
declare
    wrong record;
begin
    select type.name as queue, type.encrypted, topics.name as topic, null::text as client_id into wrong
    from penstock.jobs as type
    join penstock.topics on topics.name = type.topic
    where type.name = p_queue and type.encrypted <> topics.encrypted;
    if not found then
        select there.queue, type.encrypted, there.topic, there.client_id into wrong
        from penstock.subscriptions as there
        join penstock.topics on topics.name = there.topic
        cross join lateral (select jobs.encrypted from penstock.jobs where jobs.name = there.queue offset 0) as type
        where (p_topic is null or there.topic = p_topic)
            and (p_queue is null or there.queue = p_queue)
            and there.number > p_after
            and type.encrypted <> topics.encrypted
        limit 1;
    end if;
    if found and wrong.encrypted then
        raise exception 'topic % is not encrypted, and the queue % of its subscriber % is', wrong.topic, wrong.queue, coalesce(wrong.client_id, substr(wrong.queue, length(wrong.topic) + 2))
            using errcode = 'PS409',
                  hint = 'Plain messages would be stored for an encrypted job type. Encrypt the topic, which encrypts the queues of its subscribers: app.topic(name, encrypted=True).';
    elsif found then
        raise exception 'topic % is encrypted, and the queue % of its subscriber is not', wrong.topic, wrong.queue
            using errcode = 'PS409', hint = 'The queues of its subscribers are encrypted for as long as the topic is.';
    end if;
end
$$;
comment on function penstock.check_queues(text, text, bigint) is
    'The rule for encryption of topics: a topic and the queues of its subscribers are encrypted together. Called by whatever changes one of these, with the topic, the queue, or the topic and the number of the last subscription before; raises PS409.';

create or replace function penstock.refuse_copy(p_topic text, p_queue text)
returns boolean
language plpgsql
as $$
begin
    perform penstock.check_queues(p_topic, p_queue);
    raise exception 'the queue % is encrypted, and a message of topic % is not', p_queue, p_topic
        using errcode = 'PS409', hint = 'Encrypt the topic, which encrypts the queues of its subscribers: app.topic(name, encrypted=True).';
end
$$;
comment on function penstock.refuse_copy(text, text) is
    'Part of publish and publish_many: raises PS409 for a plain message to an encrypted queue.';
