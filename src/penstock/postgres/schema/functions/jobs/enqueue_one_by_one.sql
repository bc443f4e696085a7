-- Two ways of enqueue_many for batches that are not plain: some of their ids or unique keys exist, or they have several job groups.

create or replace function penstock.is_taken(p_id uuid, p_name text)
returns boolean
language plpgsql
stable
as $$
begin
    return exists (select from penstock.queued_jobs as job where job.id = p_id and job.name <> p_name)
        or exists (select from penstock.waiting_jobs as job where job.id = p_id and job.name <> p_name)
        or exists (
            select from penstock.archived_jobs as job
            where job.id = p_id and job.name <> p_name
                and job.finished_at >= coalesce(penstock.id_time(p_id) - interval '1 day', '-infinity')
        );
end
$$;
comment on function penstock.is_taken(uuid, text) is
    'Part of enqueue_many, for an id that is known: whether it is that of a job of another type, of which the caller learns nothing else, not even whether it has ended.';

-- Long, since the checks that determine the outcome of a job (its id, its period, its unique key) have an order, and repeat together.
create or replace function penstock.enqueue_one_by_one(
    p_name text, p_data jsonb[], p_ids uuid[], p_keys text[], p_priorities smallint[], p_run_after timestamptz[],
    p_expires_at timestamptz[], p_unique_keys text[], p_replay_of uuid, p_moment timestamptz, p_max_attempts smallint,
    p_slots integer[], p_options jsonb[], p_unique_for interval[], p_workflow uuid
)
returns table (ordinal integer, id uuid, outcome text)
language plpgsql
as $$
#variable_conflict use_column
declare
    tries integer;
    unique_key text;
    scope text;
    period interval;
    holder uuid;
begin
    for place in 1 .. cardinality(p_ids) loop
        ordinal := place;
        outcome := null;
        tries := 0;
        unique_key := p_unique_keys[ordinal];
        scope := case when p_slots[ordinal] is not null then p_keys[ordinal] else '' end;
        period := p_unique_for[ordinal];
        while outcome is null loop
            id := p_ids[ordinal];
            tries := tries + 1;
            -- The share lock holds off its release until the caller commits: what runs then sees what the caller wrote. No call holds off
            -- jobs of other types.
            perform from penstock.waiting_jobs as job where job.id = p_ids[ordinal] and job.name = p_name for share;
            if found then
                outcome := 'duplicate';
                exit;
            end if;
            holder := case when period is not null then penstock.holder_of_unique(p_name, unique_key, scope, p_moment) end;
            insert into penstock.queued_jobs
            select (
                penstock.new_job(
                    p_ids[ordinal], p_name, p_data[ordinal], p_moment, p_max_attempts, p_run_after[ordinal], p_expires_at[ordinal],
                    p_keys[ordinal], coalesce(p_priorities[ordinal], 0::smallint), p_unique_keys[ordinal], p_slots[ordinal], p_replay_of,
                    null, p_options[ordinal], p_workflow
                )
            ).*
            where holder is null or holder = p_ids[ordinal]
            on conflict do nothing;
            if found then
                if cardinality(penstock.known_before(array[p_ids[ordinal]])) > 0 then
                    delete from penstock.queued_jobs where queued_jobs.id = p_ids[ordinal];
                    perform from penstock.waiting_jobs as job where job.id = p_ids[ordinal] and job.name = p_name for share;
                    outcome := case when found then 'duplicate' else 'archived' end;
                    if penstock.is_taken(p_ids[ordinal], p_name) then
                        outcome := 'taken';
                    end if;
                    exit;
                end if;
                outcome := 'queued';
                if period is not null then
                    holder := penstock.hold_unique(p_name, unique_key, scope, p_ids[ordinal], p_moment + period, p_moment);
                    if holder <> p_ids[ordinal] then
                        delete from penstock.queued_jobs where queued_jobs.id = p_ids[ordinal];
                        id := holder;
                        outcome := 'coalesced';
                    end if;
                end if;
                exit;
            end if;
            perform from penstock.queued_jobs where queued_jobs.id = p_ids[ordinal];
            if found then
                outcome := case when penstock.is_taken(p_ids[ordinal], p_name) then 'taken' else 'duplicate' end;
                exit;
            end if;
            if cardinality(penstock.known_before(array[p_ids[ordinal]])) > 0 then
                outcome := case when penstock.is_taken(p_ids[ordinal], p_name) then 'taken' else 'archived' end;
                exit;
            end if;
            if holder <> p_ids[ordinal] then
                -- As below, where the job is queued still.
                perform from penstock.queued_jobs as queued where queued.id = holder and queued.coalesces for share;
                id := holder;
                outcome := 'coalesced';
                exit;
            end if;
            -- The share lock holds off the claim until the caller commits, so that the job that runs sees what the
            -- caller wrote. A job that is being claimed at this moment no longer coalesces: then insert again.
            select queued.id into id
            from penstock.queued_jobs as queued
            where queued.name = p_name and queued.unique_key = p_unique_keys[ordinal] and queued.coalesces
                and (queued.slot is null or queued.key = p_keys[ordinal])
            for share;
            if found then
                outcome := 'coalesced';
                if period is not null then
                    -- It was enqueued without a period, or with one that is over.
                    perform penstock.hold_unique(p_name, unique_key, scope, id, p_moment + period, p_moment);
                end if;
                exit;
            end if;
            if tries >= 100 then
                raise exception 'job % of type % conflicts with others again and again', p_ids[ordinal], p_name
                    using errcode = '40001', hint = 'Retry the transaction.';
            end if;
        end loop;
        return next;
    end loop;
end
$$;
comment on function penstock.enqueue_one_by_one(text, jsonb[], uuid[], text[], smallint[], timestamptz[], timestamptz[], text[], uuid, timestamptz, smallint, integer[], jsonb[], interval[], uuid) is
    'Part of enqueue_many: the slow way for a batch in which some ids or unique keys exist already; determines the outcome of each job.';

create or replace function penstock.enqueue_by_group(
    p_name text, p_data jsonb[], p_ids uuid[], p_keys text[], p_priorities smallint[], p_run_after timestamptz[],
    p_expires_at timestamptz[], p_unique_keys text[], p_replay_of uuid, p_options jsonb[]
)
returns table (ordinal integer, id uuid, outcome text)
language plpgsql
as $$
#variable_conflict use_column
declare
    places integer[];
    in_order boolean;
begin
    -- A job that waits for another one of the call comes behind it: then in parts that have one group, in the order of the call.
    in_order := exists (
        select
        from unnest(p_options) as given (options)
        cross join lateral jsonb_array_elements_text(given.options -> 'after') as after (id)
        where given.options ? 'after' and lower(replace(after.id, 'job_', '')) in (select id::text from unnest(p_ids) as id)
    );
    for places in
        select array_agg(part.place::integer order by part.place)
        from (
            select
                given.place, given.options ->> 'group' as of_group,
                case
                    when in_order then given.place - row_number() over (partition by given.options ->> 'group' order by given.place)
                end as run
            from unnest(p_options) with ordinality as given (options, place)
        ) as part
        group by part.of_group, part.run
        order by min(part.place)
    loop
        return query
        select places[enqueued.ordinal], enqueued.id, enqueued.outcome
        from penstock.enqueue_many(
            p_name, array(select p_data[place] from unnest(places) as place),
            case when p_ids is not null then array(select p_ids[place] from unnest(places) as place) end,
            case when p_keys is not null then array(select p_keys[place] from unnest(places) as place) end,
            case when p_priorities is not null then array(select p_priorities[place] from unnest(places) as place) end,
            case when p_run_after is not null then array(select p_run_after[place] from unnest(places) as place) end,
            case when p_expires_at is not null then array(select p_expires_at[place] from unnest(places) as place) end,
            case when p_unique_keys is not null then array(select p_unique_keys[place] from unnest(places) as place) end,
            p_replay_of, array(select p_options[place] from unnest(places) as place)
        ) as enqueued;
    end loop;
end
$$;
comment on function penstock.enqueue_by_group(text, jsonb[], uuid[], text[], smallint[], timestamptz[], timestamptz[], text[], uuid, jsonb[]) is
    'Part of enqueue_many, when jobs of a batch are children of several job groups: enqueues those of each group.';
