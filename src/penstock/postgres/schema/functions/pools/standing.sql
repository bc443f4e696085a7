-- Standing jobs: one run of each key, on the owner of the key, until it is stopped.
--
-- A run begins with begin_standing and ends with end_standing, both under the epoch of the slot; in between running_by names the
-- worker. No other worker can begin it meanwhile: the slot has one owner, and is not released before its runs have ended. A
-- payload that is replaced gets a new version, and the owner stops the old run before it begins the new one. The next run gets the
-- state that the last one left. A standing job that crashes its workers is quarantined: see tables/0005_pools.sql.

create or replace function penstock.tell_standing(p_name text, p_slots integer[])
returns void
language plpgsql
as $$
declare
    concerned text;
begin
    for concerned in
        select distinct owner from penstock.slots where group_name = p_name and slot = any (p_slots) and owner is not null
        union
        -- Also the target of the slot: it may take the slot, and read its standing jobs, before this transaction commits.
        select distinct target from penstock.slots where group_name = p_name and slot = any (p_slots) and target is not null
        union
        select distinct running_by from penstock.standing_jobs where name = p_name and slot = any (p_slots) and running_by is not null
    loop
        perform penstock.tell(concerned, 'standing', p_name);
    end loop;
end
$$;
comment on function penstock.tell_standing(text, integer[]) is 'Notifies the owners of slots that something about their standing jobs has changed.';

create or replace function penstock.refuse_plain_standing(p_name text, p_data jsonb[])
returns void
language plpgsql
as $$
begin
    if exists (select from penstock.jobs where jobs.name = p_name and jobs.encrypted) then
        perform penstock.refuse_plain('pool ' || left(p_name, 100), p_data);
    end if;
end
$$;
comment on function penstock.refuse_plain_standing(text, jsonb[]) is
    'Raises PS400 for a payload of a standing job, or a message to one, that is not encrypted though its pool is.';

create or replace function penstock.kept_of_standing(p_name text, p_detail jsonb)
returns jsonb
language sql
stable
as $$
    select case
        when p_detail is not null and exists (select from penstock.jobs where jobs.name = p_name and jobs.encrypted)
            then penstock.without_plain(p_detail)
        else p_detail
    end
$$;
comment on function penstock.kept_of_standing(text, jsonb) is
    'What is stored of the state or the error of a run: of an encrypted pool only what is encrypted, and the type of an error.';

create or replace function penstock.check_standing(p_name text, p_key text, p_data jsonb)
returns void
language plpgsql
as $$
begin
    perform penstock.require_pool(p_name);
    if p_key in ('.', '..') then
        raise exception 'invalid key of a standing job: %', p_key
            using errcode = 'PS400', hint = '"." and ".." are no parts of a path, so that HTTP clients could not name it.';
    end if;
    perform penstock.refuse_plain_standing(p_name, array[p_data]);
    perform penstock.check_jobs(p_name, array[p_data], null, array[coalesce(p_key, '')], null, null, penstock.clock());
end
$$;
comment on function penstock.check_standing(text, text, jsonb) is 'Raises PS400, PS404 or PS413 unless a standing job can have this pool, key and payload.';

create or replace function penstock.restart_standing(p_name text, p_keys text[], p_data jsonb[], p_moment timestamptz)
returns integer[]
language sql
as $$
    with changed as (
        update penstock.standing_jobs as standing
        set data = given.data,
            version = standing.version + 1,
            wanted = true,
            failures = 0,
            crashes = 0,
            crashes_alone = 0,
            tried_with = null,
            quarantined_at = null,
            retry_at = null,
            error = null,
            state = case when standing.wanted then standing.state end,
            updated_at = p_moment
        from unnest(p_keys, p_data) as given (key, data)
        where standing.name = p_name and standing.key = given.key
        returning standing.slot
    )
    select coalesce(array_agg(distinct changed.slot), '{}') from changed
$$;
comment on function penstock.restart_standing(text, text[], jsonb[], timestamptz) is
    'Part of start_standing and reconcile_standing: gives standing jobs, which the caller has locked, another payload and starts them again. Returns their slots.';

create or replace function penstock.start_standing(p_name text, p_key text, p_data jsonb default '{}', p_replace boolean default false)
returns text
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    place integer;
    present penstock.standing_jobs;
begin
    perform penstock.check_standing(p_name, p_key, p_data);
    place := (penstock.slots_for(p_name, array[p_key], null))[1];
    insert into penstock.standing_jobs (name, key, slot, data, created_at, updated_at)
    values (p_name, p_key, place, p_data, moment, moment)
    on conflict (name, key) do nothing;
    if found then
        perform penstock.tell_standing(p_name, array[place]);
        return 'starting';
    end if;
    select * into present from penstock.standing_jobs where name = p_name and key = p_key for update;
    if not found then
        -- Another transaction has just removed it.
        return penstock.start_standing(p_name, p_key, p_data, p_replace);
    end if;
    if present.wanted and present.data = p_data and present.quarantined_at is null then
        return 'unchanged';
    end if;
    if present.wanted and present.data <> p_data and not p_replace then
        raise exception 'a standing job with key % runs in pool % with another payload', p_key, p_name
            using errcode = 'PS409', hint = 'Stop it first, or replace it.';
    end if;
    perform penstock.tell_standing(p_name, penstock.restart_standing(p_name, array[p_key], array[p_data], moment));
    return case when present.wanted and present.data <> p_data then 'replaced' else 'starting' end;
end
$$;
comment on function penstock.start_standing(text, text, jsonb, boolean) is
    'Starts a standing job for a key: it runs on the owner of the key from now on. Returns starting (also one that was quarantined), unchanged (it is there with this payload) or, with p_replace, replaced; standing_list shows whether its start side has succeeded (entered_at). PS409 when it is there with another payload.';

create or replace function penstock.stop_standing(p_name text, p_key text)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    place integer;
begin
    perform penstock.require_pool(p_name);
    update penstock.standing_jobs
    set wanted = false,
        updated_at = penstock.clock()
    where name = p_name and key = p_key and wanted
    returning slot into place;
    if not found then
        return false;
    end if;
    delete from penstock.standing_jobs where name = p_name and key = p_key and running_by is null;
    perform penstock.tell_standing(p_name, array[place]);
    return true;
end
$$;
comment on function penstock.stop_standing(text, text) is 'Stops the standing job of a key, wherever it runs. False when there was none.';

create or replace function penstock.notify_standing(p_name text, p_key text, p_data jsonb)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    place integer;
begin
    perform penstock.check_standing(p_name, p_key, p_data);
    select slot into place from penstock.standing_jobs where name = p_name and key = p_key and wanted for key share;
    if not found then
        raise exception 'no standing job with key % in pool %', left(p_key, 100), p_name
            using errcode = 'PS404', hint = 'Start it first.';
    end if;
    if exists (
        select from penstock.standing_messages where standing_messages.name = p_name and standing_messages.key = p_key offset 9999
    ) then
        raise exception '10,000 messages to key % in pool % wait already', left(p_key, 100), p_name
            using errcode = 'PS409', hint = 'Is there a worker, and does its handler read messages()? Try again when it has read some.';
    end if;
    insert into penstock.standing_messages (name, key, data, sent_at) values (p_name, p_key, p_data, penstock.clock());
    perform penstock.tell_standing(p_name, array[place]);
end
$$;
comment on function penstock.notify_standing(text, text, jsonb) is
    'Sends a message to the standing job of a key; it gets it while it runs, or when it runs next. PS404 when there is none, PS409 when 10,000 wait already.';

-- Long, since it compares two sets as a whole: it stops, replaces, starts again and starts, each for all keys in one statement.
create or replace function penstock.reconcile_standing(p_name text, p_wanted jsonb)
returns table (started integer, replaced integer, stopped integer)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment constant timestamptz := penstock.clock();
    pool constant penstock.pools := penstock.require_pool(p_name);
    -- Keys and payloads that differ from the wanted set, and the slots of all that changed.
    keys text[];
    documents jsonb[];
    places integer[];
    -- Those of these keys that exist, and are replaced or started again.
    present text[];
    count_started integer;
    count_replaced integer;
    concerned integer[] := '{}';
    wrong text;
begin
    if p_wanted is null or jsonb_typeof(p_wanted) <> 'object' then
        raise exception 'wanted must be a JSON object of payloads by key'
            using errcode = 'PS400', hint = 'For example {"acme": {"interval": 60}}.';
    end if;
    started := 0;
    replaced := 0;
    if p_wanted <> '{}' then
        perform penstock.refuse_plain_standing(p_name, array(select given.value from jsonb_each(p_wanted) as given));
    end if;
    -- One at a time, so that two controllers do not undo each other halfway.
    perform pg_advisory_xact_lock(hashtext('penstock.reconcile'), hashtext(p_name));

    -- Rows are locked in the order of their keys, here and below.
    with unwanted as (
        select standing.key
        from penstock.standing_jobs as standing
        where standing.name = p_name and standing.wanted and not p_wanted ? standing.key
        order by standing.key
        for update
    )
    select array_agg(unwanted.key) into keys from unwanted;
    stopped := coalesce(cardinality(keys), 0);
    if stopped > 0 then
        with ended as (
            update penstock.standing_jobs as standing
            set wanted = false, updated_at = moment
            from unnest(keys) as given (key)
            where standing.name = p_name and standing.key = given.key
            returning standing.slot
        )
        select array_agg(distinct ended.slot) into concerned from ended;
        delete from penstock.standing_jobs as standing
        using unnest(keys) as given (key)
        where standing.name = p_name and standing.key = given.key and standing.running_by is null;
    end if;

    loop
        select array_agg(given.key order by given.key), array_agg(given.value order by given.key)
        into keys, documents
        from jsonb_each(p_wanted) as given
        left join penstock.standing_jobs as standing on standing.name = p_name and standing.key = given.key and standing.wanted
        where standing.data is distinct from given.value;
        -- The second look finds nothing, unless another transaction started or stopped one of them between the first look and the locks.
        exit when keys is null;
        select given into wrong from unnest(keys) as given where given in ('.', '..') limit 1;
        if wrong is not null then
            perform penstock.check_standing(p_name, wrong, 'null');
        end if;
        perform penstock.check_jobs(p_name, documents, null, keys, null, null, moment);

        with locked as (
            select standing.key, standing.wanted
            from unnest(keys) as given (key)
            join penstock.standing_jobs as standing on standing.name = p_name and standing.key = given.key
            order by standing.key
            for update of standing
        )
        select array_agg(locked.key), count(*) filter (where not locked.wanted), count(*) filter (where locked.wanted)
        into present, count_started, count_replaced
        from locked;
        started := started + count_started;
        replaced := replaced + count_replaced;
        select concerned || penstock.restart_standing(
            p_name, array_agg(given.key), array_agg(given.data), moment
        )
        into concerned
        from unnest(keys, documents) as given (key, data)
        join unnest(present) as there (key) on there.key = given.key;

        places := penstock.slots_for(p_name, keys, null);
        with fresh as (
            insert into penstock.standing_jobs (name, key, slot, data, created_at, updated_at)
            select p_name, given.key, given.slot, given.data, moment, moment
            from unnest(keys, documents, places) as given (key, data, slot)
            where not exists (select from unnest(present) as there (key) where there.key = given.key)
            order by given.key
            on conflict (name, key) do nothing
            returning slot
        )
        select count(*), concerned || coalesce(array_agg(distinct fresh.slot), '{}') into count_started, concerned from fresh;
        started := started + count_started;
    end loop;

    if cardinality(concerned) > 0 then
        perform penstock.tell_standing(p_name, concerned);
    end if;
    return next;
end
$$;
comment on function penstock.reconcile_standing(text, jsonb) is
    'Makes the standing jobs of a pool equal to a wanted set, {"key": payload}, in one transaction. Idempotent. Returns how many were started, replaced and stopped.';

create or replace function penstock.move_standing(p_name text, p_slots integer)
returns void
language sql
as $$
    with moved as (
        update penstock.standing_jobs
        set slot = penstock.slot_of(key, p_slots)
        where name = p_name and slot <> penstock.slot_of(key, p_slots)
        returning slot, running_by
    )
    update penstock.slots
    set settling = true
    where group_name = p_name and slot in (select moved.slot from moved where moved.running_by is not null)
$$;
comment on function penstock.move_standing(text, integer) is 'Part of resize_pool: standing jobs go to the new slots of their keys.';
