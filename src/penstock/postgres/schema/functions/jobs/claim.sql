-- Claim: give a batch of ready jobs to a worker.
--
-- A claim reads the ready queue of each type from a watermark on: the number below which no job can appear any more, as the
-- worker knows (see horizon and ceiling below). Without a watermark it starts at the beginning, which is correct and
-- only slower when many dead rows lie there. Rows that another claim holds are skipped, never waited for.

create or replace function penstock.jobs_that_fit(
    p_name text, p_priority smallint, p_watermark bigint, p_room integer, p_moment timestamptz, p_sealed boolean, p_keys text[]
)
returns integer
language plpgsql
as $$
declare
    most constant integer := 33554432;
    waiting record;
    bytes bigint := 0;
    jobs integer := 0;
begin
    -- The rows stay locked, so that the claim that follows takes the same ones.
    for waiting in
        select
            octet_length(case
                when ready.message is null then ready.data::text
                else (select message.data::text from penstock.topic_messages as message where message.number = ready.message)
            end) as size
        from penstock.queued_jobs as ready
        where ready.name = p_name
            and ready.priority = p_priority
            and ready.seq > p_watermark
            and ready.slot is null
            and ready.status = 'queued'
            and (ready.expires_at is null or ready.expires_at > p_moment)
            and (not p_sealed or penstock.has_key_for(ready.data, ready.message, p_keys))
        order by ready.seq
        limit p_room
        for update skip locked
    loop
        -- A payload above 4 MiB is not returned, so it does not count.
        bytes := bytes + case when waiting.size > 4194304 then 0 else coalesce(waiting.size, 0) end;
        exit when bytes > most and jobs > 0;
        jobs := jobs + 1;
    end loop;
    return jobs;
end
$$;
comment on function penstock.jobs_that_fit(text, smallint, bigint, integer, timestamptz, boolean, text[]) is
    'Part of claim, of types with large payloads: how many jobs from the front of a queue have 32 MiB together, and at least one if there is any. Locks them.';

-- Long, since it is the hottest call: what a claim of one priority does is one statement inside the two loops over types and their
-- priorities. A function of its own would add a call and a copy of the rows to each.
create or replace function penstock.claim(
    p_worker text,
    p_names text[],
    p_limit integer,
    p_watermarks jsonb default '{}',
    p_keys text[] default null,
    p_most integer[] default null,
    p_shared boolean default true
)
returns table (
    id uuid,
    name text,
    attempt smallint,
    max_attempts smallint,
    priority smallint,
    key text,
    data text,
    created_at timestamptz,
    run_after timestamptz,
    seq bigint,
    lease bigint,
    lease_s double precision,
    time_limit_s double precision,
    snoozes integer,
    traceparent text,
    horizon bigint,
    ceiling bigint
)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment timestamptz;
    names text[] := coalesce(p_names, '{}');
    -- Of each of the names the most jobs to claim; null: no such bound.
    most integer[] := p_most;
    types integer;
    turn integer := 0;
    others integer;
    part integer;
    of_type text;
    job_type penstock.jobs;
    priorities smallint[];
    of_priority smallint;
    -- Of each of these priorities the number of the first job that waits.
    first_seqs bigint[];
    first_seq bigint;
    -- Of the snapshot before the first look at a queue, so that a claim never reports more as decided than it has looked at.
    oldest_xid bigint;
    heavy boolean;
    -- False: the claim has as many bytes as it may have, or may have.
    bytes_left boolean := true;
    left_to_claim integer := p_limit;
    places integer;
    type_room integer;
    room integer;
    fitting integer;
    claimed integer;
    claimed_of_type integer;
    claimed_in_all integer := 0;
    new_lease bigint;
    limited boolean;
    expired boolean;
    -- Whether the type may have encrypted documents.
    sealed boolean;
    -- See shown_time, which would cost more here.
    latest constant timestamptz := penstock.shown_time('infinity');
    earliest constant timestamptz := penstock.shown_time('-infinity');
begin
    if cardinality(p_names) > 10000 then
        perform penstock.check_size(cardinality(p_names), 10000, 'job types');
    end if;
    perform penstock.check_worker(p_worker);
    if p_keys is not null then
        perform penstock.check_size(cardinality(p_keys), 1000, 'keys');
    end if;
    if p_most is not null then
        perform penstock.check_lists(array[array_dims(p_names), array_dims(p_most)]);
        if cardinality(p_most) <> cardinality(p_names) or 0 > any (p_most) then
            raise exception 'p_names and p_most differ in length (% and %), or a number is negative', cardinality(p_names), cardinality(p_most)
                using errcode = 'PS400', hint = 'Give a number that is not negative, or null, for each name.';
        end if;
    end if;
    if p_limit is null or p_limit not between 1 and 10000 then
        raise exception 'invalid limit: %', p_limit
            using errcode = 'PS400', hint = 'Claim between 1 and 10,000 jobs at once.';
    end if;
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'claim needs the isolation level read committed'
            using errcode = 'PS409', hint = 'Claim in a transaction of its own with the default isolation level.';
    end if;

    -- Both are rare, and one statement finds out.
    select
        exists (select from penstock.jobs where jobs.name = any (p_names) and (jobs.concurrency > 0 or jobs.rate_limit is not null)),
        exists (select from penstock.queued_jobs as ready where ready.expires_at <= penstock.clock() and ready.status = 'queued'),
        pg_snapshot_xmin(pg_current_snapshot())::text::bigint
    into limited, expired, oldest_xid;
    if limited then
        perform penstock.lock_limits(p_names);
    end if;
    moment := penstock.clock();
    if expired then
        perform penstock.expire(1000);
    end if;

    if cardinality(p_names) > 1 then
        -- Of many types (one for each subscriber) most have no job. To see that costs a fraction of what an attempt does, and those that
        -- have none have no part either.
        select coalesce(array_agg(with_jobs.name order by with_jobs.ordinal), '{}'), array_agg(with_jobs.most order by with_jobs.ordinal)
        into names, most
        from (
            select wanted.name, wanted.most, wanted.ordinal
            from unnest(p_names, p_most) with ordinality as wanted (name, most, ordinal)
            join penstock.jobs on jobs.name = wanted.name
            where (wanted.most is null or wanted.most > 0)
                and jobs.paused_at is null
                and jobs.concurrency is distinct from 0
                and (not jobs.encrypted or p_keys is not null)
                and exists (
                    select from penstock.type_priorities
                    cross join lateral (
                        select from penstock.queued_jobs as ready
                        where ready.name = type_priorities.name
                            and ready.priority = type_priorities.priority
                            and ready.seq > coalesce((p_watermarks -> type_priorities.name ->> type_priorities.priority::text)::bigint, 0)
                            and ready.slot is null
                            and ready.status = 'queued'
                        limit 1
                    ) as waiting
                    where type_priorities.name = wanted.name
                )
        ) as with_jobs;
    end if;
    types := cardinality(names);

    -- One type after the other: a join with the names would cost a claim of one type four times as much.
    while turn < cardinality(names) and left_to_claim > 0 and bytes_left loop
        turn := turn + 1;
        of_type := names[turn];
        -- An equal part for each type from here on; what some of them leave goes to those that come once more.
        part := left_to_claim;
        if p_shared then
            others := case when turn <= types then types else cardinality(names) end - turn;
            part := (left_to_claim + others) / (others + 1);
        end if;
        part := least(part, most[turn]);
        continue when part <= 0;
        select jobs.* into job_type
        from penstock.jobs
        where jobs.name = of_type
            and jobs.paused_at is null
            and jobs.concurrency is distinct from 0
            and (not jobs.encrypted or p_keys is not null);
        continue when not found;
        -- Those in which a job waits, and where: a claim that finds none stops here, and others start behind the jobs that are claimed.
        select array_agg(found.priority), array_agg(found.seq)
        into priorities, first_seqs
        from (
            select of_type_priorities.priority, waiting.seq
            from (select distinct type_priorities.priority from penstock.type_priorities where type_priorities.name = of_type) as of_type_priorities
            cross join lateral (
                select ready.seq
                from penstock.queued_jobs as ready
                where ready.name = of_type
                    and ready.priority = of_type_priorities.priority
                    and ready.seq > coalesce((p_watermarks -> of_type ->> of_type_priorities.priority::text)::bigint, 0)
                    and ready.slot is null
                    and ready.status = 'queued'
                order by ready.seq
                limit 1
            ) as waiting
            order by of_type_priorities.priority
        ) as found;
        continue when priorities is null;
        type_room := part;
        places := null;
        if job_type.concurrency is not null or job_type.rate_limit is not null then
            places := penstock.admit(job_type, 1000000, moment);
            type_room := least(part, penstock.fair_places(job_type.name, p_worker, places));
        end if;
        room := type_room;
        claimed_of_type := 0;
        sealed := job_type.encrypted_at is not null;

        heavy := exists (select from penstock.large_payloads where large_payloads.name in (of_type, job_type.topic));
        for position in 1 .. cardinality(priorities) loop
            exit when room <= 0;
            of_priority := priorities[position];
            first_seq := first_seqs[position];
            if heavy then
                fitting := penstock.jobs_that_fit(job_type.name, of_priority, first_seq - 1, room, moment, sealed, p_keys);
                bytes_left := bytes_left and fitting = room;
                room := fitting;
                continue when room = 0;
            end if;
            new_lease := nextval('penstock.lease_id');
            return query
            with claimed as (
                update penstock.queued_jobs as job
                set status = 'in-progress',
                    lease = new_lease,
                    updated_at = moment,
                    coalesces = false
                where job.ctid = any (array(
                    select ready.ctid
                    from penstock.queued_jobs as ready
                    where ready.name = job_type.name
                        and ready.priority = of_priority
                        and ready.seq >= first_seq
                        and ready.slot is null
                        and ready.status = 'queued'
                        and (ready.expires_at is null or ready.expires_at > moment)
                        and (not sealed or penstock.has_key_for(ready.data, ready.message, p_keys))
                    order by ready.seq
                    limit room
                    for update skip locked
                ))
                returning
                    job.id, job.attempt, job.max_attempts, job.key, job.created_at, job.run_after, job.seq, job.message,
                    job.options, job.snoozes, case when job.message is null then job.data::text end as text
            ),
            -- The start is read behind the update: the jobs may have been released since the beginning of the call.
            opened as (
                select penstock.open_lease(
                    new_lease, job_type.name, p_worker, of_priority, penstock.clock(), moment + job_type.visibility_timeout, min(claimed.seq), max(claimed.seq),
                    count(*), null, penstock.retention_class(job_type.keep_succeeded)
                ) as lease
                from claimed
            )
            select
                claimed.id, job_type.name, claimed.attempt, claimed.max_attempts, of_priority, claimed.key,
                case
                    when claimed.message is null then case when octet_length(claimed.text) <= 4194304 then claimed.text end
                    -- Not a join, which would cost every claim as much as the update does.
                    else (
                        select case when octet_length(shared.text) <= 4194304 then shared.text end
                        from (
                            select message.data::text as text
                            from penstock.topic_messages as message
                            where message.number = claimed.message
                            offset 0
                        ) as shared
                    )
                end,
                greatest(least(claimed.created_at, latest), earliest), greatest(least(claimed.run_after, latest), earliest),
                claimed.seq,
                -- Values that all jobs share are computed once, with the first job, so that no lease is opened without a job.
                (select opened.lease from opened),
                (select extract(epoch from job_type.visibility_timeout)::double precision),
                (claimed.options ->> 'time_limit')::double precision, coalesce(claimed.snoozes, 0),
                claimed.options ->> 'traceparent',
                oldest_xid,
                (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint)
            from claimed;
            get diagnostics claimed = row_count;
            room := room - claimed;
            claimed_of_type := claimed_of_type + claimed;
        end loop;

        claimed := claimed_of_type;
        if places > 0 then
            perform penstock.pass_on_places(job_type.name, p_worker, places, type_room, claimed, part);
        end if;
        if claimed > 0 then
            left_to_claim := left_to_claim - claimed;
            if turn <= types and claimed = part and left_to_claim > 0 then
                names[cardinality(names) + 1] := of_type;
                most[cardinality(names)] := most[turn] - claimed;
            end if;
            claimed_in_all := claimed_in_all + claimed;
            if job_type.rate_limit is not null then
                perform penstock.note_starts(job_type.name, '', claimed, job_type.rate_period);
            end if;
        end if;
    end loop;

    if claimed_in_all = 0 and exists (select from penstock.pools where pools.name = any (p_names))
        and not exists (select from unnest(p_names) as wanted (name) where wanted.name not in (select pools.name from penstock.pools))
    then
        raise exception '% is a pool', left((select min(wanted) from unnest(p_names) as wanted), 100)
            using errcode = 'PS409',
                  hint = 'Its jobs go to the owners of their keys: join with penstock.join_group, take slots, and claim with penstock.claim_keys.';
    end if;
    if claimed_in_all > 0 then
        delete from penstock.listeners where channel = 'penstock_' || p_worker and kind = 'jobs';
    end if;
end
$$;
comment on function penstock.claim(text, text[], integer, jsonb, text[], integer[], boolean) is
    'Claims up to p_limit ready jobs of the given types, within a type by priority and age (the rows of one lease come in any order; seq is their age). The jobs belong to the worker for the visibility timeout (lease_s seconds). time_limit_s is the time limit of a job that has its own. data is null when the payload has more than 4 MiB of text, which no enqueue admits: settle the job as quarantined. Of types with large payloads a claim takes no more than about 32 MiB. p_watermarks ({"type": {"priority": seq}}) lets the search start behind the jobs that are known to be done: a seq seen in one claim with its ceiling is such a watermark once a later claim reports a horizon >= that ceiling. p_keys: ids of the keys of encrypted payloads that the worker has; null: it has none, and gets no job of an encrypted type. A job that is encrypted with another key is left to other workers. p_shared: those of the types that have ready jobs get equal parts of p_limit, and what one leaves goes to the others; with more types than jobs to claim, the first ones get one each, so give the names in another order next time. False: the first type takes all that it has, then the next one. p_most: for each name the most of its jobs, or null.';
