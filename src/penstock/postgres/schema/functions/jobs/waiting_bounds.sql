-- Bounds of what waits: see the head of tables/0002_jobs.sql.
--
-- An enqueue into a type with a bound counts what waits, and stops at the bound: the work is bounded by it. It takes no lock, so that
-- enqueues do not wait for each other: those that run at the same time do not see each other's jobs, and together can go beyond the bound by
-- what they add. One after the other they never do. Retries, replays in progress and due jobs are not enqueues, and are never refused.

create or replace function penstock.count_waiting(p_name text, p_most bigint, p_slot integer default null, p_key text default null)
returns bigint
language plpgsql
stable
as $$
begin
    -- One index after another, until there are enough.
    return (
        select count(*)
        from (
            (
                -- From the newest on: before the oldest there may be many dead rows.
                select
                from penstock.queued_jobs as job
                where p_key is null and job.name = p_name and job.seq is not null and job.slot is null and job.status = 'queued'
                order by job.priority desc, job.seq desc
                limit p_most
            )
            union all
            select
            from penstock.queued_jobs as job
            where p_key is null and job.name = p_name and job.seq is not null and job.slot is not null and job.status = 'queued'
            union all
            select from penstock.queued_jobs as job where p_key is null and job.name = p_name and job.seq is null
            union all
            select
            from penstock.queued_jobs as job
            where job.name = p_name and job.slot = p_slot and job.key collate "C" = p_key and job.seq is not null and job.status = 'queued'
            union all
            select from penstock.queued_jobs as job where job.name = p_name and job.key collate "C" = p_key and job.seq is null
            union all
            select from penstock.waiting_jobs as job where job.name = p_name and (p_key is null or job.key = p_key)
            limit p_most
        ) as waiting
    );
end
$$;
comment on function penstock.count_waiting(text, bigint, integer, text) is
    'Part of enqueue_many: how many jobs of a type, or of one key of a pool, wait, counted up to p_most.';

create or replace function penstock.adds_job(p_name text, p_id uuid, p_key text, p_slot integer, p_unique_key text)
returns boolean
language plpgsql
stable
as $$
begin
    return not exists (select from penstock.queued_jobs as job where job.id = p_id)
        and cardinality(penstock.known_before(array[p_id])) = 0
        and (
            p_unique_key is null
            or not exists (
                select
                from penstock.queued_jobs as queued
                where queued.name = p_name and queued.unique_key = p_unique_key and queued.coalesces
                    and (queued.slot is null or queued.key = p_key)
            )
            and not exists (
                select
                from penstock.unique_periods as period
                where period.name = p_name and period.unique_key = p_unique_key
                    and period.key = case when p_slot is not null then p_key else '' end
                    and period.until > penstock.clock()
            )
        );
end
$$;
comment on function penstock.adds_job(text, uuid, text, integer, text) is
    'Part of enqueue_many, when a bound is reached: whether a job is new. One that is known, or that coalesces, takes no place.';

create or replace function penstock.check_room(
    p_name text, p_max_waiting integer, p_key_max_waiting integer, p_ids uuid[], p_keys text[], p_slots integer[], p_unique_keys text[]
)
returns void
language plpgsql
as $$
declare
    bound record;
    waiting bigint;
    added bigint;
begin
    for bound in
        select
            'queue of ' || p_name as place, null::text as key, null::integer as slot, cardinality(p_ids) as jobs, p_max_waiting as most,
            'max_waiting of the type' as option
        where p_max_waiting is not null
        union all
        select 'key ' || given.key || ' of ' || p_name, given.key, given.slot, count(*), p_key_max_waiting, 'key_max_waiting of the pool'
        from unnest(p_keys, p_slots) as given (key, slot)
        where p_key_max_waiting is not null
        group by given.key, given.slot
    loop
        waiting := penstock.count_waiting(p_name, bound.most, bound.slot, bound.key);
        continue when waiting + bound.jobs <= bound.most;
        added := (
            select count(*)
            from unnest(p_ids) with ordinality as given (id, place)
            where (bound.key is null or p_keys[given.place] = bound.key)
                and penstock.adds_job(p_name, given.id, p_keys[given.place], p_slots[given.place], p_unique_keys[given.place])
        );
        if added > 0 and waiting + added > bound.most then
            raise exception 'the % is full: % of at most % jobs wait, and % more do not fit', bound.place, waiting, bound.most, added
                using errcode = 'PS429',
                      hint = 'Nothing was written. Enqueue again when workers have taken jobs, or raise ' || bound.option || '.';
        end if;
    end loop;
end
$$;
comment on function penstock.check_room(text, integer, integer, uuid[], text[], integer[], text[]) is
    'Part of enqueue_many, for a type or a pool with a bound of what waits: raises PS429 when the jobs that are new do not fit.';
