-- The row of a new job. Every statement that enqueues inserts such rows:
--
--     insert into penstock.queued_jobs select (penstock.new_job(...)).*
--
-- The planner replaces the call by the body, column by column, so that the call costs no more than a list of columns would; a test
-- checks that it does. The columns stand in the order of the table.

create or replace function penstock.new_job(
    p_id uuid,
    p_name text,
    p_data jsonb,
    p_moment timestamptz,
    p_max_attempts smallint,
    p_run_after timestamptz default null,
    p_expires_at timestamptz default null,
    p_key text default null,
    p_priority smallint default 0::smallint,
    p_unique_key text default null,
    p_slot integer default null,
    p_replay_of uuid default null,
    p_message bigint default null,
    p_options jsonb default null,
    p_workflow uuid default null
)
returns penstock.queued_jobs
language sql
as $$
    select row(
        -- The place in the queue: a deferred job gets it when it is due.
        case when p_run_after is null or p_run_after <= p_moment then nextval('penstock.job_seq') end,
        null::bigint, -- lease
        p_message,
        coalesce(p_run_after, p_moment),
        p_expires_at,
        p_moment, -- created_at
        p_moment, -- updated_at
        null::timestamptz, -- cancel_requested_at
        null::timestamptz, -- snoozed_at
        p_id,
        'queued'::penstock.job_status,
        p_slot,
        1::smallint, -- attempt
        coalesce((p_options ->> 'max_attempts')::smallint, p_max_attempts),
        p_priority,
        0::smallint, -- crashes
        null::smallint, -- snoozes
        p_unique_key is not null, -- coalesces
        false, -- begun
        p_name,
        p_key,
        p_unique_key,
        p_data,
        null::jsonb, -- errors
        null::jsonb, -- progress
        p_options,
        null::jsonb, -- log
        p_replay_of,
        null::boolean, -- awaited
        p_workflow,
        null::text, -- waits_for
        null::bigint, -- trial
        null::smallint -- lone_crashes
    )::penstock.queued_jobs
$$;
comment on function penstock.new_job(uuid, text, jsonb, timestamptz, smallint, timestamptz, timestamptz, text, smallint, text, integer, uuid, bigint, jsonb, uuid) is
    'The row of a job that is enqueued at this moment. p_max_attempts: of its type. p_run_after: when it may start at the earliest; null: at once. p_options: its own options, as options_of_jobs returns them. p_workflow: the job group of which it is a child.';
