-- The search of the dashboard: jobs that meet all conditions, latest first, with bounded work.
--
-- A search walks along an index, newest first, and looks at no more than p_most jobs. It ends at the last job that it may look at, says
-- which that was, and the next call goes on from there. So its time does not depend on how many jobs there are nor on how many match.
-- Which index that is depends on the conditions:
--
--   jobs that are not finished    in progress: the jobs of the leases. Of a type with up to p_most jobs: all of its jobs, by the indexes of
--                                 the type. Of a job group: its children. Otherwise by id, which grows with the time of the enqueue
--                                 (UUIDv7). Jobs that wait for other jobs stand in a table of their own, which is walked by id too.
--   finished jobs                 Of a job group: its children, by the time at which they finished; those that failed, expired or were
--                                 cancelled by an index of their own. That did not succeed: by the partial index of these, whatever their
--                                 type: by the index of the type a search would look at every job between two failures. Otherwise of one
--                                 type by the time at which they finished, and of several by the number of the transaction that archived
--                                 them.
--
-- The place where a search ended is a text: the column of the order, a bar and the id. Its parts are parameters, never part of a statement.

create or replace function penstock.check_search(p_status text, p_limit integer, p_most integer, p_names text[], p_path text[])
returns void
language plpgsql
immutable
as $$
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'job types');
    perform penstock.check_size(cardinality(p_path), 20, 'fields');
    perform penstock.check_limit(p_limit, 1000);
    perform penstock.check_limit(p_most, 1000000);
    perform penstock.check_status(p_status);
end
$$;
comment on function penstock.check_search(text, integer, integer, text[], text[]) is 'Part of the search: raises PS400 for a status or a bound that there is not.';

create or replace function penstock.check_place(p_after text, p_kind text)
returns void
language plpgsql
stable
as $$
begin
    if p_after is null then
        return;
    end if;
    begin
        perform split_part(p_after, '|', 2)::uuid;
        if p_kind = 'finished_at' then
            perform split_part(p_after, '|', 1)::timestamptz;
        elsif p_kind = 'xid' and split_part(p_after, '|', 1) !~ '^[0-9]{1,19}$' then
            -- PostgreSQL 15 takes anything for an xid8.
            raise data_exception;
        end if;
    exception
        when data_exception then
            raise exception 'invalid place in the search: %', left(p_after, 100)
                using errcode = 'PS400', hint = 'Give the place of the last row of the call before, with the same conditions, or null to begin.';
    end;
end
$$;
comment on function penstock.check_place(text, text) is
    'Part of the search: raises PS400 unless this is null or a place as a search returns them. p_kind: what of a row is its place beside the id; null: nothing.';

create or replace function penstock.field_of(p_data jsonb, p_path text[])
returns text
language sql
immutable
as $$
    select case when jsonb_typeof(p_data #> p_path) not in ('object', 'array') then p_data #>> p_path end
$$;
comment on function penstock.field_of(jsonb, text[]) is
    'Part of the search: a field of a payload as text; null for an object or array, in which there may be fields that a user may not see.';

create or replace function penstock.search_conditions(p_names text[], p_status text, p_key text, p_error text, p_path text[])
returns text
language sql
immutable
as $$
    select concat(
        case when p_names is not null then ' and job.name = any ($1)' end,
        case when p_status is not null then ' and job.status::text = $2' end,
        case when p_key is not null then ' and job.key = $3' end,
        case when p_error is not null then ' and (job.errors -> -1 ->> ''type'' = $7 or strpos(job.errors -> -1 ->> ''message'', $7) > 0)' end,
        case when p_path is not null then ' and penstock.field_of(coalesce(penstock.payload(job.message), job.data), $8) = $9' end
    )
$$;
comment on function penstock.search_conditions(text[], text, text, text, text[]) is
    'Part of the search: the conditions of those of these that are given, on the parameters of search_waiting and search_finished. No part of the text is that of an argument.';

-- Long, since it chooses among five walks and adds only the conditions that are given.
create or replace function penstock.search_waiting(
    p_names text[] default null,
    p_status text default null,
    p_key text default null,
    p_since timestamptz default null,
    p_until timestamptz default null,
    p_worker text default null,
    p_error text default null,
    p_path text[] default null,
    p_value text default null,
    p_after text default null,
    p_limit integer default 50,
    p_most integer default 20000,
    p_workflow uuid default null
)
returns table (id uuid, place text, at timestamptz, found boolean)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    below uuid;
    of_group constant text := case when p_workflow is not null then ' and job.workflow = $13' else '' end;
    source text;
    wanted text;
    counted bigint;
begin
    perform penstock.check_search(p_status, p_limit, p_most, p_names, p_path);
    perform penstock.check_place(p_after, null);
    below := split_part(p_after, '|', 2)::uuid;
    if p_status in ('succeeded', 'failed', 'expired', 'cancelled') then
        return;
    end if;
    if p_status = 'waiting' then
        source := '
            (
                select job.* from penstock.waiting_jobs as job
                where ($10 is null or job.id < $10)' || of_group || '
                order by job.id desc
                limit $12
            )
            union all
            (
                select job.* from penstock.queued_jobs as job
                where job.waits_for is not null and penstock.is_suspended(job) and ($10 is null or job.id < $10)' || of_group || '
                order by job.id desc
                limit $12
            )
            order by id desc
            limit $12';
        p_status := null;
    elsif p_status = 'in-progress' or p_worker is not null then
        -- There are as many of these as workers can hold.
        source := '
            select job.*
            from penstock.leases as lease
            cross join lateral (
                select held.* from penstock.queued_jobs as held
                where lease.jobs is null and held.name = lease.name and held.priority = lease.priority and held.slot is null
                    and held.seq between lease.first_seq and lease.last_seq and held.lease = lease.id
                union all
                select held.* from penstock.queued_jobs as held where held.id = any (lease.jobs) and held.lease = lease.id
            ) as job
            where ($1 is null or lease.name = any ($1)) and ($6 is null or lease.worker = $6)
                and ($10 is null or job.id < $10)
            order by job.id desc
            limit $12';
    elsif p_workflow is not null then
        source := '
            select job.* from penstock.queued_jobs as job
            where ($10 is null or job.id < $10)' || of_group || '
            order by job.id desc
            limit $12';
    else
        if p_names is not null and cardinality(p_names) = 1 then
            select count(*) into counted
            from (
                select from penstock.first_placed(p_names, p_most + 1)
                union all
                select from penstock.first_deferred(p_names, p_most + 1)
                limit p_most + 1
            ) as looked;
        end if;
        if counted <= p_most then
            source := '
                select job.*
                from (
                    select placed.* from penstock.queued_jobs as placed
                    where placed.name = any ($1) and placed.seq is not null and placed.slot is null
                    union all
                    select keyed.* from penstock.queued_jobs as keyed
                    where keyed.name = any ($1) and keyed.seq is not null and keyed.slot is not null
                    union all
                    select deferred.* from penstock.queued_jobs as deferred where deferred.name = any ($1) and deferred.seq is null
                ) as job
                where ($10 is null or job.id < $10)
                order by job.id desc
                limit $12';
        else
            source := '
                select job.* from penstock.queued_jobs as job
                where ($10 is null or job.id < $10)
                order by job.id desc
                limit $12';
        end if;
    end if;
    if p_status is null and p_worker is null and source not like '%waiting_jobs%' then
        source := '
            (' || source || ')
            union all
            (
                select job.* from penstock.waiting_jobs as job
                where ($10 is null or job.id < $10)' || of_group || '
                order by job.id desc
                limit $12
            )
            order by id desc
            limit $12';
    end if;
    wanted := concat(
        penstock.search_conditions(p_names, p_status, p_key, p_error, p_path),
        case when p_status = 'queued' then ' and not penstock.is_suspended(job)' end,
        case when p_since is not null then ' and job.created_at >= $4' end,
        case when p_until is not null then ' and job.created_at < $5' end,
        of_group
    );
    return query execute
        'select job.id, ''|'' || job.id, penstock.shown_time(job.created_at), true from (' || source || ') as job where true' || wanted
        || ' order by job.id desc limit $11'
        using p_names, p_status, p_key, p_since, p_until, p_worker, p_error, p_path, p_value, below, p_limit, p_most, p_workflow;
    get diagnostics counted = row_count;
    if counted < p_limit then
        -- The last job that was looked at, if there may be more behind it.
        return query execute
            'select job.id, ''|'' || job.id, penstock.shown_time(job.created_at), false from (' || source || ') as job order by job.id desc offset $12 - 1'
            using p_names, p_status, p_key, p_since, p_until, p_worker, p_error, p_path, p_value, below, p_limit, p_most, p_workflow;
    end if;
end
$$;
comment on function penstock.search_waiting(text[], text, text, timestamptz, timestamptz, text, text, text[], text, text, integer, integer, uuid) is
    'Jobs that are not finished and meet all conditions that are given, latest first, of the next p_most jobs behind p_after. found: whether the row is such a job; the other one is the last job that was looked at, behind which there may be more. p_error: type of the last error, or a part of its message. p_path and p_value: a field of the payload, and its value as text. p_workflow: the job group of which it is a child. The next call goes on behind the last row: its place is p_after.';

-- Long, since it chooses among three walks and adds only the conditions that are given.
create or replace function penstock.search_finished(
    p_names text[] default null,
    p_status text default null,
    p_key text default null,
    p_since timestamptz default null,
    p_until timestamptz default null,
    p_worker text default null,
    p_error text default null,
    p_path text[] default null,
    p_value text default null,
    p_after text default null,
    p_limit integer default 50,
    p_most integer default 20000,
    p_workflow uuid default null
)
returns table (id uuid, place text, at timestamptz, found boolean)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    unsuccessful constant boolean := p_status is not null and p_status <> 'succeeded';
    by_type constant boolean := p_workflow is null and not unsuccessful and p_names is not null and cardinality(p_names) = 1;
    by_time constant boolean := by_type or unsuccessful or p_workflow is not null;
    placed constant text := case when by_time then 'finished_at' else 'xid' end;
    behind_time timestamptz;
    behind_xid xid8;
    behind_id uuid;
    source text := 'select job.* from penstock.archived_jobs as job where true';
    -- Not in messages: who may not see them may look for a signature.
    by_signature constant boolean := p_error is not null and p_error ~ '^[0-9a-f]{16}$';
    wanted text;
    counted bigint;
begin
    perform penstock.check_search(p_status, p_limit, p_most, p_names, p_path);
    perform penstock.check_place(p_after, placed);
    if p_status in ('waiting', 'queued', 'in-progress') then
        return;
    end if;
    if p_after is not null then
        behind_id := split_part(p_after, '|', 2)::uuid;
        if by_time then
            behind_time := split_part(p_after, '|', 1)::timestamptz;
            source := source || ' and job.finished_at <= $10 and (job.finished_at, job.id) < ($10, $12)';
        else
            behind_xid := split_part(p_after, '|', 1)::xid8;
            source := source || ' and job.xid <= $11 and (job.xid < $11 or job.xid = $11 and job.id < $12)';
        end if;
    end if;
    if p_workflow is not null then
        source := source || ' and job.workflow = $15';
        if unsuccessful then
            source := source || ' and job.status = $2::penstock.archived_job_status';
        end if;
    end if;
    if by_type then
        source := source || ' and job.name = ($1)[1]';
    end if;
    if unsuccessful then
        source := source || ' and job.status <> ''succeeded''';
    end if;
    if p_since is not null then
        source := source || ' and job.finished_at >= $4';
    end if;
    if p_until is not null then
        source := source || ' and job.finished_at < $5';
    end if;
    source := source || format(' order by job.%s desc, job.id desc limit $14', placed);
    wanted := concat(
        penstock.search_conditions(
            case when not by_type then p_names end, p_status, p_key, case when not by_signature then p_error end, p_path
        ),
        case when p_worker is not null then ' and job.worker = $6' end,
        case when by_signature then ' and job.signature = $7' end
    );
    return query execute
        format('select job.id, job.%s || ''|'' || job.id, job.finished_at, true from (%s) as job where true%s limit $13', placed, source, wanted)
        using p_names, p_status, p_key, p_since, p_until, p_worker, p_error, p_path, p_value, behind_time, behind_xid, behind_id, p_limit, p_most, p_workflow;
    get diagnostics counted = row_count;
    if counted < p_limit then
        return query execute
            format('select job.id, job.%s || ''|'' || job.id, job.finished_at, false from (%s) as job offset $14 - 1', placed, source)
            using p_names, p_status, p_key, p_since, p_until, p_worker, p_error, p_path, p_value, behind_time, behind_xid, behind_id, p_limit, p_most, p_workflow;
    end if;
end
$$;
comment on function penstock.search_finished(text[], text, text, timestamptz, timestamptz, text, text, text[], text, text, integer, integer, uuid) is
    'Finished jobs that meet all conditions that are given, latest first, of the next p_most jobs behind p_after. Rows and parameters: see search_waiting; p_since and p_until are times of the end, and a p_error of 16 hexadecimal digits is a signature.';

create or replace function penstock.recent_failures(
    p_names text[] default null, p_since timestamptz default null, p_limit integer default 2000, p_muted boolean default true
)
returns table (id uuid, name text, finished_at timestamptz, reason text, type text, message text)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    most constant integer := 20000;
begin
    perform penstock.check_size(cardinality(p_names), 10000, 'job types');
    perform penstock.check_limit(p_limit, 10000);
    return query
    select
        job.id, job.name, job.finished_at, job.reason, left(job.errors -> -1 ->> 'type', 200), left(job.errors -> -1 ->> 'message', 500)
    from (
        -- All types: see the head of this file.
        select failed.*
        from penstock.archived_jobs as failed
        where failed.status <> 'succeeded' and (p_since is null or failed.finished_at >= p_since)
        order by failed.finished_at desc, failed.id desc
        limit most
    ) as job
    where job.status = 'failed'
        and (p_names is null or job.name = any (p_names))
        and (
            p_muted
            or not exists (select from penstock.muted_failures as muted where muted.name = job.name and muted.signature = job.signature)
        )
    order by job.finished_at desc, job.id desc
    limit p_limit;
end
$$;
comment on function penstock.recent_failures(text[], timestamptz, integer, boolean) is
    'The jobs that failed last, of these types only (null: of all) and not before p_since, of the 20,000 that did not succeed last, with the type and the beginning of the message of the last error: what the dashboard groups by signature. p_muted false: without those that are muted.';
