-- Unique keys with a period: see the head of tables/0002_jobs.sql.

create or replace function penstock.holder_of_unique(p_name text, p_unique_key text, p_key text, p_moment timestamptz)
returns uuid
language plpgsql
stable
as $$
begin
    return (
        select period.id
        from penstock.unique_periods as period
        where period.name = p_name and period.unique_key = p_unique_key and period.key = p_key
            and (period.until > p_moment or exists (select from penstock.queued_jobs as job where job.id = period.id))
    );
end
$$;
comment on function penstock.holder_of_unique(text, text, text, timestamptz) is
    'Part of enqueue_many: the job that holds a unique key at this moment, because it has not ended or its period is not over; null: none.';

create or replace function penstock.hold_unique(p_name text, p_unique_key text, p_key text, p_id uuid, p_until timestamptz, p_moment timestamptz)
returns uuid
language plpgsql
as $$
declare
    holder uuid;
begin
    -- Waits for a transaction that takes the same key at this moment, and then sees what it wrote.
    insert into penstock.unique_periods as period (name, unique_key, key, id, until, look_at)
    values (p_name, p_unique_key, p_key, p_id, p_until, p_until)
    on conflict (name, unique_key, key) do update
    set id = excluded.id, until = excluded.until, look_at = excluded.look_at
    where period.until <= p_moment
        and not exists (select from penstock.queued_jobs as job where job.id = period.id and job.id <> excluded.id)
    returning period.id into holder;
    if found then
        return holder;
    end if;
    -- The conflict has locked the row.
    select period.id into holder
    from penstock.unique_periods as period
    where period.name = p_name and period.unique_key = p_unique_key and period.key = p_key;
    return holder;
end
$$;
comment on function penstock.hold_unique(text, text, text, uuid, timestamptz, timestamptz) is
    'Part of enqueue_many: gives a unique key to a job until a time, unless another one holds it. Returns the job that holds it now.';

create or replace function penstock.end_unique_periods(p_moment timestamptz)
returns void
language plpgsql
as $$
declare
    ended tid[] := array(
        select period.ctid
        from penstock.unique_periods as period
        where period.look_at <= p_moment
        order by period.look_at
        limit 1000
        for update skip locked
    );
begin
    if cardinality(ended) = 0 then
        return;
    end if;
    delete from penstock.unique_periods as period
    where period.ctid = any (ended) and not exists (select from penstock.queued_jobs as job where job.id = period.id);
    update penstock.unique_periods as period
    set look_at = p_moment + interval '1 minute'
    where period.ctid = any (ended);
end
$$;
comment on function penstock.end_unique_periods(timestamptz) is
    'Part of recover: deletes up to 1,000 periods of unique keys that are over and whose jobs have ended.';
