-- Enqueue: one job, or many. Both end in enqueue_many.
--
-- Idempotency. The id is the identity of a job. An id that is queued or in progress is a duplicate (the primary key
-- of queued_jobs says so), one that is archived is refused as archived. A settle moves a row from one table to the
-- other in one transaction; an enqueue of the same id that runs at that moment waits for it on the primary key, then
-- inserts, and only then looks into the archive, with a newer snapshot: so it cannot slip through between the two.
-- (With repeatable read and serializable there is no newer snapshot. There, the job whose row was moved is still seen beside the new one,
-- and the transaction has to be retried.) An id that waits for others, in
-- waiting_jobs, is a duplicate too, and is found in the same way: its release moves it to queued_jobs in one transaction. Of two open
-- transactions that enqueue one id, with `after` and without, the second one waits for the end of the first as well, since a job that is to
-- wait takes its id in the primary key of queued_jobs too (enqueue_dependents): what commits first is the job.
--
-- The archive has one index for each day. A job is archived after its id was made, so UUIDv7 ids need to be looked
-- up in the days since then only; that is exact because a UUIDv7 from more than a day ahead is refused.

create or replace function penstock.insert_jobs(
    p_name text, p_data jsonb[], p_ids uuid[], p_keys text[], p_priorities smallint[], p_run_after timestamptz[],
    p_expires_at timestamptz[], p_unique_keys text[], p_replay_of uuid, p_moment timestamptz, p_max_attempts smallint,
    p_slots integer[], p_options jsonb[], p_workflow uuid
)
returns void
language plpgsql
as $$
declare
    first_refused_id constant uuid := penstock.first_refused_id(p_moment);
begin
    if p_options is null then
        insert into penstock.queued_jobs
        select (
            penstock.new_job(
                job.id, p_name, job.data, p_moment, p_max_attempts, job.run_after, job.expires_at, job.key, coalesce(job.priority, 0::smallint),
                job.unique_key, job.slot, p_replay_of, null, null, p_workflow
            )
        ).*
        from unnest(p_data, p_ids, p_keys, p_priorities, p_run_after, p_expires_at, p_unique_keys, p_slots)
            as job (data, id, key, priority, run_after, expires_at, unique_key, slot)
        where case
            when penstock.is_odd_job(job.data, job.id, job.key, job.priority, job.unique_key, first_refused_id)
                then penstock.admit_job(p_name, job.data, job.id, job.key, job.priority, job.unique_key, first_refused_id)
            else true
        end;
    else
        -- The same with one column more, for which the jobs without options do not pay.
        insert into penstock.queued_jobs
        select (
            penstock.new_job(
                job.id, p_name, job.data, p_moment, p_max_attempts, job.run_after, job.expires_at, job.key, coalesce(job.priority, 0::smallint),
                job.unique_key, job.slot, p_replay_of, null, job.options, p_workflow
            )
        ).*
        from unnest(p_data, p_ids, p_keys, p_priorities, p_run_after, p_expires_at, p_unique_keys, p_slots, p_options)
            as job (data, id, key, priority, run_after, expires_at, unique_key, slot, options)
        where case
            when penstock.is_odd_job(job.data, job.id, job.key, job.priority, job.unique_key, first_refused_id)
                then penstock.admit_job(p_name, job.data, job.id, job.key, job.priority, job.unique_key, first_refused_id)
            else true
        end;
    end if;
end
$$;
comment on function penstock.insert_jobs(text, jsonb[], uuid[], text[], smallint[], timestamptz[], timestamptz[], text[], uuid, timestamptz, smallint, integer[], jsonb[], uuid) is
    'Part of enqueue_many: writes the rows. Raises unique_violation when one exists, and PS400 when one cannot be enqueued.';

-- Long for its checks, and since one block decides between the statement that expects no conflict and enqueue_one_by_one.
create or replace function penstock.enqueue_many(
    p_name text,
    p_data jsonb[],
    p_ids uuid[] default null,
    p_keys text[] default null,
    p_priorities smallint[] default null,
    p_run_after timestamptz[] default null,
    p_expires_at timestamptz[] default null,
    p_unique_keys text[] default null,
    p_replay_of uuid default null,
    p_options jsonb[] default null
)
returns table (ordinal integer, id uuid, outcome text)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment constant timestamptz := penstock.clock();
    job_type constant penstock.jobs := penstock.require_type(p_name);
    size constant integer := coalesce(cardinality(p_data), 0);
    ids uuid[] := p_ids;
    shapes text[];
    slots integer[];
    options jsonb[];
    unique_for interval[];
    key_max_waiting integer;
    groups text[];
    workflow uuid;
    traceparent constant text := penstock.current_traceparent();
begin
    if size > 100000 then
        raise exception '% jobs are too many for one call', size
            using errcode = 'PS413', hint = 'Enqueue at most 100,000 jobs at once.';
    end if;
    if size <> any (array[
        coalesce(cardinality(p_ids), size), coalesce(cardinality(p_keys), size), coalesce(cardinality(p_priorities), size),
        coalesce(cardinality(p_run_after), size), coalesce(cardinality(p_expires_at), size), coalesce(cardinality(p_unique_keys), size),
        coalesce(cardinality(p_options), size)
    ]) then
        raise exception 'the arrays differ in length'
            using errcode = 'PS400', hint = 'Give one element for each job, or null instead of the array.';
    end if;
    shapes := array[
        array_dims(p_data), array_dims(p_ids), array_dims(p_keys), array_dims(p_priorities), array_dims(p_run_after), array_dims(p_expires_at),
        array_dims(p_unique_keys), array_dims(p_options)
    ];
    -- Compared here, since the call would cost a single enqueue several microseconds.
    if '[1:' || size || ']' <> any (shapes) then
        perform penstock.check_lists(shapes);
    end if;
    if job_type.encrypted and not penstock.are_runs(p_name, p_data) then
        perform penstock.refuse_plain('job type ' || p_name, p_data);
    end if;
    if p_run_after is not null or p_expires_at is not null then
        perform penstock.check_times(p_run_after || p_expires_at);
    end if;
    if p_options is not null then
        if size > 1 and p_options[1] = all (p_options) then
            -- As a producer that traces its calls gives them.
            options := array_fill((penstock.options_of_jobs(job_type, p_options[1:1]))[1], array[size]);
        else
            options := penstock.options_of_jobs(job_type, p_options);
        end if;
        -- The period counts at the enqueue alone: a replay does not have it.
        if exists (select from unnest(options) as given where given ? 'unique_for') then
            unique_for := array(
                select make_interval(secs => (given.options ->> 'unique_for')::double precision)
                from unnest(options) with ordinality as given (options, place)
                order by given.place
            );
            if exists (
                select from unnest(unique_for) with ordinality as given (period, place)
                where given.period is not null and p_unique_keys[given.place] is null
            ) then
                raise exception 'unique_for without a unique key for a job of %', p_name
                    using errcode = 'PS400', hint = 'Give the job a unique key, which it holds for this period.';
            end if;
            options := array(
                select nullif(given.options - 'unique_for', '{}')
                from unnest(options) with ordinality as given (options, place)
                order by given.place
            );
        end if;
    end if;
    if size = 0 then
        return;
    end if;
    if options is not null and exists (select from unnest(options) as given where given ? 'group') then
        groups := array(select distinct given.options ->> 'group' from unnest(options) as given (options));
        if cardinality(groups) > 1 then
            return query select * from penstock.enqueue_by_group(
                p_name, p_data, p_ids, p_keys, p_priorities, p_run_after, p_expires_at, p_unique_keys, p_replay_of, p_options
            );
            return;
        end if;
        workflow := groups[1]::uuid;
        if not penstock.hold_group(workflow, p_ids) then
            return query
            select
                given.place::integer, given.id,
                case
                    when penstock.is_taken(given.id, p_name) then 'taken'
                    when archived.id is null then 'duplicate'
                    else 'archived'
                end
            from unnest(p_ids) with ordinality as given (id, place)
            left join (select distinct job.id from penstock.archived_jobs as job where job.id = any (p_ids)) as archived on archived.id = given.id
            order by given.place;
            return;
        end if;
        options := array(
            select nullif(given.options - 'group', '{}')
            from unnest(options) with ordinality as given (options, place)
            order by given.place
        );
        if num_nonnulls(variadic options) = 0 then
            options := null;
        end if;
    end if;
    if traceparent is not null then
        options := penstock.traced_options(options, traceparent, size);
    end if;
    if job_type.topic is not null then
        -- The queue of a subscriber can be dropped, but not while this transaction writes to it.
        perform from penstock.jobs where name = p_name for key share;
        perform penstock.require_type(p_name);
    end if;
    if ids is null then
        ids := array(select penstock.new_id() from generate_series(1, size));
    end if;
    slots := penstock.slots_for(p_name, p_keys, p_priorities);
    if slots is not null then
        select pools.key_max_waiting into key_max_waiting from penstock.pools where pools.name = p_name;
    end if;
    if job_type.max_waiting is not null or key_max_waiting is not null then
        perform penstock.check_room(p_name, job_type.max_waiting, key_max_waiting, ids, p_keys, slots, p_unique_keys);
    end if;
    if p_priorities is not null then
        insert into penstock.type_priorities (name, priority)
        select distinct p_name, coalesce(given.priority, 0::smallint)
        from unnest(p_priorities) as given (priority)
        where not exists (
            select from penstock.type_priorities where type_priorities.name = p_name and type_priorities.priority = coalesce(given.priority, 0::smallint)
        );
    end if;

    if p_ids is not null and current_setting('transaction_isolation') <> 'read committed' then
        perform penstock.meet_waiting(p_ids, moment);
    end if;
    -- The xid before the first number: see the head of the tables.
    perform pg_current_xact_id();
    if options is not null and exists (select from unnest(options) as given where given ? 'after') then
        perform penstock.check_jobs(p_name, p_data, p_ids, p_keys, p_priorities, p_unique_keys, moment);
        return query
        with enqueued as materialized (
            select * from penstock.enqueue_dependents(
                p_name, p_data, ids, p_keys, p_priorities, p_run_after, p_expires_at, p_unique_keys, p_replay_of, moment, job_type.max_attempts,
                slots, options, unique_for, workflow
            )
        ),
        noted as (
            insert into penstock.workflow_ticks (workflow, added)
            select workflow, count(*) from enqueued
            where enqueued.outcome in ('queued', 'waiting')
            having count(*) > 0 and workflow is not null
        )
        select * from enqueued;
        return;
    end if;
    begin
        if p_unique_keys is not null then
            -- Unique keys are given because they may conflict: take the way that expects conflicts.
            raise unique_violation;
        end if;
        perform penstock.insert_jobs(
            p_name, p_data, ids, p_keys, p_priorities, p_run_after, p_expires_at, null, p_replay_of, moment, job_type.max_attempts,
            slots, options, workflow
        );
        if p_ids is not null and cardinality(penstock.known_before(p_ids)) > 0 then
            raise unique_violation;
        end if;
        if workflow is not null then
            insert into penstock.workflow_ticks (workflow, added) values (workflow, size);
        end if;
        if p_ids is null then
            return query select given.place::integer, given.id, 'queued' from unnest(ids) with ordinality as given (id, place);
        end if;
    exception
        when unique_violation or sqlstate 'PS400' then
            perform penstock.check_jobs(p_name, p_data, p_ids, p_keys, p_priorities, p_unique_keys, moment);
            if workflow is null then
                return query select * from penstock.enqueue_one_by_one(
                    p_name, p_data, ids, p_keys, p_priorities, p_run_after, p_expires_at, p_unique_keys, p_replay_of, moment,
                    job_type.max_attempts, slots, options, unique_for, null
                );
            else
                return query
                with enqueued as materialized (
                    select * from penstock.enqueue_one_by_one(
                        p_name, p_data, ids, p_keys, p_priorities, p_run_after, p_expires_at, p_unique_keys, p_replay_of, moment,
                        job_type.max_attempts, slots, options, unique_for, workflow
                    )
                ),
                noted as (
                    insert into penstock.workflow_ticks (workflow, added)
                    select workflow, count(*) from enqueued where enqueued.outcome = 'queued' having count(*) > 0
                )
                select * from enqueued;
            end if;
    end;

    -- An idle worker looks for due jobs at least every five seconds by itself.
    if p_run_after is null or exists (select from unnest(p_run_after) as due where due is null or due < moment + interval '5 seconds') then
        perform penstock.wake_claimers(p_name, size, slots);
    end if;
end
$$;
comment on function penstock.enqueue_many(text, jsonb[], uuid[], text[], smallint[], timestamptz[], timestamptz[], text[], uuid, jsonb[]) is
    'Enqueues up to 100,000 jobs of one type, all or none. p_options: what single jobs have in place of the options of the type: max_attempts (a number) and time_limit (an interval, or a number of seconds), and unique_for, a span likewise: the job holds its unique key while it waits or runs, and for this time from now also when it has ended; traceparent, its trace context (W3C), in place of that of the transaction (set local penstock.traceparent); and after, an array of up to 100 ids of jobs: the job waits until they have succeeded, or with when "finished" until they have ended in any way, and is cancelled when one does not; and group, the id of a job group of which the job is a child. Outcomes: queued, waiting (for others), duplicate (the id is queued or waiting already), coalesced (id is that of the job that holds the unique key) archived (the id was finished before; nothing enqueued), or taken (the id is that of a job of another type, of which nothing else is said; nothing enqueued). With p_ids returns only the jobs whose outcome is not queued, without p_ids all, with their new ids.';

create or replace function penstock.enqueue(
    p_name text,
    p_data jsonb default '{}',
    p_id uuid default null,
    p_key text default null,
    p_priority integer default 0,
    p_run_after timestamptz default null,
    p_expires_at timestamptz default null,
    p_unique_key text default null,
    p_max_attempts integer default null,
    p_time_limit interval default null,
    p_unique_for interval default null,
    p_after uuid[] default null,
    p_when text default null,
    p_group uuid default null
)
returns uuid
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    job_id uuid := coalesce(p_id, penstock.new_id());
    enqueued record;
begin
    if p_priority is null or p_priority not between -100 and 100 then
        raise exception 'priority % is out of range', p_priority
            using errcode = 'PS400', hint = 'A priority is a number from -100 (first) to 100 (last).';
    end if;
    if cardinality(p_after) > 100 then
        perform penstock.check_size(cardinality(p_after), 100, 'jobs to wait for');
    end if;
    select * into enqueued from penstock.enqueue_many(
        p_name,
        array[p_data],
        array[job_id],
        case when p_key is not null then array[p_key] end,
        case when p_priority <> 0 then array[p_priority::smallint] end,
        case when p_run_after is not null then array[p_run_after] end,
        case when p_expires_at is not null then array[p_expires_at] end,
        case when p_unique_key is not null then array[p_unique_key] end,
        p_options => case
            when num_nonnulls(p_max_attempts, p_time_limit, p_unique_for, p_after, p_when, p_group) > 0 then array[jsonb_strip_nulls(jsonb_build_object(
                'max_attempts', p_max_attempts, 'time_limit', extract(epoch from p_time_limit), 'unique_for', extract(epoch from p_unique_for),
                'after', p_after, 'when', p_when, 'group', p_group
            ))]
        end
    );
    if enqueued.outcome = 'taken' then
        raise exception 'the id % belongs to another job', job_id
            using errcode = 'PS409', hint = 'Every job needs an id of its own. Leave the id out to get a new one.';
    end if;
    return coalesce(enqueued.id, job_id);
end
$$;
comment on function penstock.enqueue(text, jsonb, uuid, text, integer, timestamptz, timestamptz, text, integer, interval, interval, uuid[], text, uuid) is
    'Enqueues one job in the caller''s transaction and returns its id (of the job it coalesced with, if it did). The same id again is the same job; PS409 when it is that of a job of another type. p_max_attempts, p_time_limit: in place of those of its type. p_unique_for: how long from now p_unique_key is held, also when the job has ended. p_after: it waits until these jobs have succeeded, or with p_when ''finished'' have ended. p_group: the job group of which it is a child.';
