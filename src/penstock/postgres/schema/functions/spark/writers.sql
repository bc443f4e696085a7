-- Writers: the fence of those that are Spark jobs, whose writes count while the job is held as when their driver was started; handing
-- the name of a writer over to another query; and forgetting one.

create or replace function penstock.require_attempt(p_job uuid, p_attempt integer, p_lease bigint)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    -- The number of an attempt does not tell two claims apart: a job that was released before its end is claimed again as the same attempt.
    if not exists (
        select from penstock.queued_jobs as job
        join penstock.leases as lease on lease.id = job.lease
        where job.id = p_job and job.status = 'in-progress' and job.attempt = p_attempt and p_lease in (lease.id, lease.origin)
    ) then
        raise exception 'attempt % of Spark job % does not run any more under lease %', p_attempt, p_job, coalesce(p_lease::text, 'null')
            using errcode = 'PS409', hint = 'The job was taken over by another worker, cancelled, or has ended: what this driver writes does not count.';
    end if;
end
$$;
comment on function penstock.require_attempt(uuid, integer, bigint) is
    'Raises PS409 unless this attempt of a job runs under the lease of this claim, also when that was extended. The driver of a Spark job calls it in the transactions of its writes, so that a driver that lives on after its worker writes nothing.';

create or replace function penstock.forget_writer(p_writer text, p_target text default null)
returns bigint
language sql
security definer
set search_path = penstock, pg_temp
as $$
    with forgotten as (
        delete from penstock.sink_epochs
        where writer = p_writer and role = session_user and (target = p_target or p_target is null)
        returning 1
    )
    select count(*) from forgotten
$$;
comment on function penstock.forget_writer(text, text) is
    'Forgets what the caller has written under a name, to one target or to all, so that another query may have the name. Returns how many notes.';

create or replace function penstock.hand_over_writer(p_writer text, p_epochs jsonb)
returns bigint
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    noted record;
    handed bigint := 0;
begin
    if p_writer is null or jsonb_typeof(p_epochs) is distinct from 'object' then
        raise exception 'it is not said where writer % stands', coalesce(quote_literal(left(p_writer, 100)), 'null')
            using errcode = 'PS400', hint = 'Give p_epochs, the epoch of each of its targets as penstock.sink_epochs has it: {"job invoice": 7}.';
    end if;
    for noted in
        select sink_epochs.target, sink_epochs.epoch, sink_epochs.query
        from penstock.sink_epochs
        where sink_epochs.writer = p_writer and sink_epochs.role = session_user
        order by sink_epochs.target
        for update
    loop
        if noted.query is null then
            raise exception '% is the name of batch writes to %, and of no query', p_writer, noted.target
                using errcode = 'PS409', hint = 'Batch writes have nothing to hand over: give the query another name.';
        end if;
        if p_epochs ->> noted.target is distinct from noted.epoch::text then
            raise exception 'writer % stands at batch % of %, and not at %', p_writer, noted.epoch, noted.target, coalesce(p_epochs ->> noted.target, 'none')
                using errcode = 'PS409', hint = 'The query still writes: stop it, and try again.';
        end if;
        update penstock.sink_epochs set handed_over = true
        where sink_epochs.writer = p_writer and sink_epochs.target = noted.target and sink_epochs.role = session_user;
        handed := handed + 1;
    end loop;
    if handed = 0 or handed < (select count(*) from jsonb_object_keys(p_epochs)) then
        raise exception 'no query of the role % writes under the name %', session_user, left(p_writer, 200)
            using errcode = 'PS404', hint = 'penstock streams writers list shows the names. A name belongs to the database role that writes under it.';
    end if;
    return handed;
end
$$;
comment on function penstock.hand_over_writer(text, jsonb) is
    'Hands the name of a writer over: the query that wrote under it is refused from now on, and the next query that writes under it has it. p_epochs has the epoch of each target, as penstock.sink_epochs has it; PS409 when it is another one by now. Returns how many targets there are. May be repeated.';
