-- Erasure: all that belongs to one key, or to one value of a field of payloads, is removed, as an operation. tables/0012_operations.sql
-- says through which phases it goes, docs/erasure.md what it removes and what it cannot.
--
-- Each step is a transaction that looks at a bounded number of rows, or at one segment of a stream, and notes how far it came. A step that
-- was interrupted leaves nothing behind, and a step that is repeated finds nothing left to do.

create or replace function penstock.check_erasure(p_subject jsonb)
returns jsonb
language plpgsql
stable
as $$
declare
    unknown text;
begin
    perform penstock.check_json(p_subject, 'what is to be erased', 65536);
    if p_subject is null or jsonb_typeof(p_subject) <> 'object' then
        raise exception 'what is to be erased must be an object'
            using errcode = 'PS400', hint = 'For example {"key": "acme"}, or {"field": "customer.id", "value": "acme"}.';
    end if;
    select each.key into unknown
    from jsonb_each(p_subject) as each
    where case
        when each.key in ('key', 'field', 'value', 'job') then jsonb_typeof(each.value) not in ('string', 'null')
        when each.key in ('rewrite', 'skip_unseen') then jsonb_typeof(each.value) not in ('boolean', 'null')
        else true
    end
    limit 1;
    if found then
        raise exception 'invalid condition of an erasure: %', left(unknown, 100)
            using errcode = 'PS400', hint = 'key, field, value and job are texts, rewrite and skip_unseen are true or false.';
    end if;
    p_subject := jsonb_strip_nulls(p_subject);
    if num_nonnulls(p_subject -> 'key', p_subject -> 'field', p_subject -> 'job') <> 1 or p_subject ? 'field' <> p_subject ? 'value' then
        raise exception 'an erasure needs either a key, or a field with its value, or the id of a job'
            using errcode = 'PS400', hint = 'For example {"key": "acme"}, or {"field": "customer.id", "value": "acme"}.';
    end if;
    if p_subject ->> 'job' !~ '^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$' then
        raise exception 'invalid id of a job: %', left(p_subject ->> 'job', 100)
            using errcode = 'PS400', hint = 'It is a UUID.';
    end if;
    if '' in (coalesce(p_subject ->> 'key', '-'), coalesce(p_subject ->> 'field', '-'), coalesce(p_subject ->> 'value', '-'))
        or '' = any (string_to_array(p_subject ->> 'field', '.'))
    then
        raise exception 'the key, the field or the value of an erasure is empty'
            using errcode = 'PS400', hint = 'A field within an object is written with a dot: customer.id.';
    end if;
    return p_subject;
end
$$;
comment on function penstock.check_erasure(jsonb) is
    'Part of preview_erasure and start_erasure: what is to be erased as it is stored, or PS400.';

create or replace function penstock.preview_erasure(p_subject jsonb)
returns table (kind text, found bigint)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment constant timestamptz := penstock.clock();
    subject constant jsonb := penstock.check_erasure(p_subject);
    stream record;
    events bigint := 0;
    more bigint;
begin
    return query
    select 'queued', count(*)
    from (
        select from penstock.queued_jobs as job
        where job.created_at <= moment and penstock.is_erased_by(subject, job.key, job.data, job.message, job.id)
        union all
        select from penstock.waiting_jobs as job
        where job.created_at <= moment and penstock.is_erased_by(subject, job.key, job.data, job.message, job.id)
    ) as job;
    return query
    select 'archived', count(*) from penstock.archived_jobs as job
    where job.created_at <= moment and penstock.is_erased_by(subject, job.key, job.data, job.message, job.id);
    for stream in select segment.table_name from penstock.segments as segment order by segment.id loop
        execute format('select coalesce(sum(cardinality(hit.places)), 0) from penstock.erased_places(%L, $1, $2) as hit', stream.table_name)
        into more
        using subject, moment;
        events := events + more;
    end loop;
    return query select 'events', events;
    return query
    select 'messages', count(*) from penstock.topic_messages as message
    where message.published_at <= moment and penstock.is_erased_by(subject, message.key, message.data, null);
    return query
    select 'standing', count(*) from penstock.standing_jobs as standing where penstock.is_erased_by(subject, standing.key, standing.data, null);
    return query select 'unseen', cardinality(penstock.unseen_payloads())::bigint where subject ? 'field';
end
$$;
comment on function penstock.preview_erasure(jsonb) is
    'What an erasure would remove now, by kind: jobs that are queued or wait for others, jobs that are archived, events, messages of topics, standing jobs. Of a field also unseen: how many job types, topics and streams have payloads that cannot be seen. It reads everything, and does not look into lakes. See start_erasure.';

create or replace function penstock.start_erasure(p_subject jsonb, p_id uuid default null)
returns penstock.operations
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    subject constant jsonb := penstock.check_erasure(p_subject);
    started penstock.operations;
begin
    perform penstock.refuse_unseen(subject);
    insert into penstock.operations (id, kind, filter, started_at, updated_at, phase, counts)
    values (coalesce(p_id, penstock.new_id()), 'erase', subject, moment, moment, 'queue', '{}')
    on conflict (id) do nothing
    returning * into started;
    if found then
        insert into penstock.erasures (operation, phase_at) values (started.id, moment);
        return started;
    end if;
    select * into started from penstock.operations where operations.id = p_id;
    -- Of one that has removed everything nothing says any more what it removed.
    if started.kind <> 'erase' or started.filter ?| '{key,value,job}' and started.filter <> subject then
        raise exception 'operation % is another one', p_id
            using errcode = 'PS409', hint = 'Take a new UUID for each operation.';
    end if;
    return started;
end
$$;
comment on function penstock.start_erasure(jsonb, uuid) is
    'Starts to erase all that belongs to a key, {"key": "acme"}, or to a value of a field of payloads, {"field": "customer.id", "value": "acme"} (or one job, {"job": "<id>"}): jobs that are queued (running ones are cancelled first) or archived, events, messages, and what else has the key. What is enqueued, appended or published later is not part of it. rewrite: tables are copied at the end, which locks each meanwhile, so that no byte stays in their files. skip_unseen: go on although some payloads are encrypted or bytes, by whose fields nothing can be erased (otherwise PS409). Workers do it in steps: see the table operations. p_id: so that a repeated call starts one.';

create or replace function penstock.forget_erased(p_ids uuid[])
returns void
language sql
as $$
    delete from penstock.unique_periods where id = any (p_ids);
    delete from penstock.quarantined_payloads where id = any (p_ids);
    delete from penstock.job_steps where job = any (p_ids);
    delete from penstock.job_signals where job = any (p_ids);
    update penstock.schedules set last_error = null where job_id = any (p_ids) and last_error is not null;
$$;
comment on function penstock.forget_erased(uuid[]) is 'Part of erasures: removes what else there is of jobs that were erased.';

create or replace function penstock.with_count(p_counts jsonb, p_kind text, p_more bigint)
returns jsonb
language sql
immutable
as $$
    select case
        when p_more > 0 then p_counts || jsonb_build_object(p_kind, coalesce((p_counts ->> p_kind)::bigint, 0) + p_more)
        else p_counts
    end
$$;
comment on function penstock.with_count(jsonb, text, bigint) is 'Part of erasures: the counts of an operation with more of one kind.';

create or replace function penstock.erase_waiting(operation penstock.operations, p_ids uuid[], p_moment timestamptz, out left_over integer, out erased integer)
language plpgsql
as $$
declare
    matching uuid[];
    locked uuid[];
    running uuid[];
    gone uuid[];
    ends penstock.ended_job[];
    dependents integer;
begin
    -- Those that wait for others first: what is released meanwhile is found in the queue.
    matching := array(
        select job.id from penstock.waiting_jobs as job
        where job.id = any (p_ids) and job.created_at <= operation.started_at
            and penstock.is_erased_by(operation.filter, job.key, job.data, job.message, job.id)
    );
    gone := array(select job.id from penstock.waiting_jobs as job where job.id = any (matching) order by job.id for update skip locked);
    perform penstock.forget_waiting(gone);
    dependents := cardinality(gone);
    left_over := (select count(*) from penstock.waiting_jobs as job where job.id = any (matching));
    matching := array(
        select job.id from penstock.queued_jobs as job
        where job.id = any (p_ids) and job.created_at <= operation.started_at
            and penstock.is_erased_by(operation.filter, job.key, job.data, job.message, job.id)
    );
    select coalesce(array_agg(free.id), '{}'), array_agg(free.id) filter (where free.status = 'in-progress' and free.cancel_requested_at is null)
    into locked, running
    from (
        select job.id, job.status, job.cancel_requested_at from penstock.queued_jobs as job
        where job.id = any (matching)
        order by job.id
        for update skip locked
    ) as free;
    with names as (
        select distinct job.name from penstock.queued_jobs as job where job.id = any (locked)
    ),
    ended as (
        delete from penstock.queued_jobs as job where job.id = any (locked) and job.status = 'queued' returning job.id, job.awaited, job.workflow
    )
    select
        array(select ended.id from ended),
        (
            select array_agg(row(ended.id, ended.workflow, ended.awaited, 'cancelled')::penstock.ended_job)
            from ended
            where ended.awaited or ended.workflow is not null
        ),
        count(penstock.wake_claimers(names.name, 1))
    into gone, ends
    from names
    where exists (select from penstock.pools where pools.name = names.name);
    if ends is not null then
        perform penstock.note_ends(ends);
        perform penstock.tell_all('workflows', '');
    end if;
    -- The children for which those of them waited that were suspended.
    perform penstock.stop_gathered(gone, p_moment);
    perform penstock.forget_erased(gone);
    if running is not null then
        perform penstock.cancel_rows(running, null, p_moment);
    end if;
    erased := dependents + cardinality(gone);
    left_over := left_over + (select count(*) from penstock.queued_jobs as job where job.id = any (matching) and job.id <> all (gone));
end
$$;
comment on function penstock.erase_waiting(penstock.operations, uuid[], timestamptz) is
    'Part of advance_erasure: deletes those of these jobs that belong to what is to be erased and wait, and cancels those that run. Returns how many are left for the next pass, since they run or another transaction holds them, and how many were deleted.';

create or replace function penstock.erase_archived(operation penstock.operations, p_ids uuid[], out erased bigint, out relations text[])
language plpgsql
as $$
declare
    gone uuid[];
begin
    with ended as (
        delete from penstock.archived_jobs as archived
        where archived.id = any (p_ids)
            and archived.finished_at >= operation.at_day::timestamp at time zone 'UTC'
            and archived.finished_at < (operation.at_day + 1)::timestamp at time zone 'UTC'
            and archived.created_at <= operation.started_at
            and penstock.is_erased_by(operation.filter, archived.key, archived.data, archived.message, archived.id)
        returning archived.id, archived.tableoid
    )
    select array_agg(ended.id), array_agg(distinct class.relname::text)
    into gone, relations
    from ended
    join pg_class as class on class.oid = ended.tableoid;
    perform penstock.forget_erased(gone);
    erased := coalesce(cardinality(gone), 0);
end
$$;
comment on function penstock.erase_archived(penstock.operations, uuid[]) is
    'Part of advance_erasure: deletes those of these jobs of its day that belong to what is to be erased. Returns how many, and from which tables.';

-- Long, since it is the order of the phases, each a few lines.
create or replace function penstock.advance_erasure(operation penstock.operations, p_limit integer, p_moment timestamptz)
returns penstock.operations
language plpgsql
as $$
declare
    state penstock.erasures;
    before constant text := operation.phase;
    looked uuid[];
    waiting record;
    archived record;
    step record;
begin
    select * into state from penstock.erasures where erasures.operation = advance_erasure.operation.id for update;
    case operation.phase
        when 'queue' then
            if operation.at_id is null then
                -- A pass that begins while an older transaction is open may miss what that enqueues.
                operation.postponed := case when pg_snapshot_xmin(pg_current_snapshot()) > state.since_xid then 0 else 1 end;
            end if;
            looked := penstock.next_unfinished(operation.at_id, p_limit);
            waiting := penstock.erase_waiting(operation, looked, p_moment);
            operation.postponed := operation.postponed + waiting.left_over;
            operation.counts := penstock.with_count(operation.counts, 'queued', waiting.erased);
            operation.looked_at := operation.looked_at + cardinality(looked);
            operation.at_id := case when cardinality(looked) = p_limit then looked[p_limit] end;
            if operation.at_id is null and operation.postponed = 0 then
                operation.phase := 'archive';
            end if;
        when 'archive' then
            operation.at_day := coalesce(
                operation.at_day, (select min(finished_at at time zone 'UTC')::date from penstock.archived_jobs), (p_moment at time zone 'UTC')::date
            );
            looked := array(
                select job.id from penstock.archived_jobs as job
                where job.finished_at >= operation.at_day::timestamp at time zone 'UTC'
                    and job.finished_at < (operation.at_day + 1)::timestamp at time zone 'UTC'
                    and (operation.at_id is null or job.id > operation.at_id)
                order by job.id
                limit p_limit
            );
            archived := penstock.erase_archived(operation, looked);
            operation.counts := penstock.with_count(operation.counts, 'archived', archived.erased);
            operation.looked_at := operation.looked_at + cardinality(looked);
            operation.at_id := case when cardinality(looked) = p_limit then looked[p_limit] end;
            state.touched := array(select unnest(state.touched) union select unnest(archived.relations) order by 1);
            if operation.at_id is null then
                if operation.at_day < (p_moment at time zone 'UTC')::date then
                    operation.at_day := operation.at_day + 1;
                else
                    operation.phase := 'streams';
                end if;
            end if;
        when 'streams' then
            step := penstock.erase_events(operation, state);
            state := step.state;
            operation.counts := penstock.with_count(operation.counts, 'events', step.erased);
            operation.looked_at := operation.looked_at + step.erased;
            operation.postponed := step.left_over;
            if state.at_stream is null then
                state.at_stream := 0;
                operation.phase := 'messages';
            end if;
        when 'messages' then
            step := penstock.erase_messages(operation, state, p_limit, p_moment);
            state := step.state;
            operation.counts := penstock.with_count(operation.counts, 'messages', step.erased);
            operation.postponed := step.left_over;
            if step.at_end then
                operation.phase := 'signals';
                operation.at_id := null;
                state.vacuum_xid := pg_current_xact_id();
            end if;
        when 'signals' then
            if pg_snapshot_xmin(pg_current_snapshot()) <= state.vacuum_xid then
                operation.postponed := 1;
            else
                step := penstock.erase_signals(operation.at_id, p_limit);
                operation.counts := penstock.with_count(operation.counts, 'rows', step.erased);
                operation.looked_at := operation.looked_at + step.looked;
                operation.postponed := 0;
                operation.at_id := step.reached;
                if operation.at_id is null then
                    operation.phase := 'rest';
                end if;
            end if;
        when 'rest' then
            step := penstock.erase_rest(operation, state.phase_at);
            operation.counts := penstock.with_count(operation.counts, 'standing', step.standing);
            operation.counts := penstock.with_count(operation.counts, 'rows', step.erased);
            operation.postponed := step.left_over;
            if operation.postponed = 0 then
                operation.phase := 'lake';
            end if;
        when 'lake' then
            operation.postponed := 0;
    end case;
    if operation.phase = 'lake' and not exists (select from penstock.lakes where name <> all (state.lakes)) then
        -- Nothing has it any more but the filter of this row.
        operation.phase := 'vacuum';
        operation.filter := operation.filter - '{key,value,job}'::text[];
        state.vacuum_xid := pg_current_xact_id();
    end if;
    operation.done := (select coalesce(sum(count.value::bigint), 0) from jsonb_each_text(operation.counts) as count);
    update penstock.erasures
    set phase_at = case when operation.phase = before then state.phase_at else p_moment end,
        at_stream = state.at_stream,
        at_segment = state.at_segment,
        to_segment = state.to_segment,
        at_message = state.at_message,
        touched = state.touched,
        vacuum_xid = state.vacuum_xid
    where erasures.operation = state.operation;
    return operation;
end
$$;
comment on function penstock.advance_erasure(penstock.operations, integer, timestamptz) is
    'Part of advance_operation: does the next step of an erasure, and returns the operation as it is then.';
