-- Which ids of an enqueue have a job already.

create or replace function penstock.refuse_ended(p_ids uuid[])
returns void
language plpgsql
stable
as $$
declare
    ended uuid;
begin
    select job.id into ended
    from penstock.queued_jobs as job
    where job.id = any (p_ids)
    group by job.id
    having count(*) > 1
    limit 1;
    if found then
        raise exception 'job % ended after this transaction had begun, which enqueues it again', ended
            using errcode = '40001', hint = 'Retry the transaction: it then sees that the job has ended.';
    end if;
end
$$;
comment on function penstock.refuse_ended(uuid[]) is
    'Part of known_before, in a transaction that sees rows as they were when it began: raises 40001 when one of the jobs, which it has just inserted, is also seen as it was before it ended.';

create or replace function penstock.known_before(p_ids uuid[])
returns uuid[]
language plpgsql
stable
as $$
declare
    lowest uuid := p_ids[1];
    floor timestamptz := '-infinity';
    highest_archived uuid;
    ordinary boolean;
    waiting uuid[];
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform penstock.refuse_ended(p_ids);
    end if;
    waiting := array(select job.id from penstock.waiting_jobs as job where job.id = any (p_ids));
    if waiting <> '{}' then
        return waiting || array(select archived.id from penstock.archived_jobs as archived where archived.id = any (p_ids));
    end if;
    -- Whether all are UUIDv7, and which is the lowest: usually the first.
    ordinary := not exists (
        select from unnest(p_ids) as given (id) where given.id < lowest or get_byte(uuid_send(given.id), 6) >> 4 <> 7
    );
    if not ordinary then
        select given.id into lowest from unnest(p_ids) as given (id) order by given.id limit 1;
        ordinary := not exists (select from unnest(p_ids) as given (id) where get_byte(uuid_send(given.id), 6) >> 4 <> 7);
    end if;
    if ordinary then
        floor := penstock.id_time(lowest) - interval '1 day';
        -- New UUIDv7 ids are higher than all archived ones: one probe for each day instead of one for each id.
        select archived.id into highest_archived
        from penstock.archived_jobs as archived
        where archived.finished_at >= floor
        order by archived.id desc
        limit 1;
        if not found or highest_archived < lowest then
            return '{}';
        end if;
    end if;
    return array(
        select archived.id
        from penstock.archived_jobs as archived
        where archived.id = any (p_ids)
            and archived.finished_at >= floor
    );
end
$$;
comment on function penstock.known_before(uuid[]) is 'Part of enqueue_many: which of the ids, apart from those in the queue, have a job: one that waits for others, or is in the archive.';
