-- Why a job is where it is: why_of in why_waiting.sql asks the questions about one that waits.

create or replace function penstock.why_locked(p_pool text, p_key_id text, p_owner text, p_what text)
returns text
language sql
stable
as $$
    select format(
        '%s is encrypted with the key %s, which the worker %s lacks that has its slot; %s.', p_what, p_key_id, p_owner,
        coalesce(
            'the slot goes to ' || (
                select members.id from penstock.members
                where members.group_name = p_pool and members.state = 'active' and p_key_id = any (members.key_ids)
                order by members.age limit 1
            ) || ' or another one that has it',
            'no worker of the pool has it: give it to one (PENSTOCK_KEYS)'
        )
    )
$$;
comment on function penstock.why_locked(text, text, text, text) is
    'Part of why: what becomes of a job of a pool that the owner of its slot cannot read.';

create or replace function penstock.why(p_id uuid)
returns table (
    reason text,
    message text,
    since timestamptz,
    until timestamptz,
    by_job uuid,
    worker text,
    used bigint,
    most bigint,
    ahead bigint,
    expires_at timestamptz
)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    job penstock.queued_jobs;
begin
    return query
    select
        waiting.reason, waiting.message, waiting.since, null::timestamptz, waiting.by_job, null::text, null::bigint, null::bigint,
        waiting.ahead, waiting.expires_at
    from penstock.why_waiting(p_id) as waiting;
    if found then
        return;
    end if;
    select * into job from penstock.queued_jobs where id = p_id;
    if found then
        return query
        select answer.*, penstock.shown_time(job.expires_at) from penstock.why_of(job) as answer;
        return;
    end if;
    return query
    select
        'finished',
        case
            when archived.reason = 'quarantined' then format(
                'It is finished: failed, quarantined: %s. To run it again: penstock jobs replay %s.',
                rtrim(coalesce(archived.errors -> -1 ->> 'message', 'it cannot be read'), '.'), archived.id
            )
            else format('It is finished: %s.', archived.status)
        end,
        archived.started_at, archived.finished_at, null::uuid,
        archived.worker, null::bigint, null::bigint, null::bigint, penstock.shown_time(archived.expires_at)
    from penstock.archived_jobs as archived
    where archived.id = p_id;
    if not found then
        raise exception 'no such job: %', p_id
            using errcode = 'PS404', hint = 'Its day may have been pruned from the archive.';
    end if;
end
$$;
comment on function penstock.why(uuid) is
    'Why a job waits, the first thing that has to change: dependencies (it waits for ahead jobs, the first is by_job), deferred, retry or snoozed (until), sleep (until), signal (since, until) or children (used of most have ended; by_job is their group), when its handler waits in a step, expired, paused, no-worker (no live worker has its type), no-key (it is encrypted, and no live worker has its key), quarantined-key, paused-key (since), unplaced, moving, key-alone, key-retry or key-snoozed (by_job, until), key-suspended (by_job, since, until), key-busy (by_job, since, worker; or used of most), key-rate, alone (it is a suspect after crashes, and waits for its trial, beside nothing else), concurrency (used of most), rate (until), behind (ahead, 1,000 at most), ready; or running, finished. PS404 when there is no such job.';
