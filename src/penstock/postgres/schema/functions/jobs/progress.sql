-- What a running job says of itself: its progress, and lines of its log. Neither waits for a transaction that holds the row of a job, such as
-- one that is about to finish it: the other jobs of the call would wait too.

create or replace function penstock.lock_held_jobs(p_ids uuid[], p_leases bigint[], p_wait boolean)
returns uuid[]
language plpgsql
as $$
declare
    held uuid[];
begin
    -- The answer to an extend may be under way: the client that knows the lease which it renewed has the job.
    if p_wait then
        select array_agg(locked.id) into held
        from (
            select job.id
            from unnest(p_ids, p_leases) as given (id, lease)
            join penstock.queued_jobs as job on job.id = given.id
            left join penstock.leases as lease on lease.id = job.lease
            where job.status = 'in-progress' and given.lease in (job.lease, lease.renews)
            for update of job
        ) as locked;
    else
        select array_agg(locked.id) into held
        from (
            select job.id
            from unnest(p_ids, p_leases) as given (id, lease)
            join penstock.queued_jobs as job on job.id = given.id
            left join penstock.leases as lease on lease.id = job.lease
            where job.status = 'in-progress' and given.lease in (job.lease, lease.renews)
            for update of job skip locked
        ) as locked;
    end if;
    return coalesce(held, '{}');
end
$$;
comment on function penstock.lock_held_jobs(uuid[], bigint[], boolean) is
    'Part of report_progress, append_log, write_steps and begin_waits: locks those of the jobs that are held under these leases, and returns them; p_wait: also those that other transactions have locked.';

create or replace function penstock.jobs_held_elsewhere(p_ids uuid[], p_leases bigint[], p_locked uuid[])
returns setof uuid
language sql
stable
as $$
    select job.id
    from unnest(p_ids, p_leases) as given (id, lease)
    join penstock.queued_jobs as job on job.id = given.id
    left join penstock.leases as lease on lease.id = job.lease
    where job.status = 'in-progress' and given.lease in (job.lease, lease.renews)
    except
    select unnest(p_locked)
$$;
comment on function penstock.jobs_held_elsewhere(uuid[], bigint[], uuid[]) is
    'Part of report_progress and append_log, after lock_held_jobs: those of the jobs that are held under these leases, but that other transactions have locked. Nothing is known of them yet.';

create or replace function penstock.report_progress(
    p_ids uuid[], p_leases bigint[], p_progress jsonb[], p_wait boolean default false
)
returns setof uuid
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    held uuid[];
begin
    perform penstock.check_size(greatest(cardinality(p_ids), cardinality(p_leases), cardinality(p_progress)), 100000, 'jobs');
    perform penstock.check_lists(array[array_dims(p_ids), array_dims(p_leases), array_dims(p_progress)]);
    if coalesce(cardinality(p_ids), 0) > 0 and (p_leases is null or array_position(p_leases, null) is not null) then
        raise exception 'the progress of a job is to be noted without its lease'
            using errcode = 'PS400', hint = 'Give the lease that claim or extend returned for each job.';
    end if;
    perform penstock.check_each_json(p_progress, 'the progress of a job');
    if penstock.any_encrypted(p_ids) then
        p_progress := penstock.sealed_details(p_ids, p_progress);
    end if;
    -- Once for the whole call, before the update: a volatile function in its condition would run for each of its rows.
    held := penstock.lock_held_jobs(p_ids, p_leases, coalesce(p_wait, false));
    update penstock.queued_jobs as job
    set progress = given.progress,
        updated_at = penstock.clock()
    from (
        -- Grouped, not joined: each id is looked at once, however many there are.
        select every.id, (array_agg(every.progress order by every.place desc nulls last))[1] as progress
        from (
            select reported.id, reported.progress, reported.place
            from unnest(p_ids, p_progress) with ordinality as reported (id, progress, place)
            union all
            select locked.id, null, null
            from unnest(held) as locked (id)
        ) as every
        group by every.id
        having bool_or(every.place is null)
    ) as given
    where job.id = given.id;
    return query select * from penstock.jobs_held_elsewhere(p_ids, p_leases, held) where p_wait is not true;
end
$$;
comment on function penstock.report_progress(uuid[], bigint[], jsonb[], boolean) is
    'Notes how far running jobs are, any JSON; shown beside the job. Of a job that is given more than once the last one counts. p_leases: the lease under which each is held; a job that is held under another one belongs to another worker, and stays as it is. p_wait false: does not wait for jobs that other transactions have locked, and returns them: their progress is not noted.';

create or replace function penstock.append_log(
    p_ids uuid[], p_leases bigint[], p_lines text[], p_ages double precision[] default null, p_wait boolean default true
)
returns setof uuid
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    held uuid[];
    encrypted constant boolean := penstock.any_encrypted(p_ids);
begin
    perform penstock.check_size(greatest(cardinality(p_ids), cardinality(p_leases), cardinality(p_lines), cardinality(p_ages)), 100000, 'lines');
    perform penstock.check_lists(array[array_dims(p_ids), array_dims(p_leases), array_dims(p_lines), array_dims(p_ages)]);
    if coalesce(cardinality(p_ids), 0) > 0 and (p_leases is null or array_position(p_leases, null) is not null) then
        raise exception 'a line is to be logged without the lease of its job'
            using errcode = 'PS400', hint = 'Give the lease that claim or extend returned for each line.';
    end if;
    if array_position(p_lines, null) is not null or coalesce(cardinality(p_lines), 0) <> coalesce(cardinality(p_ids), 0) then
        raise exception 'a line of a log is null' using errcode = 'PS400', hint = 'Give one line for each id.';
    end if;
    if exists (select from unnest(p_ages) as given (age) where given.age not between 0 and 1e9) then
        raise exception 'invalid age of a line: % seconds', (select max(age) from unnest(p_ages) as given (age) where age not between 0 and 1e9)
            using errcode = 'PS400', hint = 'Give how many seconds ago each line was logged, from 0 to 1,000,000,000, or null for now.';
    end if;
    held := penstock.lock_held_jobs(p_ids, p_leases, coalesce(p_wait, true));
    update penstock.queued_jobs as job
    set log = (
            -- The newest lines, in their order.
            select jsonb_agg(newest.line order by newest.place)
            from (
                select every.line, every.place
                from jsonb_array_elements(coalesce(job.log, '[]') || given.lines) with ordinality as every (line, place)
                order by every.place desc
                limit 100
            ) as newest
        ),
        updated_at = moment
    from (
        select
            line.id,
            jsonb_agg(
                jsonb_build_object(
                    'at', moment - make_interval(secs => coalesce(line.age, 0)),
                    'attempt', (select attempt from penstock.queued_jobs where queued_jobs.id = line.id)
                ) || penstock.log_line(
                    line.text,
                    encrypted and (
                        select jobs.encrypted
                        from penstock.queued_jobs join penstock.jobs on jobs.name = queued_jobs.name
                        where queued_jobs.id = line.id
                    )
                )
                order by line.place
            ) as lines
        from (
            select
                every.*,
                row_number() over (partition by every.id order by every.place desc nulls last) as from_the_end,
                bool_or(every.place is null) over (partition by every.id) as is_held
            from (
                select given.id, given.text, given.age, given.place
                from unnest(p_ids, p_lines, p_ages) with ordinality as given (id, text, age, place)
                union all
                select locked.id, null, null, null
                from unnest(held) as locked (id)
            ) as every
        ) as line
        where line.from_the_end <= 100 and line.is_held and line.place is not null
        group by line.id
    ) as given
    where job.id = given.id;
    return query select * from penstock.jobs_held_elsewhere(p_ids, p_leases, held) where p_wait is false;
end
$$;
comment on function penstock.append_log(uuid[], bigint[], text[], double precision[], boolean) is
    'Appends lines to the logs of running jobs, one element of the arrays for each line, under the lease under which its job is held; lines of a job that is held under another one are dropped. p_ages: how many seconds ago each was logged. Keeps the newest 100 lines of a job, of each the first 1,000 characters. p_wait false: does not wait for jobs that other transactions have locked, and returns them.';
