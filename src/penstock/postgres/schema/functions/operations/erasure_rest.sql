-- Erasure of what is neither a job nor an event: messages of topics, standing jobs, and rows that have the key.

-- Long, since the copies of a message are of two kinds, and each is removed in its own way.
create or replace function penstock.erase_messages(
    operation penstock.operations, inout state penstock.erasures, p_limit integer, p_moment timestamptz,
    out erased bigint, out left_over integer, out at_end boolean
)
language plpgsql
as $$
declare
    message record;
    looked integer := 0;
    running uuid[];
    gone uuid[];
    ends penstock.ended_job[];
begin
    erased := 0;
    left_over := 0;
    for message in
        select
            stored.number, stored.seq, stored.topic, stored.first_copy,
            stored.published_at <= operation.started_at and penstock.is_erased_by(operation.filter, stored.key, stored.data, null) as hit
        from penstock.topic_messages as stored
        where stored.number > state.at_message
        order by stored.number
        limit p_limit
    loop
        looked := looked + 1;
        if message.hit then
            -- A subscriber that came after the start may have got it.
            perform from penstock.topics where name = message.topic for no key update;
            select array_agg(copy.id) into running
            from penstock.queued_jobs as copy
            where copy.id between message.first_copy and penstock.last_copy_id(message.first_copy)
                and copy.message = message.number
                and copy.status = 'in-progress'
                and copy.cancel_requested_at is null;
            if running is not null then
                perform penstock.cancel_rows(running, null, p_moment);
            end if;
            with ended as (
                delete from penstock.queued_jobs as copy
                where copy.id between message.first_copy and penstock.last_copy_id(message.first_copy) and copy.message = message.number and copy.status = 'queued'
                returning copy.id, copy.awaited, copy.workflow
            )
            select
                array_agg(ended.id),
                array_agg(row(ended.id, ended.workflow, ended.awaited, 'cancelled')::penstock.ended_job)
                    filter (where ended.awaited or ended.workflow is not null)
            into gone, ends
            from ended;
            if ends is not null then
                perform penstock.note_ends(ends);
                perform penstock.tell_all('workflows', '');
            end if;
            perform penstock.forget_erased(gone);
            if exists (
                select from penstock.queued_jobs as copy
                where copy.id between message.first_copy and penstock.last_copy_id(message.first_copy) and copy.message = message.number
            ) then
                left_over := 1;
                return;
            end if;
            with ended as (
                delete from penstock.archived_jobs as copy
                where copy.id between message.first_copy and penstock.last_copy_id(message.first_copy) and copy.message = message.number
                returning copy.id, copy.tableoid
            )
            select array_agg(ended.id), array(select unnest(state.touched) union select unnest(array_agg(class.relname::text)) order by 1)
            into gone, state.touched
            from ended
            join pg_class as class on class.oid = ended.tableoid;
            perform penstock.forget_erased(gone);
            delete from penstock.topic_messages where number = message.number;
            update penstock.topics set pruned_seq = greatest(pruned_seq, message.seq) where name = message.topic;
            erased := erased + 1;
        end if;
        state.at_message := message.number;
    end loop;
    at_end := looked < p_limit;
end
$$;
comment on function penstock.erase_messages(penstock.operations, penstock.erasures, integer, timestamptz) is
    'Part of advance_erasure: deletes the next messages that belong to what is to be erased, each with its copies. Returns how many, left_over when a copy runs, and whether there are no more. A subscriber that continues from before such a message is told that messages are gone.';

create or replace function penstock.erase_key(p_key text)
returns bigint
language plpgsql
as $$
declare
    paused record;
    more bigint;
    erased bigint := 0;
begin
    for paused in select paused_keys.name from penstock.paused_keys where paused_keys.key = p_key order by paused_keys.name loop
        perform penstock.resume_key(paused.name, p_key);
        erased := erased + 1;
    end loop;
    delete from penstock.key_weights where key = p_key;
    get diagnostics more = row_count;
    erased := erased + more;
    delete from penstock.rate_windows where key = p_key;
    get diagnostics more = row_count;
    erased := erased + more;
    delete from penstock.unique_periods where key = p_key;
    get diagnostics more = row_count;
    erased := erased + more;
    -- As in forget_keys: in a pool with its own assign a key has a slot.
    for paused in
        select slots.group_name from penstock.slots where slots.key = p_key order by slots.group_name
    loop
        continue when not pg_try_advisory_xact_lock(hashtext('penstock.slots'), hashtext(paused.group_name));
        perform penstock.lock_group(paused.group_name);
        delete from penstock.slots
        where group_name = paused.group_name and key = p_key
            and not exists (select from penstock.queued_jobs as job where job.name = paused.group_name and job.slot = slots.slot)
            and not exists (select from penstock.standing_jobs as standing where standing.name = paused.group_name and standing.slot = slots.slot);
        get diagnostics more = row_count;
        erased := erased + more;
    end loop;
    return erased;
end
$$;
comment on function penstock.erase_key(text) is
    'Part of erase_rest: removes a key from the pools: its pause, weight, starts within its rate limit, unique keys and slot. A key that has jobs again keeps its slot. Returns how many rows.';

create or replace function penstock.erase_staged(operation penstock.operations)
returns bigint
language plpgsql
as $$
declare
    subject constant jsonb := operation.filter;
    more bigint;
    erased bigint;
begin
    -- A writer counts what it staged, and repeats what is missing from its source.
    delete from penstock.staged_jobs as staged
    where staged.staged_at <= operation.started_at
        and (staged.key = subject ->> 'key' or subject ? 'field' and penstock.is_erased_by(subject, null, penstock.readable_json(staged.data), null));
    get diagnostics erased = row_count;
    delete from penstock.staged_events as staged
    where staged.staged_at <= operation.started_at
        and (
            staged.keys @> array[subject ->> 'key']
            or exists (
                select from unnest(staged.data) as data where subject ? 'field' and penstock.is_erased_by(subject, null, penstock.readable_json(data::text), null)
            )
        );
    get diagnostics more = row_count;
    erased := erased + more;
    delete from penstock.loaded_chunks as staged
    where staged.loaded_at <= operation.started_at
        and (
            staged.keys @> array[subject ->> 'key']
            or exists (
                select from unnest(staged.data) as data where subject ? 'field' and penstock.is_erased_by(subject, null, penstock.readable_json(data::text), null)
            )
        );
    get diagnostics more = row_count;
    return erased + more;
end
$$;
comment on function penstock.erase_staged(penstock.operations) is
    'Part of erase_rest: removes what Spark or a load has staged and not committed. Returns how many rows.';

create or replace function penstock.erase_words(p_subject jsonb)
returns void
language sql
as $$
    -- What an error says, or the sample of a cause in the lake, may quote a payload.
    update penstock.group_offsets
    set failing_error = case when penstock.mentions(failing_error, p_subject) then 'erased' else failing_error end,
        halt_error = case when penstock.mentions(halt_error, p_subject) then 'erased' else halt_error end,
        pause_reason = case when penstock.mentions(pause_reason, p_subject) then 'erased' else pause_reason end
    where penstock.mentions(concat_ws(' ', failing_error, halt_error, pause_reason), p_subject);
    update penstock.slots set error = 'erased' where error is not null and penstock.mentions(error, p_subject);
    update penstock.schedules set last_error = 'erased' where penstock.mentions(last_error, p_subject);
    update penstock.leader_tasks set last_error = 'erased' where penstock.mentions(last_error, p_subject);
    with named as (
        select
            change.id,
            penstock.mentions(change.error, p_subject) as by_error,
            penstock.mentions(
                (
                    select string_agg(value #>> '{}', ' ')
                    from jsonb_path_query(change.filter, 'strict $.**') as value
                    where jsonb_typeof(value) in ('string', 'number')
                ),
                p_subject
            ) as by_filter
        from penstock.changes as change
    )
    update penstock.changes
    set filter = case when named.by_filter then '{"erased": true}' else changes.filter end,
        error = case when named.by_error then 'erased' else changes.error end
    from named
    where changes.id = named.id and (named.by_filter or named.by_error);
    update penstock.rollups
    set hot_keys = hot_keys - coalesce(p_subject ->> 'key', p_subject ->> 'value')
    where hot_keys ? coalesce(p_subject ->> 'key', p_subject ->> 'value');
    update penstock.failure_signatures
    set sample = case when penstock.mentions(sample, p_subject) then 'erased' else sample end,
        message = case when penstock.mentions(message, p_subject) then 'erased' else message end
    where penstock.mentions(concat_ws(' ', sample, message), p_subject);
    update penstock.run_history
    set name = case when penstock.mentions(name, p_subject) then 'erased' else name end,
        retry_of = case when penstock.mentions(retry_of, p_subject) then 'erased' else retry_of end
    where penstock.mentions(concat_ws(' ', name, retry_of), p_subject);
    -- A run is known by its name until it is forgotten. The history gets it without.
    update penstock.job_groups
    set name_erased = true
    where id = any (array(
        select named.id
        from penstock.job_groups as named
        where named.graph is not null and not named.name_erased and penstock.mentions(named.name, p_subject)
        order by named.id
        for no key update
    ));
$$;
comment on function penstock.erase_words(jsonb) is
    'Part of erasures: replaces errors of partitions, keys, schedules and tasks, samples of failures, what changes of the audit were made to, and names of runs in the history, that have the key or the value as a word, and takes the key out of the busy keys of the rollups.';

create or replace function penstock.erase_rest(
    operation penstock.operations, p_since timestamptz, out erased bigint, out standing bigint, out left_over integer
)
language plpgsql
as $$
declare
    subject constant jsonb := operation.filter;
    job record;
begin
    standing := 0;
    for job in
        select stored.name, stored.key, stored.wanted from penstock.standing_jobs as stored
        where stored.created_at <= operation.started_at and penstock.is_erased_by(subject, stored.key, stored.data, null)
        order by stored.name, stored.key
    loop
        if job.wanted and penstock.stop_standing(job.name, job.key) then
            standing := standing + 1;
        end if;
    end loop;
    left_over := (
        select count(*) from penstock.standing_jobs as stored
        where stored.created_at <= operation.started_at and penstock.is_erased_by(subject, stored.key, stored.data, null)
    );
    delete from penstock.standing_messages as message
    where message.sent_at <= operation.started_at and subject ? 'field' and penstock.is_erased_by(subject, null, message.data, null);
    get diagnostics erased = row_count;
    erased := erased + penstock.erase_key(coalesce(subject ->> 'key', subject ->> 'value')) + penstock.erase_staged(operation);
    perform penstock.erase_words(subject);
    -- Other operations on the key: those that have ended do not need it any more.
    update penstock.operations as other
    set filter = other.filter - '{key,value,job}'::text[], error = null
    where other.id <> operation.id and other.state <> 'running'
        and coalesce(other.filter ->> 'key', other.filter ->> 'value') = coalesce(subject ->> 'key', subject ->> 'value');
    left_over := left_over
        + (
            select count(*) from penstock.operations as other
            where other.id <> operation.id and other.kind <> 'erase'
                and coalesce(other.filter ->> 'key', other.filter ->> 'value') = coalesce(subject ->> 'key', subject ->> 'value')
        );
    -- The tables of segments that were rewritten are gone when no reader is left in them.
    perform penstock.drop_retired();
    left_over := left_over + (select count(*) from penstock.retired_segments where retired_at <= p_since);
end
$$;
comment on function penstock.erase_rest(penstock.operations, timestamptz) is
    'Part of advance_erasure: stops standing jobs, and removes the key from all other tables. Returns how many rows were erased, how many standing jobs were stopped, and how many things are still in the way: standing jobs that end, other operations on the key, tables of streams that are read.';
