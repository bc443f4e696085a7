-- Topics: declare and find. The head of tables/0007_topics.sql explains them.

create or replace function penstock.check_topic(p_name text)
returns void
language plpgsql
immutable
as $$
begin
    if p_name is null or p_name !~ '^(?![.]{1,2}$)[^[:space:]/[:cntrl:]]{1,150}$' then
        raise exception 'invalid topic: %', coalesce(quote_literal(left(p_name, 100)), 'null')
            using errcode = 'PS400',
                  hint = 'A topic has 1 to 150 characters, none of them white space, "/" or a control character, and is not "." or "..".';
    end if;
end
$$;
comment on function penstock.check_topic(text) is 'Raises PS400 unless the text can name a topic.';

create or replace function penstock.refuse_topic(p_name text)
returns void
language plpgsql
immutable
as $$
begin
    perform penstock.check_topic(p_name);
    raise exception 'no such topic: %', p_name
        using errcode = 'PS404', hint = format('Create it first: select penstock.declare_topic(%L);', p_name);
end
$$;
comment on function penstock.refuse_topic(text) is 'Raises PS404 for a topic that was not found, or PS400 when the text cannot name one.';

create or replace function penstock.require_topic(p_name text)
returns penstock.topics
language plpgsql
stable
as $$
declare
    topic penstock.topics;
begin
    select * into topic from penstock.topics where name = p_name;
    if not found then
        perform penstock.refuse_topic(p_name);
    end if;
    return topic;
end
$$;
comment on function penstock.require_topic(text) is 'The topic of that name, or PS404.';

create or replace function penstock.lock_topic(p_name text)
returns penstock.topics
language plpgsql
as $$
declare
    topic penstock.topics;
begin
    select * into topic from penstock.topics where name = p_name for no key update;
    if not found then
        perform penstock.refuse_topic(p_name);
    end if;
    return topic;
end
$$;
comment on function penstock.lock_topic(text) is 'The topic of that name, held until the transaction ends; or PS404.';

create or replace function penstock.check_topic_options(p_name text, p_options jsonb)
returns void
language plpgsql
immutable
as $$
begin
    perform penstock.check_options(p_options, array['catch_up', 'encrypted'], '{"catch_up": 10}');
    perform penstock.check_encrypted_option('topic ' || p_name, p_options);
    if p_options ? 'catch_up' and (
        jsonb_typeof(p_options -> 'catch_up') <> 'number'
        or (p_options -> 'catch_up')::numeric not between 0 and 100000
        or (p_options -> 'catch_up')::numeric % 1 <> 0
    ) then
        raise exception 'catch_up must be a whole number from 0 to 100,000, not %', left(p_options ->> 'catch_up', 100)
            using errcode = 'PS400', hint = 'It is the number of messages that a new subscriber gets.';
    end if;
end
$$;
comment on function penstock.check_topic_options(text, jsonb) is 'Part of declare_topic and change_topic: raises PS400 for an option that a topic cannot have.';

create or replace function penstock.change_topic(p_name text, p_options jsonb)
returns penstock.topics
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_topic_options(coalesce(p_name, 'null'), p_options);
    perform penstock.lock_topic(p_name);
    if p_options ? 'catch_up' then
        update penstock.topics set catch_up = (p_options ->> 'catch_up')::integer where topics.name = p_name;
    end if;
    if p_options ? 'encrypted' then
        perform penstock.encrypt_topic(p_name, (p_options -> 'encrypted')::boolean);
    end if;
    return penstock.require_topic(p_name);
end
$$;
comment on function penstock.change_topic(text, jsonb) is
    'Changes the given options of a topic, catch_up or encrypted, also to turn encryption off, with that of the queues of its subscribers. PS404 when there is none.';

create or replace function penstock.declare_topic(p_name text, p_options jsonb default '{}')
returns penstock.topics
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    topic penstock.topics;
begin
    perform penstock.check_topic(p_name);
    perform penstock.check_topic_options(p_name, p_options);
    select * into topic from penstock.topics where name = p_name;
    if found and (p_options = '{}' or topic.declaration is not distinct from p_options) then
        return topic;
    end if;
    insert into penstock.topics (name, catch_up, declaration, created_at)
    values (p_name, coalesce((p_options ->> 'catch_up')::integer, 0), p_options, penstock.clock())
    on conflict (name) do update
    set catch_up = coalesce((p_options ->> 'catch_up')::integer, topics.catch_up),
        declaration = p_options
    where topics.declaration is distinct from p_options;
    if p_options ? 'encrypted' then
        perform penstock.encrypt_topic(p_name, (p_options -> 'encrypted')::boolean);
    end if;
    select * into topic from penstock.topics where name = p_name;
    return topic;
end
$$;
comment on function penstock.declare_topic(text, jsonb) is
    'Creates a topic, or changes it when the declaration differs from the last one; one without options only creates. Options: catch_up, how many of the last messages a new subscriber gets (default 0); encrypted, whether messages are stored encrypted, which only an explicit false of an administrator turns off again (PS409 for others).';

create or replace function penstock.encrypt_topic(p_name text, p_encrypted boolean)
returns void
language plpgsql
as $$
declare
    topic constant penstock.topics := penstock.lock_topic(p_name);
    unfit text;
begin
    if topic.encrypted = p_encrypted then
        return;
    end if;
    if not p_encrypted and not penstock.may_administer() then
        raise exception 'topic % is encrypted, and only an administrator turns that off', p_name
            using errcode = 'PS409', hint = 'A role with the access admin, or the owner of the schema: select penstock.change_topic(''...'', ''{"encrypted": false}'');';
    end if;
    if p_encrypted then
        select there.client_id into unfit
        from penstock.subscriptions as there
        where there.topic = p_name and (there.filter is not null or there.key is not null)
        limit 1;
        perform penstock.refuse_unfit_subscriber(p_name, unfit);
        perform penstock.encrypt_queues(array(select jobs.name from penstock.jobs where jobs.topic = p_name));
    else
        update penstock.jobs set encrypted = false where jobs.topic = p_name and jobs.encrypted;
    end if;
    update penstock.topics
    set encrypted = p_encrypted,
        encrypted_at = coalesce(topics.encrypted_at, penstock.clock())
    where topics.name = p_name;
    perform penstock.check_queues(p_name);
end
$$;
comment on function penstock.encrypt_topic(text, boolean) is
    'Part of declare_topic and change_topic: turns encryption on or off, for the topic and the queues of its subscribers. PS409 for who may not turn it off.';

create or replace function penstock.refuse_unfit_subscriber(p_topic text, p_client_id text)
returns void
language plpgsql
immutable
as $$
begin
    if p_client_id is not null then
        raise exception 'topic % is encrypted, and client % has a filter or a queue that it shares with others', p_topic, left(p_client_id, 100)
            using errcode = 'PS409',
                  hint = 'The database can read no message: subscribe without a filter, with a queue of its own. Gearman''s subscribers share one.';
    end if;
end
$$;
comment on function penstock.refuse_unfit_subscriber(text, text) is
    'Raises PS409 for a client (null: none) that an encrypted topic cannot have as a subscriber.';

create or replace function penstock.encrypt_queues(p_queues text[])
returns void
language plpgsql
as $$
begin
    update penstock.jobs
    set encrypted = true,
        encrypted_at = coalesce(jobs.encrypted_at, penstock.clock())
    where jobs.name = any (p_queues) and not jobs.encrypted;
    perform penstock.guard_staged_jobs();
end
$$;
comment on function penstock.encrypt_queues(text[]) is 'Part of subscribe_many and declare_topic: the job types of subscribers of an encrypted topic are encrypted.';
