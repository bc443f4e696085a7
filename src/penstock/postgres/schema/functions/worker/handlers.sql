-- What workers say of their handlers. See tables/0003_workers.sql.

create or replace function penstock.note_handlers(p_handlers jsonb)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    if jsonb_typeof(p_handlers) is distinct from 'array' then
        raise exception 'that is no list of handlers: %', coalesce(left(p_handlers::text, 100), 'null')
            using errcode = 'PS400', hint = 'Give an array of objects with kind and name.';
    end if;
    perform penstock.check_size(jsonb_array_length(p_handlers), 10000, 'handlers');
    if exists (select from jsonb_array_elements(p_handlers) as given where num_nulls(given ->> 'kind', given ->> 'name') > 0) then
        raise exception 'a handler has no kind or no name'
            using errcode = 'PS400', hint = 'Give an array of objects with kind and name.';
    end if;
    insert into penstock.handlers as known (kind, name, schema, docs_url, owner, noted_at)
    select
        given ->> 'kind',
        left(given ->> 'name', 500),
        case when pg_column_size(given -> 'schema') <= 65536 then nullif(given -> 'schema', 'null') end,
        case when given ->> 'docs_url' ~ '^https?://' then left(given ->> 'docs_url', 2000) end,
        left(given ->> 'owner', 200),
        penstock.clock()
    from jsonb_array_elements(p_handlers) as given
    -- In one order, so that workers that start at the same time wait for each other and do not deadlock.
    order by given ->> 'kind', given ->> 'name'
    on conflict (kind, name) do update
    set schema = excluded.schema, docs_url = excluded.docs_url, owner = excluded.owner, noted_at = excluded.noted_at;
end
$$;
comment on function penstock.note_handlers(jsonb) is
    'Says which handlers a worker has that begins to work: objects with kind, name, schema, docs_url and owner. A schema of more than 64 KB is left out.';

create or replace function penstock.handler_list()
returns setof penstock.handlers
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select * from penstock.handlers order by name, kind
$$;
comment on function penstock.handler_list() is 'What workers say of their handlers, by name.';
