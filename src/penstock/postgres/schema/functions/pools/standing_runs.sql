-- Runs of standing jobs, as the worker that owns the key begins, saves and ends them. The head of standing.sql explains them, and that of
-- tables/0005_pools.sql trials and quarantine.

create or replace function penstock.standing_of(p_name text, p_member text, p_slots integer[], p_epochs bigint[])
returns table (
    key text, slot integer, epoch bigint, data text, state text, version bigint, start_in_s double precision, crashes integer
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(greatest(cardinality(p_slots), cardinality(p_epochs)), 1000000, 'slots');
    select
        standing.key, standing.slot, slots.epoch, penstock.shown(standing.data), penstock.shown(standing.state), standing.version,
        greatest(extract(epoch from standing.retry_at - penstock.clock()), 0)::double precision, standing.crashes
    from unnest(penstock.still_owned(p_name, p_member, p_slots, p_epochs)) as mine (slot)
    join penstock.slots on slots.group_name = p_name and slots.slot = mine.slot
    join penstock.standing_jobs as standing on standing.name = p_name and standing.slot = mine.slot
    where standing.wanted and standing.quarantined_at is null
$$;
comment on function penstock.standing_of(text, text, integer[], bigint[]) is
    'The standing jobs that a member should run for slots that it has under these epochs; data is null when it cannot be read. It has to stop its other runs.';

create or replace function penstock.refuse_standing(p_name text, p_member text, p_slots integer[], p_epochs bigint[])
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    refusal constant jsonb := jsonb_build_object(
        'type', 'NoHandler',
        'message', format('worker %s owns the key and has no handler for standing jobs of %s', p_member, p_name)
    );
    refused integer;
begin
    perform penstock.check_size(greatest(cardinality(p_slots), cardinality(p_epochs)), 1000000, 'slots');
    if not exists (
        select from penstock.standing_jobs
        where name = p_name and wanted and running_by is null and quarantined_at is null and error is distinct from refusal
    ) then
        return 0;
    end if;
    -- A transaction that holds one of them tells the owner when it commits.
    with waiting as (
        select standing.key
        from unnest(penstock.still_owned(p_name, p_member, p_slots, p_epochs)) as mine (slot)
        join penstock.standing_jobs as standing on standing.name = p_name and standing.slot = mine.slot
        where standing.wanted
            and standing.running_by is null
            and standing.quarantined_at is null
            and standing.error is distinct from refusal
        for update of standing skip locked
    )
    update penstock.standing_jobs as standing
    set error = refusal,
        updated_at = penstock.clock()
    from waiting
    where standing.name = p_name and standing.key = waiting.key;
    get diagnostics refused = row_count;
    return refused;
end
$$;
comment on function penstock.refuse_standing(text, text, integer[], bigint[]) is
    'For a member without a handler for standing jobs: those in slots that it owns under these epochs get the error NoHandler, which ends when a run begins. Returns how many got it.';

create or replace function penstock.begin_standing(
    p_name text, p_key text, p_member text, p_slot integer, p_epoch bigint, p_version bigint, p_tried_with integer default null
)
returns table (data text, state text)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
begin
    perform from penstock.members where group_name = p_name and id = p_member for key share;
    return query
    update penstock.standing_jobs
    set running_by = p_member,
        running_epoch = p_epoch,
        tried_with = p_tried_with,
        entered_at = null,
        error = case when error ->> 'type' = 'NoHandler' then null else error end,
        started_at = penstock.clock(),
        updated_at = penstock.clock()
    where standing_jobs.name = p_name
        and standing_jobs.key = p_key
        and standing_jobs.slot = p_slot
        and standing_jobs.version = p_version
        and standing_jobs.wanted
        and standing_jobs.running_by is null
        and standing_jobs.quarantined_at is null
        and penstock.owns(p_name, p_member, p_slot, p_epoch)
    returning penstock.shown(standing_jobs.data), penstock.shown(standing_jobs.state);
end
$$;
comment on function penstock.begin_standing(text, text, text, integer, bigint, bigint, integer) is
    'Begins a run of a standing job; p_tried_with: with how many suspects it is on trial, itself included. No row: it may not, since the slot, the version or the run is not as the caller thought.';

create or replace function penstock.acquit_standing(p_name text, p_member text, p_keys text[])
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(cardinality(p_keys), 100000, 'keys');
    update penstock.standing_jobs
    set tried_with = null,
        crashes_alone = 0
    where name = p_name and key = any (p_keys) and running_by = p_member;
$$;
comment on function penstock.acquit_standing(text, text, text[]) is
    'Ends the trial of standing jobs that have survived it. Their crashes count until a run has lasted ten minutes.';

create or replace function penstock.enter_standing(p_name text, p_member text, p_keys text[], p_epochs bigint[])
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(greatest(cardinality(p_keys), cardinality(p_epochs)), 100000, 'keys');
    update penstock.standing_jobs as standing
    set entered_at = penstock.clock()
    from unnest(p_keys, p_epochs) as entered (key, epoch)
    where standing.name = p_name
        and standing.key = entered.key
        and standing.running_by = p_member
        and standing.running_epoch = entered.epoch;
$$;
comment on function penstock.enter_standing(text, text, text[], bigint[]) is
    'Notes that the start sides of these runs have succeeded.';

create or replace function penstock.lose_standing(p_name text, p_member text)
returns void
language plpgsql
as $$
declare
    on_trial constant boolean := exists (
        select from penstock.standing_jobs where name = p_name and running_by = p_member and tried_with is not null
    );
    -- What ends several workers at once is no standing job.
    together constant boolean := on_trial and penstock.lost_together(penstock.process_of(p_member));
begin
    update penstock.standing_jobs
    set crashes = case when started_at < penstock.clock() - interval '10 minutes' then 1 else crashes + 1 end,
        crashes_alone = crashes_alone + case when tried_with = 1 and (crashes_alone = 0 or not together) then 1 else 0 end,
        quarantined_at = case when tried_with = 1 and crashes_alone >= 2 and not together then penstock.clock() end,
        failures = case when tried_with = 1 and crashes_alone >= 2 and not together then failures + 1 else failures end,
        error = case
            when tried_with = 1 and crashes_alone >= 2 and not together then jsonb_build_object(
                'type', 'Quarantined',
                'message', format('%s workers were lost while they ran it, three of them while no other suspect started', crashes + 1)
            )
            else error
        end,
        updated_at = penstock.clock()
    where name = p_name and running_by = p_member and wanted and (tried_with is not null or not on_trial);
end
$$;
comment on function penstock.lose_standing(text, text) is
    'Part of end_slots: a member was lost with its runs. Counts the crash for those that can have caused it, and quarantines the one that caused it alone.';

create or replace function penstock.save_standing(p_name text, p_key text, p_member text, p_epoch bigint, p_state jsonb)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_json(p_state, 'the state of a standing job');
    update penstock.standing_jobs
    set state = penstock.kept_of_standing(p_name, p_state),
        updated_at = penstock.clock()
    where name = p_name and key = p_key and running_by = p_member and running_epoch = p_epoch;
    return found;
end
$$;
comment on function penstock.save_standing(text, text, text, bigint, jsonb) is
    'Saves the state of a run for the next one, in case this one crashes. False when the run no longer belongs to the caller.';

create or replace function penstock.end_standing(
    p_name text, p_key text, p_member text, p_epoch bigint, p_state jsonb default null, p_error jsonb default null
)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    place integer;
begin
    perform penstock.check_json(p_state, 'the state of a standing job');
    perform penstock.check_json(p_error, 'the error of a standing job');
    update penstock.standing_jobs
    set running_by = null,
        running_epoch = null,
        state = coalesce(penstock.kept_of_standing(p_name, p_state), state),
        error = penstock.kept_of_standing(p_name, p_error),
        failures = case when p_error is null then 0 else failures + 1 end,
        retry_at = case when p_error is not null then moment + least(power(2, least(failures, 10)), 60) * interval '1 second' end,
        updated_at = moment
    where name = p_name and key = p_key and running_by = p_member and running_epoch = p_epoch
    returning slot into place;
    if not found then
        return false;
    end if;
    delete from penstock.standing_jobs where name = p_name and key = p_key and not wanted and running_by is null;
    -- The key may have moved to a slot whose new owner waits for the end of this run.
    perform penstock.tell_standing(p_name, array[place]);
    perform penstock.tell_member(p_name, slots.target)
    from penstock.slots
    where slots.group_name = p_name and slots.slot = place and slots.settling and slots.target is not null;
    return true;
end
$$;
comment on function penstock.end_standing(text, text, text, bigint, jsonb, jsonb) is
    'Ends a run: p_state is for the next one (null: as it was); after p_error the next one waits 1, 2, 4, ... 60 seconds. False when the run no longer belonged to the caller.';

create or replace function penstock.take_messages(p_name text, p_member text, p_keys text[], p_limit integer default 1000)
returns table (key text, data text)
language sql
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(cardinality(p_keys), 100000, 'keys');
    select penstock.check_limit(p_limit, 10000);
    with taken as (
        delete from penstock.standing_messages as message
        where message.id in (
            select waiting.id
            from penstock.standing_jobs as standing
            join penstock.standing_messages as waiting on waiting.name = standing.name and waiting.key = standing.key
            where standing.name = p_name
                and standing.key = any (p_keys)
                and standing.running_by = p_member
            order by waiting.id
            limit p_limit
        )
        returning message.id, message.key, message.data
    )
    select taken.key, penstock.shown(taken.data) from taken where penstock.shown(taken.data) is not null order by taken.id
$$;
comment on function penstock.take_messages(text, text, text[], integer) is
    'Takes messages to those of these standing jobs that a member runs, oldest first. Delivered at most once.';
