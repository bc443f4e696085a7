-- Sessions of the dashboard, and the links that make one. tables/0015_dashboard.sql says how they live.

create or replace function penstock.open_session(
    p_id bytea, p_user text, p_role text, p_types text[], p_proof bytea, p_lasts interval, p_single_use boolean default false
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
    if p_id is null or octet_length(p_id) <> 32 then
        raise exception 'invalid id of a session' using errcode = 'PS400', hint = 'It is the SHA-256 of the token.';
    end if;
    if p_user is null or p_role is null or p_role not in ('read', 'enqueue', 'work', 'admin') then
        raise exception 'a session has a user and a role' using errcode = 'PS400', hint = 'A role is read, enqueue, work or admin.';
    end if;
    if p_proof is null and p_single_use is not true and exists (select from penstock.users where users.name = p_user) then
        raise exception 'a session of user % needs a proof', left(p_user, 100)
            using errcode = 'PS400', hint = 'Only the session of a user that Penstock does not know has none.';
    end if;
    if p_lasts is null or p_lasts <= interval '0' or p_lasts > interval '31 days' then
        raise exception 'a session cannot last %', coalesce(p_lasts::text, 'null')
            using errcode = 'PS400', hint = 'It lasts 31 days at most.';
    end if;
    delete from penstock.sessions where expires_at <= moment;
    insert into penstock.sessions (id, user_name, role, types, proof, single_use, created_at, expires_at)
    values (p_id, p_user, p_role, p_types, p_proof, coalesce(p_single_use, false), moment, moment + p_lasts);
end
$$;
comment on function penstock.open_session(bytea, text, text, text[], bytea, interval, boolean) is
    'Logs a user in to the dashboard for a time (p_lasts). p_proof: required for the users of penstock.users, and compared by the server with their secret. p_single_use: a link, which use_link uses up.';

create or replace function penstock.find_session(p_id bytea)
returns table (user_name text, role text, types text[], proof bytea, expires_at timestamptz)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select session.user_name, session.role, session.types, session.proof, session.expires_at
    from penstock.sessions as session
    where session.id = p_id and not session.single_use and session.expires_at > penstock.clock()
$$;
comment on function penstock.find_session(bytea) is 'The session with this id, unless it has ended.';

create or replace function penstock.use_link(p_id bytea)
returns table (user_name text, role text, types text[], expires_at timestamptz)
language sql
security definer
set search_path = penstock, pg_temp
as $$
    delete from penstock.sessions as link
    where link.id = p_id and link.single_use and link.expires_at > penstock.clock()
    returning link.user_name, link.role, link.types, link.expires_at
$$;
comment on function penstock.use_link(bytea) is 'Uses up the link with this id, and returns for whom it was; no row: it was used, or has ended.';

create or replace function penstock.close_session(p_id bytea)
returns boolean
language sql
security definer
set search_path = penstock, pg_temp
as $$
    with closed as (delete from penstock.sessions as session where session.id = p_id returning 1)
    select exists (select from closed)
$$;
comment on function penstock.close_session(bytea) is 'Logs out. Returns whether there was such a session.';
