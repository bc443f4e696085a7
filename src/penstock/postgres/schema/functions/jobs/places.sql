-- The places of limits: which worker gets the next one. The head of tables/0002_jobs.sql explains it.

create or replace function penstock.fair_places(p_name text, p_worker text, p_places integer)
returns integer
language plpgsql
as $$
declare
    moment constant timestamptz := clock_timestamp();
    mine bigint;
    ahead integer;
begin
    if p_places <= 0 or not exists (select from penstock.place_waiters where name = p_name and worker <> p_worker) then
        return p_places;
    end if;
    delete from penstock.place_waiters
    where name = p_name
        and worker <> p_worker
        and (offered_at < moment - interval '1 second' or since < moment - interval '30 seconds');
    select ticket into mine from penstock.place_waiters where name = p_name and worker = p_worker;
    select count(*) into ahead
    from penstock.place_waiters
    where name = p_name and worker <> p_worker and (mine is null or ticket < mine);
    -- Each worker ahead keeps an even share, at least one place.
    return greatest(0, p_places - ahead * greatest(1, p_places / (ahead + 1)));
end
$$;
comment on function penstock.fair_places(text, text, integer) is
    'Part of claim and claim_keys, under the lock of the type, and of wait_for_places: how many of its free places a worker may take, since others wait longer.';

create or replace function penstock.pass_on_places(
    p_name text, p_worker text, p_places integer, p_granted integer, p_claimed integer, p_wanted integer
)
returns void
language plpgsql
as $$
declare
    moment constant timestamptz := clock_timestamp();
    others boolean;
begin
    if not exists (select from penstock.place_waiters where name = p_name) then
        return;
    end if;
    others := exists (select from penstock.place_waiters where name = p_name and worker <> p_worker);
    if p_claimed >= p_wanted or p_claimed < p_granted then
        delete from penstock.place_waiters where name = p_name and worker = p_worker;
    elsif others then
        update penstock.place_waiters
        set ticket = case when p_claimed > 0 then nextval('penstock.place_ticket') else ticket end,
            since = moment,
            offered_at = null
        where name = p_name and worker = p_worker;
    end if;
    if others and p_places > p_claimed then
        perform penstock.tell(offered.channel, 'place', p_name)
        from penstock.offer_places(p_name, p_worker, p_places - p_claimed) as offered (channel);
    end if;
end
$$;
comment on function penstock.pass_on_places(text, text, integer, integer, integer, integer) is
    'Part of claim and claim_keys, under the lock of the type: of p_places free ones the worker was granted p_granted and took p_claimed, wanting p_wanted; puts it at its new position among those that wait, and offers what is left to the others.';

create or replace function penstock.offer_places(p_name text, p_worker text, p_places integer)
returns setof text
language sql
as $$
    update penstock.place_waiters
    set offered_at = clock_timestamp()
    where name = p_name
        and worker in (
            select waiting.worker
            from penstock.place_waiters as waiting
            where waiting.name = p_name and waiting.worker <> p_worker and waiting.offered_at is null
            order by waiting.ticket
            limit p_places
        )
    returning channel
$$;
comment on function penstock.offer_places(text, text, integer) is
    'Part of pass_on_places: keeps a place for each of the first who wait. Returns the channels on which they listen.';

create or replace function penstock.announce_places(p_leases bigint[], p_jobs integer[])
returns void
language plpgsql
as $$
begin
    perform penstock.tell(waiter.channel, 'place', freed.name)
    from (
        select leases.name, array_agg(distinct leases.worker) as holders, sum(settled.jobs) as places
        from unnest(p_leases, p_jobs) as settled (lease, jobs)
        join penstock.leases on leases.id = settled.lease
        group by leases.name
    ) as freed
    cross join lateral (
        select first.worker, first.channel
        from penstock.place_waiters as first
        where first.name = freed.name and first.since > clock_timestamp() - interval '30 seconds'
        order by first.ticket
        limit least(freed.places, 8)
    ) as waiter
    -- The worker that held the jobs needs no notification that they are settled.
    where waiter.worker <> all (freed.holders);
end
$$;
comment on function penstock.announce_places(bigint[], integer[]) is 'Part of close_leases: notifies the workers that wait longest for the places that it frees.';

create or replace function penstock.next_place(job_type penstock.jobs, p_ahead integer, p_moment timestamptz)
returns double precision
language sql
stable
as $$
    -- The time at which so many starts have left the period that a place is free after those of the workers ahead.
    select extract(epoch from min(window_end) + job_type.rate_period - p_moment)::double precision
    from (
        select
            started.ends_at as window_end,
            sum(started.started) over (order by started.ends_at) as gone,
            sum(started.started) over () as counted
        from penstock.rate_windows as started
        where started.name = job_type.name and started.key = '' and started.ends_at > p_moment - job_type.rate_period
    ) as places
    where places.counted >= job_type.rate_limit
        and places.gone >= least(places.counted, places.counted - job_type.rate_limit + 1 + p_ahead)
$$;
comment on function penstock.next_place(penstock.jobs, integer, timestamptz) is
    'Part of wait_for_places and why: seconds until the rate limit of a type admits one job more than p_ahead; null: it admits one now.';

create or replace function penstock.has_ready(p_name text, p_worker text, p_watermarks jsonb, p_moment timestamptz)
returns boolean
language plpgsql
stable
as $$
begin
    if exists (select from penstock.pools where name = p_name) then
        return exists (
            select
            from penstock.slots
            cross join lateral (
                select from penstock.queued_jobs as ready
                where ready.name = p_name
                    and ready.slot = slots.slot
                    and ready.seq is not null
                    and ready.status = 'queued'
                    and ready.run_after <= p_moment
                limit 1
            ) as waiting
            where slots.group_name = p_name and slots.owner = p_worker
        );
    end if;
    return exists (
        select
        from penstock.type_priorities
        cross join lateral (
            select from penstock.queued_jobs as ready
            where ready.name = p_name
                and ready.priority = type_priorities.priority
                and ready.seq > coalesce((p_watermarks -> p_name ->> type_priorities.priority::text)::bigint, 0)
                and ready.slot is null
                and ready.status = 'queued'
            limit 1
        ) as waiting
        where type_priorities.name = p_name
    );
end
$$;
comment on function penstock.has_ready(text, text, jsonb, timestamptz) is
    'Part of wait_for_places: whether a job of the type is ready; of a pool, in a slot of this member.';

create or replace function penstock.wait_for_places(
    p_worker text, p_names text[], p_watermarks jsonb default '{}', p_channel text default null
)
returns table (name text, is_new boolean, due_in_s double precision)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment constant timestamptz := clock_timestamp();
    job_type penstock.jobs;
    ahead integer;
    mine penstock.place_waiters;
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'job types');
    perform penstock.check_worker(p_worker);
    perform penstock.check_worker(coalesce(p_channel, p_worker));
    for job_type in
        select jobs.*
        from penstock.jobs
        where jobs.name = any (p_names)
            and (jobs.concurrency > 0 or jobs.rate_limit is not null)
            and jobs.concurrency is distinct from 0
            and jobs.paused_at is null
    loop
        select * into mine from penstock.place_waiters as held where held.name = job_type.name and held.worker = p_worker;
        select count(*) into ahead
        from penstock.place_waiters as other
        where other.name = job_type.name
            and other.worker <> p_worker
            and (mine.ticket is null or other.ticket < mine.ticket)
            and other.since > moment - interval '30 seconds';
        due_in_s := case when job_type.rate_limit is not null then penstock.next_place(job_type, ahead, penstock.clock()) end;
        -- By the rules of admit and fair_places: no place, or only those of the workers ahead.
        if (due_in_s is not null or coalesce(
                (select sum(open_jobs) from penstock.leases where leases.name = job_type.name) >= job_type.concurrency - ahead, false
            ))
            and penstock.has_ready(job_type.name, p_worker, p_watermarks, penstock.clock())
        then
            is_new := mine.ticket is null;
            if is_new then
                insert into penstock.place_waiters (name, worker, channel, ticket, since)
                values (job_type.name, p_worker, coalesce(p_channel, p_worker), nextval('penstock.place_ticket'), moment)
                on conflict do nothing;
            elsif mine.since < moment - interval '5 seconds' then
                -- A claim that writes the row at this moment holds locks of types: do not wait for it.
                update penstock.place_waiters
                set since = moment
                where place_waiters.ctid = any (array(
                    select held.ctid
                    from penstock.place_waiters as held
                    where held.name = job_type.name and held.worker = p_worker
                    for update skip locked
                ));
            end if;
            name := job_type.name;
            return next;
        end if;
    end loop;
end
$$;
comment on function penstock.wait_for_places(text, text[], jsonb, text) is
    'Says that a worker, which listens on the channel penstock_<p_channel> (null: penstock_<p_worker>), wants places of those of the types that are at their limit while jobs are ready. Returns these: is_new: it did not wait before, so claim once more; due_in_s: when a rate limit admits its next job. It is notified with "place <type>" when one is free; an offer is void after a second.';
