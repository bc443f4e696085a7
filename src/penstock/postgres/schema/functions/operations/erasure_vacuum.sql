-- Erasure: its last phase, in which the owner of the tables removes the bytes of deleted rows.

create or replace function penstock.tables_to_vacuum(p_operation uuid)
returns setof text
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select 'penstock.' || quote_ident(touched.name)
    from (
        select unnest(erasures.touched) as name from penstock.erasures where erasures.operation = p_operation
        union
        select unnest(array[
            'queued_jobs', 'waiting_jobs', 'job_steps', 'job_signals', 'unique_periods', 'quarantined_payloads', 'schedules', 'rate_windows', 'key_weights', 'paused_keys', 'standing_jobs',
            'standing_messages', 'slots', 'group_offsets', 'topic_messages', 'topics', 'staged_jobs', 'staged_events', 'loaded_chunks', 'rollups',
            'failure_signatures', 'run_history', 'leader_tasks', 'operations', 'changes'
        ])
    ) as touched
    where to_regclass('penstock.' || quote_ident(touched.name)) is not null
    order by 1
$$;
comment on function penstock.tables_to_vacuum(uuid) is 'The tables from which an erasure may have deleted rows, without those that are gone meanwhile.';

create or replace function penstock.vacuum_waits(p_operation uuid)
returns boolean
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select exists (
        select from pg_stat_activity as other
        where other.pid <> pg_backend_pid() and other.datname = current_database()
            and age(other.backend_xmin) > age((state.vacuum_xid::text::bigint & 4294967295)::text::xid)
    )
    or exists (
        select from pg_prepared_xacts as prepared
        where prepared.database = current_database() and age(prepared.transaction) > age((state.vacuum_xid::text::bigint & 4294967295)::text::xid)
    )
    from penstock.erasures as state
    where state.operation = p_operation
$$;
comment on function penstock.vacuum_waits(uuid) is
    'Whether a transaction is open that still sees what an erasure has deleted, as far as the owner of the schema may see: a vacuum would leave it.';

create or replace function penstock.finish_erasure(p_id uuid)
returns penstock.operations
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    update penstock.operations
    set state = 'finished', finished_at = penstock.clock(), updated_at = penstock.clock()
    where id = p_id and kind = 'erase' and state = 'running' and phase = 'vacuum';
    return penstock.require_operation(p_id, false);
end
$$;
comment on function penstock.finish_erasure(uuid) is
    'Ends an erasure whose tables have been vacuumed, by a role that owns them. In any other phase it changes nothing. Returns the operation; PS404 when there is none.';
