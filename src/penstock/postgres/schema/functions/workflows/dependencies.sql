-- Jobs that are enqueued to run after others. The head of tables/0013_workflows.sql has the life of a waiting job.

create or replace function penstock.add_dependencies(p_ids uuid[])
returns void
language plpgsql
as $$
declare
    known uuid[];
    held uuid[];
begin
    known := array(
        select distinct after.id::uuid
        from penstock.waiting_jobs as job
        cross join lateral jsonb_array_elements_text(job.options -> 'after') as after (id)
        where job.id = any (p_ids)
    );
    -- What is locked here cannot end, and cannot be released, before this transaction has ended. A job that runs is not locked: its
    -- settlement would wait.
    held := array(
            select job_group.id from penstock.job_groups as job_group
            where job_group.id = any (known) and job_group.finished_at is null
            for key share skip locked
        )
        || array(select job.id from penstock.waiting_jobs as job where job.id = any (known) for update skip locked)
        || array(select job.id from penstock.queued_jobs as job where job.id = any (known) and job.status = 'queued' for update skip locked);
    update penstock.queued_jobs as job set awaited = true where job.id = any (held) and job.awaited is null;
    insert into penstock.job_dependencies (job, after, at_any_end, linked)
    select
        job.id, after.id::uuid, job.options ? 'when',
        -- Usually all of them, so that none is looked for in a long list.
        cardinality(held) = cardinality(known) or after.id::uuid = any (held)
    from penstock.waiting_jobs as job
    cross join lateral jsonb_array_elements_text(job.options -> 'after') as after (id)
    where job.id = any (p_ids);
    if cardinality(held) < cardinality(known) then
        perform penstock.tell_all('workflows', '');
    end if;
end
$$;
comment on function penstock.add_dependencies(uuid[]) is
    'Part of enqueue_many: writes for which jobs these new waiting jobs wait, and marks those that it can lock.';

create or replace function penstock.enqueue_places(
    p_places integer[], p_name text, p_data jsonb[], p_ids uuid[], p_keys text[], p_priorities smallint[], p_run_after timestamptz[],
    p_expires_at timestamptz[], p_unique_keys text[], p_replay_of uuid, p_moment timestamptz, p_max_attempts smallint,
    p_slots integer[], p_options jsonb[], p_unique_for interval[], p_workflow uuid
)
returns table (ordinal integer, id uuid, outcome text)
language sql
as $$
    select p_places[queued.ordinal], queued.id, queued.outcome
    from penstock.enqueue_one_by_one(
        p_name, array(select p_data[place] from unnest(p_places) as place), array(select p_ids[place] from unnest(p_places) as place),
        array(select p_keys[place] from unnest(p_places) as place), array(select p_priorities[place] from unnest(p_places) as place),
        array(select p_run_after[place] from unnest(p_places) as place), array(select p_expires_at[place] from unnest(p_places) as place),
        array(select p_unique_keys[place] from unnest(p_places) as place), p_replay_of, p_moment, p_max_attempts,
        array(select p_slots[place] from unnest(p_places) as place), array(select p_options[place] from unnest(p_places) as place),
        array(select p_unique_for[place] from unnest(p_places) as place), p_workflow
    ) as queued
$$;
comment on function penstock.enqueue_places(integer[], text, jsonb[], uuid[], text[], smallint[], timestamptz[], timestamptz[], text[], uuid, timestamptz, smallint, integer[], jsonb[], interval[], uuid) is
    'Part of enqueue_dependents: enqueue_one_by_one for the jobs at these places of a call.';

create or replace function penstock.meet_waiting(p_ids uuid[], p_moment timestamptz)
returns void
language plpgsql
as $$
declare
    taken uuid[];
begin
    with reserved as (
        insert into penstock.waiting_jobs as job (run_after, created_at, updated_at, id, attempt, max_attempts, name, data)
        select p_moment, p_moment, p_moment, given.id, 1, 1, '', 'null'
        from unnest(p_ids) as given (id)
        on conflict do nothing
        returning job.id
    )
    select array_agg(reserved.id) into taken from reserved;
    delete from penstock.waiting_jobs as job where job.id = any (taken);
end
$$;
comment on function penstock.meet_waiting(uuid[], timestamptz) is
    'Part of enqueue_many under repeatable read and serializable, whose snapshot does not show a job that another transaction has enqueued with `after` since: its row in the primary key of waiting_jobs raises serialization_failure, so that the caller repeats its transaction. Waits for open transactions that have enqueued one of these ids so.';

-- Long, since the outcome of a job follows from its id, its unique key and the archive in this order, as in enqueue_one_by_one.
create or replace function penstock.enqueue_dependents(
    p_name text, p_data jsonb[], p_ids uuid[], p_keys text[], p_priorities smallint[], p_run_after timestamptz[],
    p_expires_at timestamptz[], p_unique_keys text[], p_replay_of uuid, p_moment timestamptz, p_max_attempts smallint,
    p_slots integer[], p_options jsonb[], p_unique_for interval[], p_workflow uuid
)
returns table (ordinal integer, id uuid, outcome text)
language plpgsql
as $$
#variable_conflict use_column
declare
    plain integer[];
    shadowed integer[];
    open integer[] := array(
        select given.place from unnest(p_options) with ordinality as given (options, place)
        where given.options ? 'after'
        order by given.place
    );
    made uuid[];
    taken uuid[];
    all_made boolean;
    new uuid[] := '{}';
    tries integer := 0;
    outcomes record;
    merged jsonb := '{}';
begin
    -- An id that stands in the call more than once is one job, that of its first place: those after one that waits come behind it.
    select
        coalesce(array_agg(given.place order by given.place) filter (where not given.waits_first), '{}'),
        coalesce(array_agg(given.place order by given.place) filter (where given.waits_first), '{}')
    into plain, shadowed
    from (
        select
            each.place::integer as place, coalesce(each.options ? 'after', false) as waits,
            first_value(coalesce(each.options ? 'after', false)) over (partition by each.id order by each.place) as waits_first
        from unnest(p_ids, p_options) with ordinality as each (id, options, place)
    ) as given
    where not given.waits;
    if cardinality(plain) > 0 then
        select
            array_agg(queued.ordinal) as places, array_agg(queued.id) as ids, array_agg(queued.outcome) as outcomes,
            coalesce(jsonb_object_agg(p_ids[queued.ordinal], queued.id) filter (where queued.outcome = 'coalesced'), '{}') as merged
        into outcomes
        from penstock.enqueue_places(
            plain, p_name, p_data, p_ids, p_keys, p_priorities, p_run_after, p_expires_at, p_unique_keys, p_replay_of, p_moment,
            p_max_attempts, p_slots, p_options, p_unique_for, p_workflow
        ) as queued;
        merged := outcomes.merged;
        return query select * from unnest(outcomes.places, outcomes.ids, outcomes.outcomes);
        perform penstock.wake_claimers(p_name, cardinality(plain));
    end if;
    perform penstock.check_dependencies(p_name, p_ids, p_options);

    while cardinality(open) > 0 loop
        tries := tries + 1;
        if tries > 100 then
            raise exception 'job % of type % conflicts with others again and again', p_ids[open[1]], p_name
                using errcode = '40001', hint = 'Retry the transaction.';
        end if;
        with inserted as (
            insert into penstock.waiting_jobs
            select (
                penstock.new_job(
                    p_ids[place], p_name, p_data[place], p_moment, p_max_attempts, p_run_after[place], p_expires_at[place], p_keys[place],
                    coalesce(p_priorities[place], 0::smallint), p_unique_keys[place], null, p_replay_of, null, p_options[place],
                    p_workflow
                )
            ).*
            from unnest(open) as place
            on conflict do nothing
            returning waiting_jobs.id
        )
        select coalesce(array_agg(inserted.id), '{}') into made from inserted;
        all_made := cardinality(made) = cardinality(open);
        -- A transaction that is open may have enqueued one of these ids without `after`, or may be about to: neither sees what the other has
        -- written, but both need the id in the primary key of queued_jobs, where the second one waits for the end of the first. The rows
        -- that take the ids there are never visible.
        with reserved as (
            insert into penstock.queued_jobs as job (run_after, created_at, updated_at, id, attempt, max_attempts, name, data)
            select 'infinity', p_moment, p_moment, given.id, 1, 1, '', 'null'
            from unnest(made) as given (id)
            on conflict do nothing
            returning job.id
        )
        select coalesce(array_agg(reserved.id), '{}') into taken from reserved;
        delete from penstock.queued_jobs as job where job.id = any (taken);
        -- Statements of their own, with new snapshots: the inserts may have waited for a job of the same id to be enqueued, released or
        -- archived.
        return query
        with known as (
            delete from penstock.waiting_jobs as job
            where job.id = any (made)
                and (
                    job.id <> all (taken)
                    or (select 1 from penstock.archived_jobs as archived where archived.id = job.id limit 1) is not null
                )
            returning job.id
        )
        select
            place, known.id,
            case
                when penstock.is_taken(known.id, p_name) then 'taken'
                when (select 1 from penstock.archived_jobs as archived where archived.id = known.id limit 1) is null then 'duplicate'
                else 'archived'
            end
        from known
        join unnest(open) as place on p_ids[place] = known.id;
        return query
        -- An id that stands in the call more than once is one job, that of its first place.
        select place, p_ids[place], case when place = min(place) over (partition by p_ids[place]) then 'waiting' else 'duplicate' end
        from unnest(open) as place
        where (all_made or p_ids[place] = any (made))
            and (select 1 from penstock.waiting_jobs as job where job.id = p_ids[place]) is not null;
        open := array(select place from unnest(open) as place where not all_made and p_ids[place] <> all (made));
        new := new || made;
        exit when cardinality(open) = 0;
        -- The row lock keeps the job from being released until this transaction has ended: what runs then sees what the caller wrote.
        return query
        select place, p_ids[place], 'duplicate'
        from unnest(open) as place
        join penstock.waiting_jobs as job on job.id = p_ids[place]
        where job.name = p_name
        for share of job;
        return query
        -- Without the lock: no call holds off jobs of other types.
        select place, p_ids[place], 'taken'
        from unnest(open) as place
        join penstock.waiting_jobs as job on job.id = p_ids[place]
        where job.name <> p_name;
        select
            coalesce(array_agg(held.place), '{}') as places, array_agg(held.id) as ids,
            coalesce(jsonb_object_agg(p_ids[held.place], held.id), '{}') as merged
        into outcomes
        from (
            select place, job.id
            from unnest(open) as place
            join penstock.waiting_jobs as job
                on job.name = p_name and job.unique_key = p_unique_keys[place] and job.coalesces and coalesce(job.key, '') = coalesce(p_keys[place], '')
            where job.id <> p_ids[place]
                and (select 1 from penstock.waiting_jobs as same where same.id = p_ids[place]) is null
            for share of job
        ) as held;
        merged := merged || outcomes.merged;
        return query select given.place, given.id, 'coalesced' from unnest(outcomes.places, outcomes.ids) as given (place, id);
        open := array(
            select place from unnest(open) as place
            where (select 1 from penstock.waiting_jobs as job where job.id = p_ids[place]) is null
                and (
                    select 1 from penstock.waiting_jobs as job
                    where job.name = p_name and job.unique_key = p_unique_keys[place] and job.coalesces
                        and coalesce(job.key, '') = coalesce(p_keys[place], '')
                ) is null
        );
    end loop;
    if cardinality(shadowed) > 0 then
        return query
        select *
        from penstock.enqueue_places(
            shadowed, p_name, p_data, p_ids, p_keys, p_priorities, p_run_after, p_expires_at, p_unique_keys, p_replay_of, p_moment,
            p_max_attempts, p_slots, p_options, p_unique_for, p_workflow
        );
    end if;
    if merged <> '{}' then
        -- What is to run after a job of this call that has coalesced runs after the one that has its unique key.
        update penstock.waiting_jobs as job
        set options = jsonb_set(
            job.options, '{after}',
            (
                select jsonb_agg(distinct coalesce(merged -> (after.id #>> '{}'), after.id))
                from jsonb_array_elements(job.options -> 'after') as after (id)
            )
        )
        where job.id = any (new) and job.options -> 'after' ?| array(select jsonb_object_keys(merged));
    end if;
    perform penstock.add_dependencies(new);
    if p_workflow is not null and cardinality(new) > 0 then
        perform penstock.check_cycles(p_name, new, p_workflow);
    end if;
end
$$;
comment on function penstock.enqueue_dependents(text, jsonb[], uuid[], text[], smallint[], timestamptz[], timestamptz[], text[], uuid, timestamptz, smallint, integer[], jsonb[], interval[], uuid) is
    'Part of enqueue_many, when jobs of a batch wait for others: writes these to waiting_jobs, and determines the outcome of each job.';
