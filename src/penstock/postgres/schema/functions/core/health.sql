-- Health: what metrics and `penstock doctor` read about the database itself. Everything comes from the catalogue and the statistics of
-- PostgreSQL, or from a bounded number of rows, so that no call reads a queue.

create or replace function penstock.database_gauges()
returns table (gauge text, label text, amount double precision)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    -- What holds back vacuum: a snapshot or a transaction of this database, or a prepared transaction. Snapshots of roles that the
    -- owner may not see (without pg_read_all_stats) are missing.
    select
        'oldest_snapshot_seconds', '',
        coalesce(
            extract(epoch from clock_timestamp() - min(since)), 0
        )::double precision
    from (
        select xact_start as since
        from pg_stat_activity
        where pid <> pg_backend_pid() and datname = current_database() and backend_type = 'client backend'
            and (backend_xmin is not null or backend_xid is not null)
        union all
        select prepared from pg_prepared_xacts where database = current_database()
    ) as open_transactions
    union all
    select
        'replication_slot_bytes', '',
        coalesce(max(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)), 0)::double precision
    from pg_replication_slots
    union all
    select 'database_bytes', '', pg_database_size(current_database())::double precision
    union all
    select value.*
    from unnest(array['queued_jobs', 'leases', 'workers', 'slots', 'members', 'group_offsets']) as hot (name)
    join pg_stat_user_tables as stat on stat.schemaname = 'penstock' and stat.relname = hot.name
    cross join lateral (
        values
            ('dead_rows', hot.name, stat.n_dead_tup::double precision),
            ('table_bytes', hot.name, pg_total_relation_size(stat.relid)::double precision),
            (
                'vacuumed_seconds', hot.name,
                extract(epoch from clock_timestamp() - greatest(stat.last_vacuum, stat.last_autovacuum))::double precision
            )
    ) as value (gauge, label, amount)
    where value.amount is not null
    union all
    -- Workers make the partitions of the next day ahead of time.
    select
        'archive_day_missing', to_char(near.moment at time zone 'UTC', 'YYYY-MM-DD'),
        bool_or(
            to_regclass('penstock.' || penstock.archive_partition(class.keep, class.days, near.moment)) is null
        )::integer::double precision
    from (values (penstock.clock()), (penstock.clock() + interval '1 day')) as near (moment)
    cross join penstock.retention_classes as class
    where class.in_use
    group by near.moment
    union all
    -- Workflows. Of the ticks the first thousand: there are more only when they are not resolved, and then these are the oldest.
    select
        'workflow_tick_seconds', '', coalesce(extract(epoch from clock_timestamp() - min(first.noted_at)), 0)::double precision
    from (select tick.noted_at from penstock.workflow_ticks as tick order by tick.id limit 1000) as first
    union all
    select 'job_groups', status.label, count(*) filter (where status.label = first.status)::double precision
    from (values ('open'), ('running')) as status (label)
    left join (
        select case when job_group.sealed_at is null then 'open' else 'running' end as status
        from penstock.job_groups as job_group
        where job_group.finished_at is null
        limit 10000
    ) as first on true
    group by status.label
    union all
    select 'waiting_jobs', '', stat.n_live_tup::double precision
    from pg_stat_user_tables as stat
    where stat.schemaname = 'penstock' and stat.relname = 'waiting_jobs'
    union all
    -- Partitions of the archive and segments of streams are many: their pages as of the last vacuum, without a look at each file.
    select 'table_bytes', kind.label, coalesce(sum(class.relpages::double precision), 0) * current_setting('block_size')::integer
    from (values ('archived_jobs', 'archived_jobs%'), ('events', 'events%')) as kind (label, pattern)
    left join pg_class as class
        on class.relnamespace = 'penstock'::regnamespace and class.relkind in ('r', 'i') and class.relname like kind.pattern
    group by kind.label
$$;
comment on function penstock.database_gauges() is
    'Gauges of the database: age of the oldest snapshot, bytes that a replication slot retains, dead rows, sizes and age of the last vacuum of tables, and whether days of the archive are missing; of workflows the age of the oldest tick, up to 10,000 job groups that have not ended, and about how many jobs wait for others. Reads the catalogue, statistics, and a bounded number of rows.';

create or replace function penstock.lake_lags()
returns table (lake text, behind_s double precision)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        lakes.name,
        coalesce(greatest(extract(epoch from penstock.clock() - missing.finished_at), 0), 0)::double precision
    from penstock.lakes
    left join lateral (
        select job.finished_at
        from penstock.archived_jobs as job
        where job.xid >= coalesce(pg_snapshot_xmin(nullif(lakes.seen, '')::pg_snapshot), '0'::xid8)
            and (lakes.seen = '' or not pg_visible_in_snapshot(job.xid, nullif(lakes.seen, '')::pg_snapshot))
        order by job.xid
        limit 1
    ) as missing on true
    order by lakes.name
$$;
comment on function penstock.lake_lags() is
    'For how many seconds the first finished job that a lake does not have has waited for it; 0: the lake has all.';

create or replace function penstock.stream_lags()
returns table (stream text, group_id text, lag bigint, lag_s double precision, quarantined bigint)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        streams.name, reached.group_id, sum(reached.lag)::bigint,
        coalesce(max(extract(epoch from penstock.clock() - next_event.appended_at)), 0)::double precision,
        count(*) filter (where reached.quarantined)
    from penstock.streams
    cross join lateral penstock.group_lag(streams.name) as reached
    join lateral penstock.stream_bounds(streams.name) as bounds on bounds.partition = reached.partition
    left join lateral (
        select chunk.appended_at
        from penstock.read_chunks(
            streams.name, array[reached.partition], array[greatest(reached.next_offset, bounds.first_offset)], 1
        ) as chunk
        limit 1
    ) as next_event on reached.lag > 0
    group by streams.name, reached.group_id
    order by streams.name, reached.group_id
$$;
comment on function penstock.stream_lags() is
    'Of each consumer group how many events are before it over all partitions, for how many seconds the oldest of them has waited, and how many of its partitions are quarantined.';
