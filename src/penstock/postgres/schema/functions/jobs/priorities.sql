-- Another priority for jobs that wait. A priority is the queue of a type in which a ready job stands, and seq its place there. A job that
-- changes its priority gets a new number, behind those that have this priority already: claims remember how far they have looked in
-- each priority, and would not find a number below that.

create or replace function penstock.check_priority(p_priority bigint)
returns void
language plpgsql
immutable
as $$
begin
    if p_priority is null or p_priority not between -100 and 100 then
        raise exception 'priority % is out of range', coalesce(p_priority::text, 'null')
            using errcode = 'PS400', hint = 'A priority is a number from -100 (first) to 100 (last).';
    end if;
end
$$;
comment on function penstock.check_priority(bigint) is 'Raises PS400 unless it is a priority.';

create or replace function penstock.change_priorities(p_ids uuid[], p_priority smallint, p_moment timestamptz)
returns setof uuid
language plpgsql
as $$
declare
    of_type record;
begin
    -- The xid before the first number: see the head of the tables.
    perform pg_current_xact_id();
    insert into penstock.type_priorities (name, priority)
    select found.name, p_priority
    from (
        select job.name from penstock.queued_jobs as job where job.id = any (p_ids)
        union
        select job.name from penstock.waiting_jobs as job where job.id = any (p_ids)
    ) as found
    where not exists (select from penstock.type_priorities as known where known.name = found.name and known.priority = p_priority);
    for of_type in
        with ordered as (
            select job.id, job.seq is not null as ready
            from penstock.queued_jobs as job
            where job.id = any (p_ids) and job.status = 'queued' and job.slot is null and job.priority <> p_priority
            order by job.priority, job.seq
        ),
        numbered as materialized (
            select ordered.id, case when ordered.ready then nextval('penstock.job_seq') end as seq from ordered
        ),
        changed as (
            update penstock.queued_jobs as job
            set priority = p_priority, seq = numbered.seq, updated_at = p_moment
            from numbered
            where job.id = numbered.id
            returning job.id, job.name, job.seq
        )
        select changed.name, array_agg(changed.id) as ids, count(changed.seq)::integer as ready from changed group by changed.name
    loop
        return query select unnest(of_type.ids);
        if of_type.ready > 0 then
            perform penstock.wake_claimers(of_type.name, of_type.ready);
        end if;
    end loop;
    return query
        update penstock.waiting_jobs as job
        set priority = p_priority, updated_at = p_moment
        where job.id = any (p_ids) and job.priority <> p_priority and not exists (select from penstock.pools where pools.name = job.name)
        returning job.id;
end
$$;
comment on function penstock.change_priorities(uuid[], smallint, timestamptz) is
    'Part of set_priority and the operations: gives these jobs, which the caller has locked, another priority, each behind those that have it, in their order. Returns those that it changed: jobs of pools have no priority, and jobs that run have started.';

create or replace function penstock.set_priority(p_ids uuid[], p_priority integer)
returns setof uuid
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    locked uuid[];
begin
    perform penstock.check_size(cardinality(p_ids), 10000, 'jobs');
    perform penstock.check_priority(p_priority);
    -- Those that wait for others first: what is released meanwhile is found in the queue.
    locked := array(select job.id from penstock.waiting_jobs as job where job.id = any (p_ids) order by job.id for update);
    locked := locked || array(
        select job.id from penstock.queued_jobs as job where job.id = any (p_ids) and job.status = 'queued' order by job.id for update
    );
    if cardinality(locked) > 0 then
        return query select penstock.change_priorities(locked, p_priority::smallint, penstock.clock());
    end if;
end
$$;
comment on function penstock.set_priority(uuid[], integer) is
    'Gives jobs that wait another priority, -100 (first) to 100 (last), each behind those of its type that have it already, and returns those that it changed. Jobs that run or have ended, and those of pools, stay as they are. At most 10,000.';
