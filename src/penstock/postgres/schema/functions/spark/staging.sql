-- The staged write: rows that tasks have copied to staged_jobs become jobs, once.

create or replace function penstock.parts_of(p_epoch bigint, p_target text)
returns text
language sql
immutable
as $$
    -- So that a writer's writes of one number to several targets do not clear away each other's rows.
    select p_epoch || '.' || left(md5(p_target), 8) || '.'
$$;
comment on function penstock.parts_of(bigint, text) is 'How the names of all parts begin that are staged for an epoch and a target.';

create or replace function penstock.note_epoch(
    p_writer text, p_target text, p_epoch bigint, p_rows bigint, p_query text, p_offsets jsonb, p_by_column boolean default false
)
returns boolean
language plpgsql
as $$
declare
    -- The functions run with the rights of the schema's owner; this is who called them.
    caller constant text := session_user;
    before penstock.sink_epochs;
begin
    if p_writer is null or length(p_writer) not between 1 and 200 then
        raise exception 'invalid writer: %', coalesce(quote_literal(left(p_writer, 100)), 'null')
            using errcode = 'PS400', hint = 'The name of a writer has 1 to 200 characters.';
    end if;
    if p_target is null or length(p_target) not between 1 and 200 then
        raise exception 'invalid target: %', coalesce(quote_literal(left(p_target, 100)), 'null')
            using errcode = 'PS400', hint = 'It is what is written, such as job invoice or stream orders, in 1 to 200 characters.';
    end if;
    if p_epoch is null then
        raise exception 'writer % has no epoch', quote_literal(p_writer)
            using errcode = 'PS400', hint = 'Number the writes of a writer: a number that was written before, or a lower one, is not written again.';
    end if;
    if p_rows is null then
        raise exception 'writer % does not say how many rows it has staged', quote_literal(p_writer)
            using errcode = 'PS400', hint = 'Give their number, so that rows which are missing are noticed.';
    end if;
    insert into penstock.sink_epochs as noted (role, writer, target, epoch, jobs, query, offsets, by_column, committed_at)
    values (caller, p_writer, p_target, p_epoch, p_rows, p_query, p_offsets, p_by_column, penstock.clock())
    on conflict (writer, target, role) do update
    set epoch = excluded.epoch, jobs = excluded.jobs, query = excluded.query, offsets = excluded.offsets,
        by_column = excluded.by_column, handed_over = false, committed_at = excluded.committed_at
    where case
        when noted.handed_over then excluded.query <> noted.query
        else noted.epoch < excluded.epoch and noted.query is not distinct from excluded.query
    end;
    if found then
        return true;
    end if;
    select * into before from penstock.sink_epochs as noted where noted.writer = p_writer and noted.target = p_target and noted.role = caller;
    if found and before.offsets ->> 'driver' = p_offsets ->> 'driver' and before.offsets ->> 'write' <> p_offsets ->> 'write' then
        raise exception 'Spark job % writes to % more than once, and this is not the first write', p_offsets ->> 'job', p_target
            using errcode = 'PS409', hint = 'Number the writes of a Spark job to one target: option("epoch", 1), option("epoch", 2).';
    end if;
    if found and before.handed_over then
        raise exception '% was handed over after batch % of the query %, and this is %',
            p_writer, before.epoch, before.query, case when p_query is null then 'a batch write' else 'that query' end
            using errcode = 'PS409', hint = 'What it writes from now on is the part of the query that takes the name over. Stop this one.';
    end if;
    if found and before.query is distinct from p_query then
        raise exception '% is written to % by %, up to batch %, and this is %',
            p_writer, p_target, coalesce('the query ' || before.query, 'batch writes'), before.epoch, coalesce('the query ' || p_query, 'a batch write')
            using errcode = 'PS409',
                  hint = format(
                      'A query is known by its checkpoint. Go on with the checkpoint of the other one; or leave writer out, or give another name, and everything that this one reads is written%s.',
                      case
                          when before.query is null then ''
                          else format(
                              '; or have it take over the name and begin where the other one ended: penstock streams writers takeover %s',
                              -- As a shell takes it.
                              '''' || replace(p_writer, '''', '''"''"''') || ''''
                          )
                      end
                  );
    end if;
    return false;
end
$$;
comment on function penstock.note_epoch(text, text, bigint, bigint, text, jsonb, boolean) is
    'Part of commit_staged and commit_staged_events: notes a batch of a writer to a target. False when it, or a later one, was noted before. PS409 when the name belongs to another query, or was handed over by this one.';

create or replace function penstock.note_targets(
    p_writer text, p_target text, p_epoch bigint, p_rows bigint, p_named jsonb, p_query text, p_offsets jsonb
)
returns jsonb
language plpgsql
as $$
declare
    -- A write whose rows say what they are for is noted for each of these, as if it were a write to that alone.
    by_column constant boolean := coalesce(p_target in ('jobs', 'streams'), false);
    kind constant text := case when by_column then rtrim(p_target, 's') else split_part(p_target, ' ', 1) end;
    named constant jsonb := coalesce(p_named, jsonb_build_object(coalesce(substr(p_target, length(kind) + 2), ''), jsonb_build_object('rows', p_rows)));
    noted jsonb := '{}';
    target record;
begin
    if p_writer is null or p_target is null or jsonb_typeof(named) <> 'object' or (by_column and p_named is null) then
        raise exception 'it is not said which % writer % writes to', coalesce(p_target, 'targets'), coalesce(quote_literal(left(p_writer, 100)), 'null')
            using errcode = 'PS400', hint = 'Give p_named: {"orders": {"rows": 5}}.';
    end if;
    if not by_column and named - substr(p_target, length(kind) + 2) <> '{}' then
        raise exception 'writer % writes to %, and p_named has something else', quote_literal(left(p_writer, 100)), left(p_target, 100)
            using errcode = 'PS400', hint = 'A write to several job types or streams has the target jobs or streams.';
    end if;
    perform penstock.check_size((select count(*) from jsonb_object_keys(named)), 10000, 'targets');
    -- In the order of names, so that two writers do not lock each other.
    for target in select key as name, value as one from jsonb_each(named) order by key loop
        if penstock.note_epoch(
            p_writer, case when by_column then kind || ' ' || target.name else p_target end, p_epoch,
            substring(target.one ->> 'rows' from '^[0-9]{1,18}$')::bigint, p_query, p_offsets, by_column
        ) then
            noted := noted || jsonb_build_object(target.name, target.one);
        end if;
    end loop;
    if by_column then
        -- A batch may have no rows for some of the targets, so where the writer stands is noted for the write as a whole.
        perform penstock.note_epoch(p_writer, p_target, p_epoch, coalesce(p_rows, 0), p_query, p_offsets, true);
    end if;
    return noted;
end
$$;
comment on function penstock.note_targets(text, text, bigint, bigint, jsonb, text, jsonb) is
    'Part of commit_staged and commit_staged_events: note_epoch for each job type or stream that a batch writes to. Returns those of p_named that were noted now, and are therefore to be written.';

create or replace function penstock.check_staged(p_writer text, p_target text, p_named jsonb, p_noted jsonb, p_staged jsonb)
returns bigint
language plpgsql
immutable
as $$
declare
    what constant text := case when p_target like 'job%' then 'jobs' else 'events' end;
    wrong record;
begin
    select key as name into wrong from jsonb_each(p_staged)
    where not p_noted ? key and not coalesce(p_named ? key, false) order by key limit 1;
    if found then
        raise exception 'writer % has staged % for %, which the write to % does not name',
            quote_literal(left(p_writer, 100)), what, left(wrong.name, 100), left(p_target, 100)
            using errcode = 'PS400', hint = 'Each row is for the target of its write; name all of them in p_named when a column says which.';
    end if;
    select key as name, coalesce(p_staged ->> key, '0') as present, value ->> 'rows' as rows into wrong from jsonb_each(p_noted)
    where coalesce(p_staged ->> key, '0') is distinct from value ->> 'rows' order by key limit 1;
    if found then
        raise exception '% of % staged % of % are there', wrong.present, coalesce(wrong.rows, 'null'), what, p_writer
            using errcode = 'PS409', hint = 'The server crashed since they were staged: write the batch again.';
    end if;
    return (select coalesce(sum((value ->> 'rows')::bigint), 0) from jsonb_each(p_noted));
end
$$;
comment on function penstock.check_staged(text, text, jsonb, jsonb, jsonb) is
    'Part of commit_staged and commit_staged_events: p_staged has the number of staged rows by job type or stream. Raises PS400 when there is one that the write does not name, PS409 when some are missing. Returns how many are to be written.';

create or replace function penstock.insert_staged(p_writer text, p_parts text[], p_moment timestamptz)
returns void
language plpgsql
as $$
declare
    kind record;
    job_type penstock.jobs;
    one_part text;
    doubtful boolean;
begin
    for kind in
        select staged.name, coalesce(staged.priority, 0::smallint) as priority, count(*) as jobs
        from penstock.staged_jobs as staged
        where staged.writer = p_writer and staged.role = session_user and staged.part = any (p_parts)
        group by 1, 2
        order by 1, 2
    loop
        job_type := penstock.require_type(kind.name);
        if job_type.encrypted and exists (
            select
            from penstock.staged_jobs as staged
            where staged.writer = p_writer and staged.role = session_user and staged.part = any (p_parts) and staged.name = kind.name
                and not penstock.is_envelope(staged.data::jsonb)
        ) then
            -- Staged before the type was encrypted.
            perform penstock.refuse_plain('job type ' || kind.name, array['null'::jsonb]);
        end if;
        insert into penstock.type_priorities (name, priority)
        select kind.name, kind.priority
        where not exists (select from penstock.type_priorities where type_priorities.name = kind.name and type_priorities.priority = kind.priority);
        foreach one_part in array p_parts loop
            -- In order of the index, so that nothing is sorted and the queue has the order of the source.
            with inserted as (
                insert into penstock.queued_jobs
                select (
                    penstock.new_job(
                        coalesce(staged.made, penstock.new_id()), kind.name, staged.data::jsonb, p_moment, job_type.max_attempts,
                        staged.run_after, staged.expires_at, staged.key, kind.priority
                    )
                ).*
                from penstock.staged_jobs as staged
                where staged.writer = p_writer
                    and staged.role = session_user
                    and staged.part = one_part
                    and staged.name = kind.name
                    and coalesce(staged.priority, 0::smallint) = kind.priority
                order by staged.place
                returning
                    pg_column_size(data) > 16384
                        or strpos(data::text, '0000000000000000000000000000000000000000000000000000000000000000') > 0 as doubtful
            )
            select bool_or(inserted.doubtful) into doubtful from inserted;
            if doubtful then
                perform penstock.refuse_staged(p_writer, array[one_part], p_moment);
                perform penstock.note_large(kind.name);
            end if;
        end loop;
        perform penstock.wake_claimers(kind.name, least(kind.jobs, 1000)::integer);
    end loop;
end
$$;
comment on function penstock.insert_staged(text, text[], timestamptz) is
    'Part of commit_staged: the fast way, for jobs of queues that have neither ids nor unique keys, so that there is nothing to meet.';

create or replace function penstock.enqueue_staged(p_writer text, p_parts text[])
returns bigint
language plpgsql
as $$
declare
    chunk record;
    unusual bigint;
    taken text;
    known bigint := 0;
begin
    for chunk in
        -- Chunks of a size that a call takes, also when each row is large.
        with sized as (
            select
                staged.*,
                row_number() over staging as row_place,
                sum(octet_length(staged.data)) over staging as bytes
            from penstock.staged_jobs as staged
            where staged.writer = p_writer and staged.role = session_user and staged.part = any (p_parts)
            window staging as (partition by staged.name order by staged.part, staged.place)
        )
        select
            sized.name as job_name,
            array_agg(sized.data::jsonb order by sized.row_place) as data,
            case when bool_or(sized.id is not null) then array_agg(coalesce(sized.id::uuid, sized.made, penstock.new_id()) order by sized.row_place) end as ids,
            case when bool_or(sized.key is not null) then array_agg(sized.key order by sized.row_place) end as keys,
            case when bool_or(sized.priority is not null) then array_agg(sized.priority order by sized.row_place) end as priorities,
            case when bool_or(sized.run_after is not null) then array_agg(sized.run_after order by sized.row_place) end as run_after,
            case when bool_or(sized.expires_at is not null) then array_agg(sized.expires_at order by sized.row_place) end as expires_at,
            case when bool_or(sized.unique_key is not null) then array_agg(sized.unique_key order by sized.row_place) end as unique_keys
        from sized
        group by sized.name, (sized.row_place - 1) / 25000, sized.bytes / 50000000
        order by sized.name, min(sized.row_place)
    loop
        select count(*), min(enqueued.id::text) filter (where enqueued.outcome = 'taken') into unusual, taken
        from penstock.enqueue_many(
            chunk.job_name, chunk.data, chunk.ids, chunk.keys, chunk.priorities, chunk.run_after, chunk.expires_at, chunk.unique_keys
        ) as enqueued
        where enqueued.outcome <> 'queued';
        if taken is not null then
            raise exception 'the id % of a row for % belongs to another job', taken, chunk.job_name
                using errcode = 'PS409', hint = 'Derive the ids of rows from the data and the job type, so that every job has an id of its own.';
        end if;
        known := known + unusual;
    end loop;
    return known;
end
$$;
comment on function penstock.enqueue_staged(text, text[]) is
    'Part of commit_staged: enqueues what these parts have staged by enqueue_many, as jobs with ids, unique keys or slots need it. Returns how many there were already.';

create or replace function penstock.commit_staged(
    p_writer text,
    p_epoch bigint,
    p_parts text[],
    p_rows bigint,
    p_target text,
    p_query text default null,
    p_offsets jsonb default null,
    p_named jsonb default null
)
returns table (queued bigint, known bigint)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    noted jsonb;
    present jsonb;
    careful boolean;
    doubtful boolean;
begin
    perform penstock.check_size(cardinality(p_parts), 1000000, 'parts');
    noted := penstock.note_targets(p_writer, p_target, p_epoch, p_rows, p_named, p_query, p_offsets);
    queued := 0;
    known := 0;
    if noted <> '{}' and p_rows > 0 then
        -- One look at everything: how many there are, what has to be enqueued with checks of its own, and what the rules of enqueue refuse.
        select
            coalesce(jsonb_object_agg(by_type.name, by_type.jobs), '{}'),
            coalesce(bool_or(by_type.careful), false) or exists (select from penstock.pools where noted ? pools.name)
                or exists (select from penstock.jobs where noted ? jobs.name and jobs.max_waiting is not null),
            coalesce(bool_or(by_type.doubtful), false)
        into present, careful, doubtful
        from (
            select
                name,
                count(*) as jobs,
                bool_or(id is not null or unique_key is not null) as careful,
                bool_or(
                    octet_length(data) > 1048576
                    or run_after <> penstock.shown_time(run_after)
                    or expires_at <> penstock.shown_time(expires_at)
                    or not penstock.is_key(key)
                    or priority not between -100 and 100
                ) as doubtful
            from penstock.staged_jobs
            where writer = p_writer and role = session_user and part = any (p_parts)
            group by name
        ) as by_type;
        p_rows := penstock.check_staged(p_writer, p_target, p_named, noted, present);
        if (select count(*) from jsonb_object_keys(present)) > (select count(*) from jsonb_object_keys(noted)) then
            -- Some of the job types have got this batch before.
            delete from penstock.staged_jobs
            where writer = p_writer and role = session_user and part = any (p_parts) and not noted ? name;
        end if;
        begin
            if doubtful then
                perform penstock.refuse_staged(p_writer, p_parts, moment);
            end if;
            if careful then
                known := penstock.enqueue_staged(p_writer, p_parts);
            else
                perform penstock.insert_staged(p_writer, p_parts, moment);
            end if;
        exception
            when data_exception then
                perform penstock.refuse_unreadable(p_writer, p_parts);
                raise;
        end;
        queued := p_rows - known;
    end if;
    -- Of this epoch, and what attempts that did not count or crashed writers have left.
    delete from penstock.staged_jobs where writer = p_writer and role = session_user and (part = any (p_parts) or starts_with(part, penstock.parts_of(p_epoch, p_target)));
    return next;
end
$$;
comment on function penstock.commit_staged(text, bigint, text[], bigint, text, text, jsonb, jsonb) is
    'Enqueues what these parts have staged, p_rows jobs in all, unless the writer has committed this epoch or a later one to this target (see note_epoch). When the target is jobs, p_named has the job types, as {"invoice": {"rows": 5}}, and each is a target of its own. One transaction. Returns how many were queued, and how many there were already (by id or unique key).';

create or replace function penstock.discard_staged(p_writer text, p_epoch bigint, p_target text)
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    delete from penstock.staged_jobs where writer = p_writer and role = session_user and starts_with(part, penstock.parts_of(p_epoch, p_target));
    delete from penstock.staged_events where writer = p_writer and role = session_user and starts_with(part, penstock.parts_of(p_epoch, p_target));
$$;
comment on function penstock.discard_staged(text, bigint, text) is 'Drops the rows that were staged for an aborted epoch of a writer and a target.';

create or replace function penstock.prune_staged()
returns bigint
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    pruned bigint;
    pruned_chunks bigint;
    pruned_loads bigint;
begin
    delete from penstock.staged_jobs
    where ctid = any (array(select old.ctid from penstock.staged_jobs as old where old.staged_at < clock_timestamp() - interval '1 day' limit 100000));
    get diagnostics pruned = row_count;
    delete from penstock.staged_events
    where ctid = any (array(select old.ctid from penstock.staged_events as old where old.staged_at < clock_timestamp() - interval '1 day' limit 1000));
    get diagnostics pruned_chunks = row_count;
    delete from penstock.loaded_chunks
    where ctid = any (array(select old.ctid from penstock.loaded_chunks as old where old.loaded_at < clock_timestamp() - interval '1 day' limit 1000));
    get diagnostics pruned_loads = row_count;
    return pruned + pruned_chunks + pruned_loads;
end
$$;
comment on function penstock.prune_staged() is 'Drops what was staged or loaded more than a day ago by writers that never came back: up to 100,000 jobs and 2,000 chunks of events in a call. Returns how many rows.';
