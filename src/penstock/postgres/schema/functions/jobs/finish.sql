-- Finish: a job ends in the transaction of its handler, together with the handler's effects. tables/0002_jobs.sql says what becomes of
-- its lease.
--
-- Until that transaction ends it holds the row of the job. Recovery, the end of a slot and the release of unknown jobs pass over such a row
-- (free_jobs_of_lease, end_slots), so the end of its lease does not take the job away: it is archived when the transaction commits,
-- and is in progress as before when it does not.

create or replace function penstock.finish(
    p_id uuid, p_attempt smallint, p_lease bigint, p_result jsonb default null, p_lines text[] default null,
    p_ages double precision[] default null
)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    awaited boolean;
begin
    if p_id is null or p_attempt is null or p_lease is null then
        raise exception 'a job is to be finished without its id, attempt or lease'
            using errcode = 'PS400', hint = 'Give the id, the attempt and the lease that claim or extend returned.';
    end if;
    if p_result is not null then
        perform penstock.check_each_json(array[p_result], 'a result or an error');
        if penstock.any_encrypted(array[p_id]) then
            p_result := (penstock.sealed_details(array[p_id], array[p_result]))[1];
        end if;
    end if;
    perform penstock.ensure_archive(moment);
    if p_lines is not null then
        perform penstock.check_lists(array[array_dims(p_lines), array_dims(p_ages)]);
        perform penstock.append_log(
            array_fill(p_id, array[cardinality(p_lines)]), array_fill(p_lease, array[cardinality(p_lines)]), p_lines, p_ages
        );
    end if;
    select archived.awaited into awaited
    from penstock.archive_succeeded(array[p_id], array[p_attempt], array[p_lease], null, array[p_result], moment) as archived
    where cardinality(archived.ids) = 1;
    if found then
        insert into penstock.finished_jobs (id, lease) values (p_id, p_lease);
        if awaited then
            perform penstock.tell_all('workflows', '');
        end if;
    else
        raise exception 'job % no longer belongs to this worker', p_id
            using errcode = 'PS409', hint = 'Roll the transaction back: another worker runs the job, or will, or it is finished already.';
    end if;
end
$$;
comment on function penstock.finish(uuid, smallint, bigint, jsonb, text[], double precision[]) is
    'Archives a claimed job as succeeded in the transaction of the caller: it is finished when that commits, and in progress as before when it does not. PS409 when the job is not held under this attempt and lease, so that the transaction fails. p_lines, p_ages: the last lines of its log, see append_log. Call confirm_finished afterwards, and do not settle the job.';

create or replace function penstock.fold_finished(p_ids uuid[])
returns integer
language plpgsql
as $$
declare
    leases bigint[];
    jobs integer[];
    folded integer;
begin
    -- Usually there is none, and a reader is cheaper than a writer.
    if not exists (select from penstock.finished_jobs where p_ids is null or id = any (p_ids)) then
        return 0;
    end if;
    with gone as (
        delete from penstock.finished_jobs where p_ids is null or id = any (p_ids) returning lease
    ),
    counted as (
        select gone.lease, count(*)::integer as jobs from gone group by gone.lease order by gone.lease
    )
    select array_agg(counted.lease), array_agg(counted.jobs), coalesce(sum(counted.jobs), 0) into leases, jobs, folded from counted;
    if leases is not null then
        perform penstock.close_leases(leases, jobs);
    end if;
    return folded;
end
$$;
comment on function penstock.fold_finished(uuid[]) is
    'Part of confirm_finished and recover: takes jobs whose finish has committed off their leases. Null: all. Returns how many.';

create or replace function penstock.confirm_finished(p_ids uuid[])
returns table (id uuid, state text)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    held uuid[];
    open uuid[];
begin
    perform penstock.check_size(cardinality(p_ids), 100000, 'jobs');
    select array_agg(free.id) into held
    from (select job.id from penstock.queued_jobs as job where job.id = any (p_ids) for update skip locked) as free;
    -- Statements of their own, with new snapshots: a transaction that commits in between is seen as committed from there on.
    select array_agg(job.id) into open
    from penstock.queued_jobs as job
    where job.id = any (p_ids) and job.id <> all (coalesce(held, '{}'));
    perform penstock.fold_finished(array(select each from unnest(p_ids) as each where each <> all (coalesce(held || open, '{}'))));
    return query
    select unnest(held), 'held'
    union all
    select unnest(open), 'open';
end
$$;
comment on function penstock.confirm_finished(uuid[]) is
    'Takes jobs off their leases whose finish has committed, and returns the others: open while the transaction of a finish goes on, held when none does, so that it was rolled back and the job is to be settled.';
