-- Archives jobs that end without having been in progress: expired, cancelled and quarantined ones. settle and end_attempts archive the
-- jobs that a worker settles by themselves, with the columns of the lease, in the statement that deletes them from the queue: a call of
-- this function for them would cost more than all the rest.

create or replace function penstock.archive_waiting(
    p_jobs tid[], p_status penstock.archived_job_status, p_reason text, p_error jsonb, p_moment timestamptz
)
returns integer
language plpgsql
as $$
declare
    archived integer;
begin
    with gone as (
        delete from penstock.queued_jobs as job
        where job.ctid = any (p_jobs)
        returning job.*
    )
    insert into penstock.archived_jobs (
        id, finished_at, created_at, run_after, expires_at, status, reason, attempt, max_attempts, priority,
        name, key, unique_key, data, errors, replay_of, message, options, snoozes, log
    )
    select
        gone.id, p_moment, penstock.shown_time(gone.created_at), penstock.shown_time(gone.run_after),
        penstock.shown_time(gone.expires_at), p_status, p_reason, gone.attempt - 1, gone.max_attempts, gone.priority,
        gone.name, gone.key, gone.unique_key, penstock.readable(gone.id, gone.data, p_moment),
        case
            when p_error is null then gone.errors
            else coalesce(case when penstock.shown(gone.errors) is not null then gone.errors end, '[]')
                || jsonb_build_array(p_error || jsonb_build_object('failed_at', p_moment))
        end,
        gone.replay_of, gone.message, gone.options, gone.snoozes, gone.log
    from gone;
    get diagnostics archived = row_count;
    return archived;
end
$$;
comment on function penstock.archive_waiting(tid[], penstock.archived_job_status, text, jsonb, timestamptz) is
    'Part of expire, cancel, quarantine and drop_waiting: archives queued jobs, which the caller has locked. p_error: one more of their errors, null: none. Call ensure_archive before. Returns how many.';
