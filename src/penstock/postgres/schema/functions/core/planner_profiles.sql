-- Planner profiles: settings under which the functions have the plans that they are written for.
--
-- The tables of a queue fill and empty faster than they are analyzed. Between two bursts a table is empty, and statistics that say so
-- let the planner believe that reading all of it once is cheaper than looking up each row: quadratic when the next burst is there.
-- Statistics of a full table mislead in the other way when it has emptied. So the functions that are called in loops do not leave the
-- choice to statistics. Each has a profile; the settings hold while it runs, and for what it calls.
--
--   lookup          finds rows by an index: no table is read as a whole.
--   lookups         finds the rows of many ids or keys, one by one: neither does a hash or a merge of whole tables pay, which reads all
--                   of one side.
--   bitmap_lookups  the same by bitmap scans: such a scan always goes by a condition on an index, while the other index scans may walk
--                   all of an index and filter. For what is given ids and has no order to keep.
--   walk            walks an index from a place on, in its order, and stops when it has enough: a bitmap scan would read everything that
--                   matches first.
--   joined_walk     a walk that looks up what belongs to each row: hash and merge joins would read everything first.
--   sets            compares two large sets: without statistics a nested loop looks cheap to the planner, and compares each with each.
--
-- And in addition to one of these:
--
--   no_sort         has its rows in the order of an index: a sort would read all of them before the first is there.
--   no_merge        joins thousands of rows with thousands, where a hash is good: a merge sorts both sides.
--   generic         is called so often that planning costs more than the plan can gain, and its plan does not depend on the values.
--   custom          has conditions that may be absent: only a plan for the values at hand can use an index for those that are there.
--
-- No function has its plans compiled. PostgreSQL compiles what it takes for dear, at each call, and takes for dear what it knows nothing of,
-- and (before version 18) each plan with a node that a profile forbids and that is there nevertheless, as a small table without an index:
-- milliseconds of work, hundreds of milliseconds of compiling. So every function that has settings (all that callers reach have some)
-- has jit=off too, which holds for what it calls.
--
-- A plan that changes shows in tests/jobs/sql/test_plans.py and its neighbours.

-- Long, since it names every function that has a profile.
create or replace function penstock.planner_profiles()
returns table (profile text, settings text[], functions text[])
language sql
immutable
as $$
    values
        (
            'lookup',
            array['enable_seqscan=off'],
            array[
                'revoke_slots', 'member_heartbeat', 'take', 'release', 'archive_cuts', 'attempts_of', 'cancel', 'run_now',
                'replays_of', 'replay', 'has_isolated_jobs', 'next_alone', 'claim_alone', 'enqueue_one_by_one', 'holder_of_unique', 'hold_unique', 'end_unique_periods', 'adds_job', 'expire', 'recover',
                'fair_places', 'pass_on_places', 'offer_places', 'wait_for_places', 'quarantine',
                'quarantine_unreadable', 'held_jobs', 'read_held', 'quarantine_keys', 'release_keys',
                'quarantined_keys', 'note_ended_runs', 'schedule_list', 'commit_staged', 'append_staged',
                'commit_staged_events', 'lose_partitions', 'note_failure', 'stream_bounds', 'offsets_at',
                'append_chunks', 'drop_waiting', 'remove_queue', 'maintain_topics', 'prune_messages', 'prune_history', 'read_topic',
                'missed_messages', 'late_messages', 'messages_at', 'unfinished_copies', 'outcomes', 'replay_messages', 'end_expired',
                'take_over', 'keep_alive', 'heartbeat', 'due_work', 'paused_keys_held', 'missing_keys',
                'advance_operation', 'cancel_matching', 'replay_matching', 'cancel_rows', 'quarantined_in', 'erase_waiting', 'erase_archived', 'forget_erased',
                'enqueue_dependents', 'check_dependencies', 'check_cycles', 'add_dependencies', 'why_waiting', 'resolve_workflows', 'next_unfinished', 'signal', 'resume_time', 'stop_gathered',
                'note_rates', 'rates_of', 'type_rates',
                'workflow_steps', 'step_results', 'require_attempt', 'stranded_suspects', 'release_suspects'
            ]
        ),
        (
            'lookups',
            array['enable_hashjoin=off', 'enable_mergejoin=off', 'enable_seqscan=off'],
            array[
                'put_jobs', 'known_before', 'announce_places', 'close_leases', 'requeue', 'insert_coalescing_copies',
                'idle_subscribers', 'claim_queues', 'subscribe_many', 'renew_subscriptions', 'end_waiting', 'forget_waiting', 'link_dependencies',
                'end_dependencies', 'release_waiting', 'release_of_type', 'has_due_ticks', 'fold_ticks', 'stop_folded', 'end_groups', 'write_steps', 'begin_waits', 'resume_jobs', 'kept_steps', 'kept_results',
                'erase_signals', 'steps_shown', 'meet_waiting', 'hold_group', 'stop_left_group', 'fill_group', 'group_of'
            ]
        ),
        (
            'bitmap_lookups',
            array['enable_hashjoin=off', 'enable_indexonlyscan=off', 'enable_indexscan=off', 'enable_mergejoin=off', 'enable_seqscan=off'],
            array[
                'settle_attempts', 'leave_to_callback', 'extend', 'begin_jobs', 'jobs_of_lease',
                'end_attempts', 'report_progress', 'lock_held_jobs', 'append_log', 'end_slots', 'messages_of', 'finish', 'confirm_finished',
                'fold_finished', 'free_jobs_of_lease', 'archive_unsuccessful', 'end_lost', 'split_suspects'
            ]
        ),
        (
            'bitmap_lookups_and_sets',
            array['enable_indexonlyscan=off', 'enable_indexscan=off', 'enable_mergejoin=off', 'enable_seqscan=off'],
            array['settle']
        ),
        (
            'walk',
            array['enable_bitmapscan=off', 'enable_seqscan=off'],
            array['archive_counts', 'insert_staged', 'commit_offsets', 'insert_many_copies', 'release_unknown', 'jobs_of_key', 'placed_jobs', 'pool_jobs', 'last_finished', 'first_placed', 'first_deferred', 'lake_lags', 'recent_failures', 'failure_groups', 'search_waiting', 'search_finished']
        ),
        (
            'joined_walk',
            array['enable_bitmapscan=off', 'enable_hashjoin=off', 'enable_mergejoin=off', 'enable_seqscan=off'],
            array[
                'jobs_that_fit', 'count_waiting', 'claim', 'promote', 'recover_leases', 'has_ready', 'why_of', 'claim_keys', 'begin_partitions',
                'read_chunks', 'insert_copies'
            ]
        ),
        (
            'sets',
            array['enable_hashjoin=on', 'enable_mergejoin=off', 'enable_nestloop=off', 'enable_seqscan=off'],
            array['still_owned']
        ),
        (
            'no_sort',
            array['enable_sort=off'],
            array[
                'jobs_that_fit', 'claim', 'promote', 'has_ready', 'claim_keys', 'insert_staged', 'begin_partitions',
                'commit_offsets', 'insert_copies', 'last_finished', 'first_placed', 'first_deferred'
            ]
        ),
        (
            'no_merge',
            array['enable_mergejoin=off'],
            array['insert_many_copies']
        ),
        (
            'generic',
            array['plan_cache_mode=force_generic_plan'],
            array[
                'member_heartbeat', 'jobs_that_fit', 'claim', 'insert_jobs', 'enqueue_one_by_one', 'promote', 'jobs_of_lease',
                'has_ready', 'settle', 'end_attempts', 'claim_keys', 'still_owned', 'insert_staged', 'begin_partitions',
                'commit_offsets', 'append_chunks', 'read_chunks', 'insert_copies', 'insert_coalescing_copies',
                'insert_many_copies', 'subscribe_many'
            ]
        ),
        (
            'custom',
            array['plan_cache_mode=force_custom_plan'],
            array['preview_operation', 'recent_failures', 'failure_groups', 'history_of', 'list_jobs', 'page_of_jobs', 'group_list', 'workflow_runs']
        )
$$;
comment on function penstock.planner_profiles() is
    'The planner profiles: the settings of each, and the functions that have it. A function may have several.';

create or replace function penstock.set_planner_profiles()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    change record;
begin
    for change in
        select
            format(
                'alter function %s set %I to %L',
                pg_proc.oid::regprocedure, split_part(setting, '=', 1), split_part(setting, '=', 2)
            ) as command
        from penstock.planner_profiles()
        cross join unnest(functions) as name
        cross join unnest(settings) as setting
        join pg_proc on pg_proc.proname = name and pg_proc.pronamespace = 'penstock'::regnamespace
    loop
        execute change.command;
    end loop;
    for change in
        select format('alter function %s set jit to off', pg_proc.oid::regprocedure) as command
        from pg_proc
        where pg_proc.pronamespace = 'penstock'::regnamespace and pg_proc.proconfig is not null
    loop
        execute change.command;
    end loop;
end
$$;
comment on function penstock.set_planner_profiles() is 'Part of a migration: gives the functions their planner profiles, and lets none of them have its plans compiled.';
