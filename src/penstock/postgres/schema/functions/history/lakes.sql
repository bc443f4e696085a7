-- Lakes: the manifest of history outside, and what comes back from it.

create or replace function penstock.open_lake(p_name text, p_uri text)
returns penstock.lakes
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    lake penstock.lakes;
begin
    if p_name is null or p_name !~ '^[A-Za-z0-9_.-]{1,100}$' then
        raise exception 'invalid name of a lake: %', coalesce(quote_literal(left(p_name, 100)), 'null')
            using errcode = 'PS400', hint = 'It has 1 to 100 letters, digits, ".", "-" or "_".';
    end if;
    if p_uri is null then
        raise exception 'the lake % has no place', p_name using errcode = 'PS400', hint = 'Give the URI of its folder.';
    end if;
    insert into penstock.lakes (name, uri, created_at, updated_at)
    values (p_name, p_uri, penstock.clock(), penstock.clock())
    on conflict (name) do nothing;
    select * into lake from penstock.lakes where name = p_name;
    if lake.uri <> p_uri then
        raise exception 'the lake % is at %, not at %', p_name, lake.uri, p_uri
            using errcode = 'PS409', hint = 'Give its own place, or another name for a second lake.';
    end if;
    return lake;
end
$$;
comment on function penstock.open_lake(text, text) is
    'A lake of history at a place; made when it is not known. From then on prune keeps what is not in it, until its column guards is set to false.';

create or replace function penstock.drop_lake(p_name text)
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    delete from penstock.lakes where name = p_name
$$;
comment on function penstock.drop_lake(text) is 'Forgets a lake and what came back from it. Its files stay.';

create or replace function penstock.lake_sketches(p_lake text, p_names text[], p_minutes timestamptz[])
returns table (name text, minute timestamptz, delay_sketch bytea, run_sketch bytea, hot_keys jsonb)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(greatest(cardinality(p_names), cardinality(p_minutes)), 1000000, 'rollups');
    select rollups.name, rollups.minute, rollups.delay_sketch, rollups.run_sketch, rollups.hot_keys
    from unnest(p_names, p_minutes) as wanted (name, minute)
    join penstock.rollups on rollups.lake = p_lake and rollups.name = wanted.name and rollups.minute = wanted.minute
$$;
comment on function penstock.lake_sketches(text, text[], timestamptz[]) is 'What a batch has to merge its sketches with.';

create or replace function penstock.check_lake_files(p_files jsonb)
returns void
language plpgsql
as $$
declare
    example constant text := '{"kind": "jobs", "day": "2026-11-22", "type": "invoice", "path": "jobs/1.parquet", "rows": 5, "bytes": 900}';
    file jsonb;
begin
    perform penstock.check_documents(p_files, array['kind', 'day', 'type', 'path', 'rows', 'bytes'], 'file', example);
    for file in select jsonb_array_elements(p_files) loop
        begin
            if not coalesce(file ->> 'kind' in ('jobs', 'attempts', 'rollups', 'runs'), false) or (file ->> 'day')::date is null
                or (file ->> 'type') is null or (file ->> 'path') is null or (file ->> 'rows')::bigint is null or (file ->> 'bytes')::bigint is null then
                raise data_exception;
            end if;
        exception
            when data_exception then
                raise exception 'invalid file: %', left(file::text, 200)
                    using errcode = 'PS400', hint = 'Give each file like ' || example || '.';
        end;
    end loop;
end
$$;
comment on function penstock.check_lake_files(jsonb) is 'Part of commit_lake_batch and swap_lake_files: raises PS400 unless these are files.';

create or replace function penstock.add_lake_files(p_lake text, p_batch bigint, p_files jsonb)
returns void
language sql
as $$
    insert into penstock.lake_files (lake, kind, day, type, path, batch, rows, bytes)
    select p_lake, file.kind, file.day, file.type, file.path, p_batch, file.rows, file.bytes
    from jsonb_to_recordset(p_files) as file (kind text, day date, type text, path text, rows bigint, bytes bigint)
$$;
comment on function penstock.add_lake_files(text, bigint, jsonb) is 'Part of commit_lake_batch and swap_lake_files: notes files.';

create or replace function penstock.ended_runs(p_seen text, p_until pg_snapshot)
returns table (
    id uuid, name text, workflow text, status text, retry_of text, started_at timestamptz, finished_at timestamptz,
    duration_s double precision, steps bigint, shared bigint, succeeded bigint, failed bigint, cancelled bigint, expired bigint
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        run.id, case when run.name_erased then 'erased' else run.name end, run.graph, run.status::text,
        (select case when before.name_erased then 'erased' else before.name end from penstock.job_groups as before where before.id = run.retry_of),
        run.created_at, run.finished_at, extract(epoch from run.finished_at - run.created_at)::double precision, steps.number, steps.shared,
        run.succeeded, run.failed, run.cancelled, run.expired
    from penstock.job_groups as run
    cross join lateral (
        select count(*) as number, count(*) filter (where step.shared) as shared from penstock.graph_steps as step where step.run = run.id
    ) as steps
    where run.ended_xid >= coalesce(pg_snapshot_xmin(nullif(p_seen, '')::pg_snapshot), '0'::xid8)
        and run.ended_xid < pg_snapshot_xmax(p_until)
        and pg_visible_in_snapshot(run.ended_xid, p_until)
        and (nullif(p_seen, '') is null or not pg_visible_in_snapshot(run.ended_xid, nullif(p_seen, '')::pg_snapshot))
    order by run.finished_at, run.id
$$;
comment on function penstock.ended_runs(text, pg_snapshot) is
    'The runs of workflows that ended between two positions in the archive: those which p_until sees and p_seen (empty: the beginning) does not. Of a batch of history, in commit order, as its jobs are.';

create or replace function penstock.commit_lake_batch(
    p_lake text, p_batch bigint, p_seen text, p_jobs bigint, p_files jsonb, p_rollups jsonb, p_use jsonb, p_failures jsonb,
    p_erasures bigint default null, p_runs jsonb default '[]'
)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    update penstock.lakes
    set batch = p_batch, seen = p_seen, jobs = jobs + p_jobs, updated_at = penstock.clock()
    where name = p_lake and batch < p_batch;
    if not found then
        return false;
    end if;
    if p_erasures <> (select erasures from penstock.lakes where name = p_lake) then
        raise exception 'jobs were erased from the lake % while its batch % was under way', p_lake, p_batch
            using errcode = 'PS409', hint = 'Read the batch again.';
    end if;
    perform penstock.check_lake_files(p_files);
    perform penstock.add_lake_files(p_lake, p_batch, p_files);

    insert into penstock.rollups as known
    select
        p_lake, new.name, new.minute, new.succeeded, new.failed, new.expired, new.cancelled, new.retries, new.delay_s, new.run_s,
        decode(new.delay_sketch, 'base64'), decode(new.run_sketch, 'base64'),
        new.delay_p50, new.delay_p95, new.delay_p99, new.run_p50, new.run_p95, new.run_p99, new.hot_keys
    from jsonb_to_recordset(p_rollups) as new (
        name text, minute timestamptz, succeeded bigint, failed bigint, expired bigint, cancelled bigint, retries bigint,
        delay_s double precision, run_s double precision, delay_sketch text, run_sketch text,
        delay_p50 double precision, delay_p95 double precision, delay_p99 double precision,
        run_p50 double precision, run_p95 double precision, run_p99 double precision, hot_keys jsonb
    )
    on conflict (lake, name, minute) do update
    -- Counts add up; sketches, and what is read from them, come merged.
    set succeeded = known.succeeded + excluded.succeeded,
        failed = known.failed + excluded.failed,
        expired = known.expired + excluded.expired,
        cancelled = known.cancelled + excluded.cancelled,
        retries = known.retries + excluded.retries,
        delay_s = known.delay_s + excluded.delay_s,
        run_s = known.run_s + excluded.run_s,
        delay_sketch = excluded.delay_sketch,
        run_sketch = excluded.run_sketch,
        delay_p50 = excluded.delay_p50,
        delay_p95 = excluded.delay_p95,
        delay_p99 = excluded.delay_p99,
        run_p50 = excluded.run_p50,
        run_p95 = excluded.run_p95,
        run_p99 = excluded.run_p99,
        hot_keys = excluded.hot_keys;

    insert into penstock.worker_use as known
    select p_lake, new.worker, new.minute, new.jobs, new.busy_s
    from jsonb_to_recordset(p_use) as new (worker text, minute timestamptz, jobs bigint, busy_s double precision)
    on conflict (lake, worker, minute) do update
    set jobs = known.jobs + excluded.jobs, busy_s = known.busy_s + excluded.busy_s;

    insert into penstock.failure_signatures as known
    select
        p_lake, new.signature, new.name, new.day, new.kind, new.message, new.sample, new.sample_id, new.failures, new.first_at, new.last_at
    from jsonb_to_recordset(p_failures) as new (
        signature text, name text, day date, kind text, message text, sample text, sample_id uuid, failures bigint,
        first_at timestamptz, last_at timestamptz
    )
    on conflict (lake, name, signature, day) do update
    set failures = known.failures + excluded.failures,
        first_at = least(known.first_at, excluded.first_at),
        last_at = greatest(known.last_at, excluded.last_at);

    insert into penstock.run_history
    select
        p_lake, new.id, new.name, new.workflow, new.status, new.retry_of, new.started_at, new.finished_at, new.duration_s, new.steps,
        new.shared, new.succeeded, new.failed, new.cancelled, new.expired
    from jsonb_populate_recordset(null::penstock.run_history, p_runs) as new;
    return true;
end
$$;
comment on function penstock.commit_lake_batch(text, bigint, text, bigint, jsonb, jsonb, jsonb, jsonb, bigint, jsonb) is
    'Makes the files of a batch part of a lake, and its rollups, worker use, failures and runs of workflows known: all at once, and once. False when the batch is in the lake already. p_erasures: lakes.erasures from before the batch was read; PS409 when it has grown, since the batch may have jobs that are erased.';

create or replace function penstock.erase_lake_file(p_lake text, p_path text, p_files jsonb)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    gone penstock.lake_files;
begin
    perform from penstock.lakes where name = p_lake for update;
    delete from penstock.lake_files where lake = p_lake and path = p_path returning * into gone;
    if not found then
        raise exception 'the lake % has no file %', p_lake, left(p_path, 1000)
            using errcode = 'PS409', hint = 'The lake changed meanwhile: erase again.';
    end if;
    perform penstock.add_lake_files(p_lake, gone.batch, p_files);
    if gone.kind = 'jobs' then
        update penstock.lakes
        set jobs = jobs - gone.rows + (select coalesce(sum(file.rows), 0) from jsonb_to_recordset(p_files) as file (rows bigint))
        where name = p_lake;
    end if;
end
$$;
comment on function penstock.erase_lake_file(text, text, jsonb) is
    'Part of erasures: puts a file with fewer rows, or none, in the place of one. PS409 when the lake does not have that file.';

create or replace function penstock.fence_lake(p_lake text, p_batch bigint, p_subject jsonb, p_ids uuid[])
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_size(cardinality(p_ids), 1000000, 'jobs');
    update penstock.lakes set erasures = erasures + 1 where name = p_lake and batch = p_batch;
    if not found then
        raise exception 'the lake % got another batch than %', p_lake, p_batch
            using errcode = 'PS409', hint = 'The lake changed meanwhile: erase again.';
    end if;
    update penstock.failure_signatures
    set sample = 'erased', sample_id = '00000000-0000-0000-0000-000000000000'
    where lake = p_lake and sample_id = any (p_ids);
    if p_subject ?| '{key,value,job}' then
        perform penstock.erase_words(p_subject);
    end if;
end
$$;
comment on function penstock.fence_lake(text, bigint, jsonb, uuid[]) is
    'Part of erasures: from here on the commit of a batch that was read before is refused, and what came back from the lake has nothing of these jobs. PS409 when the lake has another last batch than p_batch, whose files have to be looked at first.';

create or replace function penstock.finish_lake(p_operation uuid, p_lake text, p_jobs bigint)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    update penstock.erasures set lakes = lakes || p_lake where operation = p_operation and p_lake <> all (lakes);
    if found then
        update penstock.operations
        set counts = penstock.with_count(counts, 'lake', p_jobs), updated_at = penstock.clock()
        where id = p_operation and state = 'running';
    end if;
end
$$;
comment on function penstock.finish_lake(uuid, text, bigint) is
    'Part of erasures: notes that a lake is done, and how many of its jobs were erased.';

create or replace function penstock.swap_lake_files(p_lake text, p_gone text[], p_batch bigint, p_files jsonb)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    rows_gone bigint;
    rows_new bigint;
    files_gone bigint;
begin
    perform penstock.check_size(cardinality(p_gone), 100000, 'files');
    perform penstock.check_lake_files(p_files);
    perform from penstock.lakes where name = p_lake for update;
    with gone as (
        delete from penstock.lake_files where lake = p_lake and path = any (p_gone) returning rows
    )
    select sum(gone.rows), count(*) into rows_gone, files_gone from gone;
    select sum(file.rows) into rows_new from jsonb_to_recordset(p_files) as file (rows bigint);
    if files_gone <> cardinality(p_gone) or rows_gone is distinct from rows_new then
        raise exception 'the files to replace have % rows in % files, the new ones %', rows_gone, files_gone, rows_new
            using errcode = 'PS409', hint = 'The lake changed meanwhile: compact again.';
    end if;
    perform penstock.add_lake_files(p_lake, p_batch, p_files);
    return true;
end
$$;
comment on function penstock.swap_lake_files(text, text[], bigint, jsonb) is 'Part of compaction: puts new files with the same rows in the place of others.';

create or replace function penstock.failure_report(p_lake text, p_until date, p_days integer default 7)
returns table (
    name text, kind text, message text, signature text, failures bigint, failures_before bigint, new boolean, sample text, sample_id uuid,
    first_at timestamptz, last_at timestamptz
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_limit(p_days, 3660, 'number of days');
    select
        found.name,
        min(found.kind),
        min(found.message),
        found.signature,
        coalesce(sum(found.failures) filter (where found.day > p_until - p_days), 0)::bigint,
        coalesce(sum(found.failures) filter (where found.day <= p_until - p_days and found.day > p_until - 2 * p_days), 0)::bigint,
        min(found.day) > p_until - p_days,
        (array_agg(found.sample order by found.day desc))[1],
        (array_agg(found.sample_id order by found.day desc))[1],
        min(found.first_at),
        max(found.last_at)
    from penstock.failure_signatures as found
    where found.lake = p_lake and found.day <= p_until
    group by found.name, found.signature
    having coalesce(sum(found.failures) filter (where found.day > p_until - p_days), 0) > 0
    order by 5 desc, found.name, found.signature
$$;
comment on function penstock.failure_report(text, date, integer) is
    'What went wrong in the p_days up to p_until, beside the p_days before; new: not seen before these days, as far as prune_history has left them.';
