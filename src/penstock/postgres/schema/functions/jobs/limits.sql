-- Limits: how many jobs of a type the concurrency and the rate limit admit now. They are exact because a type that has one is claimed
-- under an advisory lock until the claim commits: the jobs in flight are then the sum over its leases. That needs a fresh snapshot after
-- the lock, so read committed. places.sql says which worker gets the places.

create or replace function penstock.rate_room(p_name text, p_key text, p_limit integer, p_period interval, p_moment timestamptz)
returns integer
language plpgsql
as $$
declare
    room integer;
begin
    delete from penstock.rate_windows
    where name = p_name and key = p_key and ends_at <= p_moment - p_period;
    -- A window counts until its end has left the period: never more than the limit in any period, and at most
    -- a hundredth of a period late.
    select p_limit - coalesce(sum(started), 0) into room
    from penstock.rate_windows
    where name = p_name and key = p_key;
    return room;
end
$$;
comment on function penstock.rate_room(text, text, integer, interval, timestamptz) is
    'Part of claim and claim_keys: how many jobs the rate limit of a type (p_key empty), or of a key of a pool, admits now.';

create or replace function penstock.note_starts(p_name text, p_key text, p_jobs integer, p_period interval)
returns void
language plpgsql
as $$
begin
    insert into penstock.rate_windows (name, key, ends_at, started)
    -- By the clock behind the claim: the start that a lease shows is later than the moment at which its claim began.
    values (p_name, p_key, date_bin(p_period / 100, penstock.clock(), 'epoch') + p_period / 100, p_jobs)
    on conflict (name, key, ends_at) do update set started = rate_windows.started + excluded.started;
end
$$;
comment on function penstock.note_starts(text, text, integer, interval) is
    'Part of claim, claim_keys and claim_alone: counts the jobs that they started toward the rate limit of the type (p_key empty), or of a key of a pool. p_period: of the limit.';

create or replace function penstock.lock_limits(p_names text[])
returns void
language plpgsql
as $$
declare
    number integer;
begin
    -- In one order for all claims, so that there is no deadlock.
    for number in
        select distinct hashtext(jobs.name)
        from penstock.jobs
        where jobs.name = any (p_names)
            and (jobs.concurrency > 0 or jobs.rate_limit is not null)
            and jobs.paused_at is null
        order by 1
    loop
        perform pg_advisory_xact_lock(hashtext('penstock.claim'), number);
    end loop;
end
$$;
comment on function penstock.lock_limits(text[]) is
    'Part of claim, claim_keys and claim_alone: locks those of the types that have a limit until the claim commits. Count and read the clock after it.';

create or replace function penstock.admit(job_type penstock.jobs, p_limit integer, p_moment timestamptz)
returns integer
language plpgsql
as $$
declare
    room integer := p_limit;
begin
    if job_type.concurrency is not null or job_type.rate_limit is not null then
        if job_type.concurrency is not null then
            select least(room, job_type.concurrency - coalesce(sum(open_jobs), 0)) into room
            from penstock.leases
            where name = job_type.name;
        end if;
        if job_type.rate_limit is not null and room > 0 then
            room := least(room, penstock.rate_room(job_type.name, '', job_type.rate_limit, job_type.rate_period, p_moment));
        end if;
    end if;
    return room;
end
$$;
comment on function penstock.admit(penstock.jobs, integer, timestamptz) is
    'Part of claim, claim_keys, claim_alone and wait_for_places: how many jobs the concurrency and the rate limit of a type admit now, p_limit at most. A claim calls lock_limits before.';
