-- Access: what a role may do.
--
--   reader     look only; notes that it waits, in a bounded number of places
--   producer   what a reader may, and enqueue, append, publish, cancel, replay
--   worker     what a producer may, and claim, settle, extend, heartbeat, maintain
--   server     what a worker may, and what the HTTP server needs: settle by a callback, without a lease, look users up, sessions and audit
--   admin      everything, job types included
--
-- The functions run with the rights of the owner of the schema, so none of these roles needs a right on a table
-- beyond select. Nothing is granted to public. docs/sql-roles.md lists every function with who may call it.

create or replace function penstock.functions_of(p_access text)
returns text[]
language plpgsql
immutable
as $$
declare
    reading constant text[] := array[
        'clock', 'held_clock', 'id_time', 'new_id', 'job_counts', 'find_jobs', 'replays_of', 'list_jobs', 'page_of_jobs', 'job_rates', 'attempts_of',
        'stored_jobs', 'why', 'key_hash', 'jump_hash', 'slot_of', 'group_members', 'group_slots', 'slots_to_place', 'load_of_types',
        'pool_details', 'quarantined_keys', 'quarantined_counts', 'key_weights_of', 'key_state', 'pool_jobs', 'paused_keys_of', 'standing_list', 'runnable_in_pools',
        'payload', 'shown', 'shown_time', 'list_subscribers', 'read_topic', 'message_of', 'messages_of', 'missed_messages', 'late_messages', 'messages_at', 'unfinished_copies', 'outcomes',
        'topic_counts',
        'bucket_of', 'routes_of', 'partition_of', 'stream_bounds', 'read_chunks', 'read_events', 'offsets_at', 'stream_segments',
        'group_lag', 'wait_for_events', 'wait_for_events_of', 'stop_waiting',
        'wait_for_history', 'archive_counts', 'archive_cuts', 'archive_start', 'archive_lost', 'archive_blocks', 'ended_runs', 'scan',
        'growths', 'database_gauges', 'stream_lags', 'lake_lags', 'bounds_of_streams', 'scan_events', 'worker_list', 'schedule_list', 'schedule_runs', 'schedule_differences', 'handler_list', 'leader_list', 'preview_operation',
        'top', 'group_list', 'group_of', 'workflow_runs', 'workflow_steps', 'stuck_dependencies', 'endless_waits', 'locked_work', 'recently_quarantined', 'steps_shown', 'restored', 'is_unfenced', 'server_identity', 'restore_report',
        'search_waiting', 'search_finished', 'recent_failures', 'failure_groups', 'history_of', 'rates_of', 'type_rates',
        'job_marks', 'work_of_transaction'
    ];
    producing constant text[] := array[
        'enqueue', 'enqueue_many', 'enqueue_json', 'put_jobs', 'cancel', 'run_now', 'set_priority', 'replay', 'start_standing', 'stop_standing',
        'notify_standing', 'reconcile_standing', 'publish', 'publish_many', 'publish_json',
        'append', 'append_many', 'append_routed', 'append_json', 'append_each', 'append_each_json', 'begin_load', 'end_load',
        'last_sequence', 'commit_staged', 'commit_staged_events', 'require_attempt', 'discard_staged', 'prune_staged',
        'forget_writer', 'hand_over_writer', 'run_schedule', 'start_operation', 'cancel_operation', 'open_group', 'seal_group', 'cancel_group', 'signal',
        'start_workflow', 'retry_workflow', 'own_ids'
    ];
    working constant text[] := array[
        'claim', 'claim_alone', 'promise_to_begin', 'begin_jobs', 'has_isolated_jobs', 'next_alone', 'isolate', 'keep_alive',
        'extend', 'settle', 'finish', 'confirm_finished', 'note_halted', 'note_keys', 'missing_keys', 'leave_to_callback', 'report_progress', 'append_log', 'write_steps', 'begin_waits', 'child_ids', 'fill_group', 'register_worker', 'end_workers', 'heartbeat',
        'unregister_worker', 'release_unknown', 'quarantine_unreadable', 'quarantined_in', 'held_jobs', 'read_held', 'wait_for_jobs', 'wait_for_places', 'due_work', 'promote', 'expire', 'recover',
        'declare_group', 'declare_pool', 'lock_group', 'set_targets', 'join_group', 'hand_over_slots', 'leave_group', 'evict', 'member_heartbeat',
        'take', 'release', 'need_keys', 'owns', 'set_metadata', 'wait_for_slots', 'claim_keys', 'quarantine_keys', 'release_keys', 'forget_keys', 'cancelled_of', 'paused_keys_held',
        'standing_of', 'refuse_standing', 'begin_standing', 'enter_standing', 'acquit_standing', 'save_standing', 'end_standing', 'take_messages',
        'declare_topic', 'subscribe', 'subscribe_many', 'renew_subscriptions', 'take_over', 'unsubscribe', 'unsubscribe_many', 'maintain_topics',
        'declare_stream', 'declare_consumer_group', 'begin_partitions', 'try_partition', 'commit_offsets', 'commit_exactly', 'commit_json', 'dead_letter',
        'quarantine_partition', 'halt_partition', 'note_failure', 'replay_dead', 'seek_group', 'pause_partitions', 'resume_partitions', 'streams_to_maintain', 'maintain_stream', 'compact_stream',
        'drop_retired', 'advance_operation', 'resolve_workflows', 'step_results', 'kept_steps', 'kept_results', 'tables_to_vacuum', 'vacuum_waits',
        'declare_schedule', 'look_at_schedule', 'enqueue_run', 'bring_forward', 'take_schedule', 'extend_schedule', 'end_schedule', 'note_schedules', 'note_run', 'note_handlers', 'declare_leader_task', 'check_leader', 'note_leader',
        'prune_due', 'prune_messages_due', 'prune_history_due', 'lengthen_retention', 'note_rates', 'start_fleet', 'serve_fleet', 'drain_fleet', 'drain_worker', 'end_fleet', 'fleet_counts'
    ];
    managing constant text[] := array[
        'create_job_type', 'change_job_type', 'declare_job_type', 'drop_job_type', 'drop_pool', 'pause', 'resume', 'prune', 'change_retention', 'quarantine', 'add_user', 'remove_user',
        'list_users', 'find_user', 'find_users', 'drain_member', 'convert_to_pool', 'resize_pool', 'change_pool', 'set_weight', 'pause_key', 'resume_key', 'prune_messages', 'prune_history',
        'create_stream', 'change_stream', 'grow_stream', 'drop_stream', 'roll_segment', 'retire_segments', 'drop_consumer_group',
        'open_lake', 'drop_lake', 'lake_sketches', 'commit_lake_batch', 'swap_lake_files', 'failure_report', 'drop_schedule',
        'change_topic', 'preview_erasure', 'start_erasure', 'cancel_erasure', 'fence_restored', 'erase_lake_file', 'fence_lake', 'finish_lake', 'finish_erasure'
    ];
    serving constant text[] := array[
        'declare_job_type', 'settle_attempts', 'has_users', 'find_user', 'find_users', 'open_session', 'find_session', 'use_link', 'close_session', 'begin_change',
        'end_change', 'list_changes', 'mute_failures', 'unmute_failures'
    ];
begin
    return case p_access
        when 'reader' then reading
        when 'producer' then reading || producing
        when 'worker' then reading || producing || working || array['declare_job_type']
        when 'server' then reading || producing || working || serving
        when 'admin' then reading || producing || working || serving || managing
    end;
end
$$;
comment on function penstock.functions_of(text) is 'Part of grant_access: the names of the functions that a reader, producer, worker, server or admin may call. Null for another word.';

create or replace function penstock.revoke_all(p_role name)
returns void
language plpgsql
set search_path = penstock, pg_temp
as $$
declare
    granter name;
begin
    execute format('revoke all on all functions in schema penstock from %I', p_role);
    execute format('revoke all on all tables in schema penstock from %I', p_role);
    execute format('revoke all on all sequences in schema penstock from %I', p_role);
    execute format('revoke all on schema penstock from %I', p_role);
    for granter in
        select distinct pg_get_userbyid(defaults.defaclrole)
        from pg_default_acl as defaults
        cross join aclexplode(defaults.defaclacl) as given
        join pg_roles on pg_roles.oid = given.grantee
        where defaults.defaclnamespace = 'penstock'::regnamespace and pg_roles.rolname = p_role
    loop
        execute format('alter default privileges for role %I in schema penstock revoke all on tables from %I', granter, p_role);
    end loop;
end
$$;
comment on function penstock.revoke_all(name) is 'Part of grant_access and revoke_access: takes every right in the schema from a role.';

create or replace function penstock.grant_access(p_role name, p_access text)
returns void
language plpgsql
set search_path = penstock, pg_temp
as $$
declare
    allowed constant text[] := penstock.functions_of(p_access);
    function regprocedure;
    owner name;
begin
    if not exists (select from pg_roles where rolname = p_role) then
        raise exception 'no such role: %', p_role
            using errcode = 'PS404', hint = format('Create it first: create role %I login password ''...'';', p_role);
    end if;
    if allowed is null then
        raise exception 'unknown access: %', coalesce(left(p_access, 100), 'null')
            using errcode = 'PS400', hint = 'Access is reader, producer, worker, server or admin.';
    end if;
    select pg_get_userbyid(nspowner) into owner from pg_namespace where nspname = 'penstock';
    if p_role = owner then
        raise exception 'role % owns the schema', p_role
            using errcode = 'PS409', hint = 'The owner may do everything; give access to other roles.';
    end if;
    -- Two at a time would write the same rows of the catalogue.
    perform pg_advisory_xact_lock(hashtext('penstock.grant_access'));
    -- All rights are revoked first, so that less access than before takes rights away.
    perform penstock.revoke_all(p_role);
    execute format('grant usage on schema penstock to %I', p_role);
    execute format('grant select on all tables in schema penstock to %I', p_role);
    -- No role may read secrets, or hashes of them.
    execute format('revoke all on penstock.users, penstock.sessions, penstock.id_secrets from %I', p_role);
    -- Rows that are being loaded concern their transaction alone.
    execute format('revoke all on penstock.loaded_chunks from %I', p_role);
    -- Days of the archive and segments of streams belong to the owner, whichever role makes them.
    execute format('alter default privileges for role %I in schema penstock grant select on tables to %I', owner, p_role);
    if p_access <> 'reader' then
        -- What Spark's tasks and loads copy into; it counts only through commit_staged and end_load. Whose it is and of which
        -- transaction is not theirs to say.
        execute format(
            'grant insert (writer, part, place, name, data, id, made, key, priority, run_after, expires_at, unique_key) on penstock.staged_jobs to %I',
            p_role
        );
        execute format(
            'grant insert (writer, part, place, stream, width, partition, events, keys, times, headers, data, bytes) on penstock.staged_events to %I',
            p_role
        );
        execute format(
            'grant insert (stream, partition, events, keys, times, headers, data, bytes) on penstock.loaded_chunks to %I', p_role
        );
    end if;
    for function in
        select pg_proc.oid::regprocedure
        from pg_proc
        where pronamespace = 'penstock'::regnamespace and proname = any (allowed)
    loop
        execute format('grant execute on function %s to %I', function, p_role);
    end loop;
    insert into penstock.access_grants as given (role_name, access)
    values (p_role, p_access)
    on conflict (role_name) do update set access = excluded.access;
end
$$;
comment on function penstock.grant_access(name, text) is
    'Gives a role the access of a reader, producer, worker, server or admin, instead of the one that it had: what the new one does not hold is taken away. Run as the owner of the schema. Repeated by every migration.';

create or replace function penstock.revoke_access(p_role name)
returns void
language plpgsql
set search_path = penstock, pg_temp
as $$
begin
    if not exists (select from pg_roles where rolname = p_role) then
        raise exception 'no such role: %', p_role
            using errcode = 'PS404', hint = 'See select * from penstock.access_grants;';
    end if;
    perform pg_advisory_xact_lock(hashtext('penstock.grant_access'));
    perform penstock.revoke_all(p_role);
    delete from penstock.access_grants where role_name = p_role;
end
$$;
comment on function penstock.revoke_access(name) is
    'Takes every right in the schema from a role, at once also for sessions that are open. What the role has as a member of other roles stays. Run as the owner of the schema.';

create or replace function penstock.refresh_access()
returns void
language plpgsql
set search_path = penstock, pg_temp
as $$
declare
    given record;
begin
    revoke execute on all functions in schema penstock from public;
    -- The rights of a role end with the role: a new role of the same name has to be given them again.
    delete from penstock.access_grants
    where not exists (
        select
        from pg_namespace
        cross join aclexplode(nspacl) as usable
        join pg_roles on pg_roles.oid = usable.grantee
        where nspname = 'penstock' and pg_roles.rolname = access_grants.role_name
    );
    for given in select * from penstock.access_grants loop
        perform penstock.grant_access(given.role_name, given.access);
    end loop;
end
$$;
comment on function penstock.refresh_access() is 'Takes every function from public and repeats all grants; a migration ends with it.';
