-- Signals: each is received once, by the wait that it is for.

create or replace function penstock.signal(p_id uuid, p_name text, p_value jsonb default null)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    most constant integer := 1000;
    type_name text;
    ended penstock.archived_job_status;
begin
    p_value := coalesce(p_value, 'null');
    perform penstock.check_step('a signal', p_name, p_value);
    -- In the order in which a job goes through the tables.
    select job.name into type_name from penstock.waiting_jobs as job where job.id = p_id;
    if not found then
        select job.name into type_name from penstock.queued_jobs as job where job.id = p_id;
    end if;
    if type_name is null then
        select job.status into ended from penstock.archived_jobs as job where job.id = p_id order by job.finished_at desc limit 1;
        if not found then
            raise exception 'no such job: %', coalesce(p_id::text, 'null')
                using errcode = 'PS404', hint = 'Signal a job that is not finished, after the commit of its enqueue or in the same transaction.';
        end if;
        if exists (select from penstock.job_signals as signal where signal.job = p_id and signal.name = p_name) then
            return false;
        end if;
        raise exception 'job % has ended: %', p_id, ended
            using errcode = 'PS409', hint = 'Nothing waits for the signal any more.';
    end if;
    if exists (select from penstock.jobs where jobs.name = type_name and jobs.encrypted) then
        perform penstock.refuse_plain('job type ' || type_name, array[p_value]);
    end if;
    if (select count(*) from (select from penstock.job_signals as signal where signal.job = p_id limit most) as there) >= most then
        raise exception 'job % has % signals already', p_id, most
            using errcode = 'PS409', hint = 'Enqueue a job for each event instead of signalling one job again and again.';
    end if;
    insert into penstock.job_signals (at, job, name, value) values (penstock.clock(), p_id, p_name, p_value)
    on conflict (job, name) do nothing;
    if not found then
        return false;
    end if;
    insert into penstock.workflow_ticks (resumed) values (array[p_id]);
    perform penstock.tell_all('workflows', '');
    return true;
end
$$;
comment on function penstock.signal(uuid, text, jsonb) is
    'Sends a signal to a job, which gets p_value (null: the JSON null) from its wait of this name, also when it begins to wait later. It counts when the transaction commits. Returns whether this signal was the first: false when there was one of this name, or the wait had timed out, and nothing changed. PS404 when there is no such job, PS409 when it has ended.';
