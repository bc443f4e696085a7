-- Failures that are known. tables/0015_dashboard.sql says how a row lives.

create or replace function penstock.mute_failures(p_name text, p_signature text, p_user text)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    most constant integer := 10000;
begin
    if p_name is null or p_user is null or p_signature is null or p_signature !~ '^[0-9a-f]{1,64}$' then
        raise exception 'no failures: % of %', coalesce(left(p_signature, 100), 'null'), coalesce(left(p_name, 100), 'null')
            using errcode = 'PS400', hint = 'Failures have a job type, and a signature of hexadecimal digits.';
    end if;
    if (select count(*) from penstock.muted_failures) >= most then
        raise exception 'too many failures are muted: %', most
            using errcode = 'PS409', hint = 'Take back mutes of failures that happen no more.';
    end if;
    insert into penstock.muted_failures (name, signature, muted_at, muted_by)
    values (left(p_name, 255), p_signature, penstock.clock(), left(p_user, 200))
    on conflict do nothing;
    return found;
end
$$;
comment on function penstock.mute_failures(text, text, text) is
    'Mutes the failures of a job type with this signature: the overview counts them no longer among what is wrong. Returns whether they were not muted. PS409 when 10,000 are.';

create or replace function penstock.unmute_failures(p_name text, p_signature text)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    delete from penstock.muted_failures where name = p_name and signature = p_signature;
    return found;
end
$$;
comment on function penstock.unmute_failures(text, text) is 'Takes a mute back. Returns whether there was one.';
