-- Users of the HTTP API. The secret is hashed by the client; the database only ever sees the hash.

create or replace function penstock.add_user(
    p_name text, p_role text, p_secret_hash text, p_types text[] default null, p_replace boolean default false
)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
begin
    perform penstock.check_size(cardinality(p_types), 10000, 'job types');
    if p_name is null or p_name !~ '^[A-Za-z0-9_-]{1,64}$' then
        raise exception 'invalid user name: %', coalesce(quote_literal(left(p_name, 100)), 'null')
            using errcode = 'PS400', hint = 'A user name has 1 to 64 letters, digits, "-" or "_".';
    end if;
    if p_role is null or p_role not in ('read', 'enqueue', 'work', 'admin') then
        raise exception 'unknown role: %', coalesce(left(p_role, 100), 'null')
            using errcode = 'PS400', hint = 'A role is read, enqueue, work or admin.';
    end if;
    if cardinality(p_types) = 0 then
        raise exception 'no job types'
            using errcode = 'PS400', hint = 'Name at least one, or null for all.';
    end if;
    insert into penstock.users (name, role, types, secret_hash, created_at, updated_at)
    values (p_name, p_role, p_types, p_secret_hash, moment, moment)
    on conflict (name) do nothing;
    if found then
        return;
    end if;
    if not p_replace then
        raise exception 'user % exists', p_name
            using errcode = 'PS409', hint = 'Replace it, or remove it first.';
    end if;
    update penstock.users
    set role = p_role, types = p_types, secret_hash = p_secret_hash, updated_at = moment
    where name = p_name;
end
$$;
comment on function penstock.add_user(text, text, text, text[], boolean) is
    'Adds a user of the HTTP API, or with p_replace changes one. PS409 when it exists and is not to be replaced.';

create or replace function penstock.remove_user(p_name text)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    delete from penstock.users where name = p_name;
    if not found then
        raise exception 'no such user: %', left(p_name, 100)
            using errcode = 'PS404', hint = 'List them: penstock users list, or select * from penstock.list_users();';
    end if;
end
$$;
comment on function penstock.remove_user(text) is 'Removes a user; servers refuse it within seconds. PS404 when there is none.';

create or replace function penstock.list_users()
returns table (name text, role text, types text[], created_at timestamptz, updated_at timestamptz)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select name, role, types, created_at, updated_at from penstock.users order by name
$$;
comment on function penstock.list_users() is 'The users of the HTTP API, without their secrets.';

create or replace function penstock.has_users()
returns boolean
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select exists (select from penstock.users)
$$;
comment on function penstock.has_users() is 'Whether the HTTP API has users, which a server asks when it starts: without any, only this machine may reach it.';

create or replace function penstock.find_user(p_name text)
returns table (name text, role text, types text[], secret_hash text, mark bytea)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select name, role, types, secret_hash, sha256(convert_to(secret_hash, 'UTF8')) from penstock.users where name = p_name
$$;
comment on function penstock.find_user(text) is 'One user with the hash of its secret, for the server that checks it.';

create or replace function penstock.find_users(p_names text[])
returns table (name text, role text, types text[], mark bytea)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'users');
    return query
    select known.name, known.role, known.types, sha256(convert_to(known.secret_hash, 'UTF8'))
    from penstock.users as known
    where known.name = any (p_names);
end
$$;
comment on function penstock.find_users(text[]) is
    'Who these users are now, for a server that let them in before: mark changes when the secret does. Unknown names are left out.';
