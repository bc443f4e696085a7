-- Erasure: signals that were stored behind the deletion of their job.

create or replace function penstock.erase_signals(p_after uuid, p_limit integer, out erased bigint, out looked integer, out reached uuid)
language plpgsql
as $$
declare
    jobs uuid[];
begin
    -- A signal locks no job, so that no settlement waits for the transaction of who signals. One that was open while the job was deleted
    -- stores its signal behind that. The caller has waited for these transactions. A job goes from one table to the next, and
    -- comes into being, in one transaction: one statement finds it wherever it is.
    jobs := array(
        select distinct signal.job
        from penstock.job_signals as signal
        where signal.job > coalesce(p_after, '00000000-0000-0000-0000-000000000000')
        order by signal.job
        limit p_limit
    );
    delete from penstock.job_signals as signal
    where signal.job = any (jobs)
        and (select 1 from penstock.waiting_jobs as job where job.id = signal.job) is null
        and (select 1 from penstock.queued_jobs as job where job.id = signal.job) is null
        and (select 1 from penstock.archived_jobs as job where job.id = signal.job limit 1) is null;
    get diagnostics erased = row_count;
    looked := cardinality(jobs);
    reached := case when looked = p_limit then jobs[p_limit] end;
end
$$;
comment on function penstock.erase_signals(uuid, integer) is
    'Part of advance_erasure: deletes those signals of the next p_limit jobs, by id, whose job is not there any more. Returns how many, at how many jobs it looked, and up to which it came; null: they were the last.';
