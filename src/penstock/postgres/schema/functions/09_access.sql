-- Access: what a role may do.
--
--   producer   enqueue, cancel, replay, and look
--   worker     what a producer may, and claim, settle, extend, heartbeat, care
--   reader     look only
--   admin      everything, job types included
--
-- The functions run with the rights of the owner of the schema, so none of these roles needs a right on a table
-- beyond select. Nothing is granted to public.

create or replace function penstock.grant_access(p_role name, p_access text)
returns void
language plpgsql
set search_path = penstock, pg_temp
as $$
declare
    reading constant text[] := array[
        'clock', 'held_clock', 'id_time', 'new_id', 'job_counts', 'find_jobs', 'list_jobs', 'page_of_jobs', 'job_rates', 'attempts_of',
        'stored_jobs', 'key_hash', 'jump_hash', 'slot_of', 'group_members', 'group_slots', 'load_of_types',
        'pool_details', 'key_weights_of', 'key_state', 'standing_list', 'runnable_in_pools',
        'payload', 'list_subscribers', 'read_topic', 'message_of', 'messages_of', 'missed_messages', 'late_messages', 'unfinished_copies', 'outcomes',
        'topic_counts',
        'bucket_of', 'routes_of', 'partition_of', 'stream_bounds', 'read_chunks', 'read_events', 'offsets_at', 'stream_segments',
        'group_lag', 'wait_for_events', 'stop_waiting',
        'wait_for_history', 'archive_counts', 'archive_cuts', 'archive_start', 'archive_lost', 'archive_blocks', 'scan',
        'growths', 'bounds_of_streams', 'scan_events', 'worker_list'
    ];
    producing constant text[] := array[
        'enqueue', 'enqueue_many', 'enqueue_json', 'put_jobs', 'cancel', 'run_now', 'replay', 'start_standing', 'stop_standing',
        'notify_standing', 'reconcile_standing', 'publish', 'publish_many', 'publish_json',
        'append', 'append_many', 'append_routed', 'append_json', 'append_each', 'append_each_json', 'begin_load', 'end_load',
        'last_sequence', 'commit_staged', 'commit_staged_events', 'discard_staged', 'sweep_staged',
        'forget_writer'
    ];
    working constant text[] := array[
        'claim', 'extend', 'settle', 'settle_attempts', 'leave_to_callback', 'report_progress', 'register_worker', 'heartbeat',
        'unregister_worker', 'release_unknown', 'wait_for_jobs', 'promote', 'expire', 'recover',
        'declare_group', 'declare_pool', 'lock_group', 'set_targets', 'join_group', 'leave_group', 'evict', 'member_heartbeat',
        'take', 'release', 'owns', 'set_metadata', 'wait_for_slots', 'claim_keys', 'forget_keys', 'cancelled_of',
        'standing_of', 'begin_standing', 'save_standing', 'end_standing', 'take_messages',
        'declare_topic', 'subscribe', 'subscribe_many', 'renew_subscriptions', 'unsubscribe', 'unsubscribe_many', 'tend_topics',
        'declare_stream', 'declare_consumer_group', 'begin_partitions', 'commit_offsets', 'commit_exactly', 'commit_json', 'dead_letter',
        'quarantine_partition', 'halt_partition', 'replay_dead', 'seek_group', 'pause_partitions', 'resume_partitions', 'sweep_streams', 'tend_stream', 'compact_stream',
        'drop_retired',
        'declare_schedule', 'take_schedule', 'extend_schedule', 'end_schedule',
        'start_fleet', 'serve_fleet', 'drain_fleet', 'drain_worker', 'end_fleet', 'fleet_counts'
    ];
    managing constant text[] := array[
        'create_job_type', 'change_job_type', 'declare_job_type', 'pause', 'resume', 'prune', 'add_user', 'remove_user',
        'list_users', 'find_user', 'drain_member', 'resize_pool', 'change_pool', 'set_weight', 'prune_messages',
        'create_stream', 'change_stream', 'grow_stream', 'drop_stream', 'roll_segment', 'retire_segments', 'drop_consumer_group',
        'open_lake', 'drop_lake', 'lake_sketches', 'commit_lake_batch', 'swap_lake_files', 'failure_report'
    ];
    allowed text[];
    function regprocedure;
begin
    if not exists (select from pg_roles where rolname = p_role) then
        raise exception 'no such role: %', p_role
            using errcode = 'PS404', hint = format('Create it first: create role %I login password ''...'';', p_role);
    end if;
    allowed := case p_access
        when 'reader' then reading
        when 'producer' then reading || producing
        when 'worker' then reading || producing || working || array['declare_job_type']
        when 'admin' then reading || producing || working || managing
    end;
    if allowed is null then
        raise exception 'unknown access: %', left(p_access, 100)
            using errcode = 'PS400', hint = 'Access is reader, producer, worker or admin.';
    end if;
    execute format('grant usage on schema penstock to %I', p_role);
    execute format('grant select on all tables in schema penstock to %I', p_role);
    -- Hashes of secrets are for nobody to read.
    execute format('revoke all on penstock.users from %I', p_role);
    -- What is on its way is nobody's business but its transaction's.
    execute format('revoke all on penstock.loaded_chunks from %I', p_role);
    execute format('alter default privileges in schema penstock grant select on tables to %I', p_role);
    if p_access <> 'reader' then
        -- What Spark's tasks copy into; it counts only through commit_staged.
        execute format('grant insert on penstock.staged_jobs, penstock.staged_events to %I', p_role);
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
    insert into penstock.access_grants values (p_role, p_access) on conflict do nothing;
end
$$;
comment on function penstock.grant_access(name, text) is
    'Gives a role the access of a reader, producer, worker or admin. Run as the owner of the schema. Repeated by every migration.';

create or replace function penstock.refresh_access()
returns void
language plpgsql
set search_path = penstock, pg_temp
as $$
declare
    given record;
begin
    revoke execute on all functions in schema penstock from public;
    for given in
        select * from penstock.access_grants where role_name in (select rolname from pg_roles)
    loop
        perform penstock.grant_access(given.role_name, given.access);
    end loop;
end
$$;
comment on function penstock.refresh_access() is 'Takes every function from public and repeats all grants; a migration ends with it.';
