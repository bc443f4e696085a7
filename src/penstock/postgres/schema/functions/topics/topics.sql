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
    perform penstock.check_options(p_options, array['keep'], '{"keep": 10}');
    if p_options ? 'keep' and (
        jsonb_typeof(p_options -> 'keep') <> 'number'
        or (p_options -> 'keep')::numeric not between 0 and 100000
        or (p_options -> 'keep')::numeric % 1 <> 0
    ) then
        raise exception 'keep must be a whole number from 0 to 100,000, not %', left(p_options ->> 'keep', 100)
            using errcode = 'PS400', hint = 'It is the number of messages that a new subscriber gets.';
    end if;
    select * into topic from penstock.topics where name = p_name;
    if found and (p_options = '{}' or topic.declaration is not distinct from p_options) then
        return topic;
    end if;
    insert into penstock.topics (name, keep, declaration, created_at)
    values (p_name, coalesce((p_options ->> 'keep')::integer, 0), p_options, penstock.clock())
    on conflict (name) do update
    set keep = coalesce((p_options ->> 'keep')::integer, topics.keep),
        declaration = p_options
    where topics.declaration is distinct from p_options;
    select * into topic from penstock.topics where name = p_name;
    return topic;
end
$$;
comment on function penstock.declare_topic(text, jsonb) is
    'Creates a topic, or changes it when the declaration differs from the last one; one without options only creates. Option: keep, how many of the last messages a new subscriber gets (default 0).';
