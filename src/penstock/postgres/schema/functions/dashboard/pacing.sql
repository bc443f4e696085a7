-- What paces the readings of the dashboard: whether jobs have changed, and what a statement cost the database.
--
-- Neither goes by the time that a statement took: beside a full machine that is the time that it waited.

create or replace function penstock.job_marks()
returns table (place bigint, leases bigint, open_jobs bigint, written bigint, snapshot text)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        -- The first number of a sequence is its last value before it is taken, too.
        (select job_seq.last_value + job_seq.is_called::integer from penstock.job_seq),
        held.leases,
        held.open_jobs,
        (
            select
                sum(
                    pg_stat_get_tuples_inserted(counted.id) + pg_stat_get_tuples_updated(counted.id)
                    + pg_stat_get_tuples_deleted(counted.id)
                )::bigint
            from (values ('penstock.queued_jobs'::regclass), ('penstock.waiting_jobs'::regclass)) as counted (id)
        ),
        pg_current_snapshot()::text
    from (
        select coalesce(sum(lease.id), 0)::bigint as leases, coalesce(sum(lease.open_jobs), 0)::bigint as open_jobs
        from (select id, open_jobs from penstock.leases limit 2000) as lease
    ) as held
$$;
comment on function penstock.job_marks() is
    'Numbers that change when jobs do, for a fraction of what a count of jobs costs: the last place in the ready queue (a job was enqueued), the leases and their open jobs (jobs started or ended), and the writes to the tables of jobs that wait (place, leases, open_jobs, written), which the statistics of PostgreSQL may show ten seconds later. Beside them the snapshot: a place is visible before the transaction that took it ends.';

create or replace function penstock.work_of_transaction()
returns table (blocks bigint, entries bigint)
language sql
volatile
as $$
    select
        coalesce(sum(pg_stat_get_xact_blocks_fetched(relation.oid)), 0)::bigint,
        coalesce(sum(pg_stat_get_xact_tuples_returned(relation.oid)), 0)::bigint
    from pg_class as relation
    where relation.relkind in ('r', 'i', 't')
$$;
comment on function penstock.work_of_transaction() is
    'How many pages of tables and indexes the transaction has looked at, and how many rows and index entries it has read. Counts of earlier transactions of the connection are in it until PostgreSQL has flushed them, see pg_stat_force_next_flush.';
