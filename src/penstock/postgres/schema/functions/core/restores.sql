-- Restores: what tells a restored database from the one that was there before. docs/restore.md says how to restore.

create or replace function penstock.server_identity(out system_id text, out timeline integer)
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
begin
    select control.system_identifier::text into system_id from pg_control_system() as control;
    -- The control file has the new timeline only from the next checkpoint on.
    timeline := ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer;
exception
    when insufficient_privilege or object_not_in_prerequisite_state then
        null;
end
$$;
comment on function penstock.server_identity() is
    'The identifier of the server, which a restore from a dump changes, and its timeline, which a restore to a time and a promotion change. Null where the server does not show them.';

insert into penstock.restores (number, noted_at, system_id, timeline, next_xid)
select 0, now(), server.system_id, server.timeline, pg_snapshot_xmax(pg_current_snapshot())
from penstock.server_identity() as server
on conflict do nothing;

create or replace function penstock.next_transaction()
returns xid8
language plpgsql
stable
as $$
declare
    noted text;
begin
    -- The checkpoint at the end of a recovery notes it before anything else is written.
    select control.next_xid into noted from pg_control_checkpoint() as control;
    return least(
        pg_snapshot_xmax(pg_current_snapshot()),
        (split_part(noted, ':', 1)::numeric * 4294967296 + split_part(noted, ':', 2)::numeric)::text::xid8
    );
exception
    when insufficient_privilege then
        return pg_snapshot_xmax(pg_current_snapshot());
end
$$;
comment on function penstock.next_transaction() is
    'Part of fence_restored: the next transaction of a database that was restored, as far as the server shows it.';

create or replace function penstock.restored()
returns table (number integer, next_xid xid8)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select restores.number, restores.next_xid
    from penstock.restores
    where restores.number > 0 and not restores.nothing_lost
    order by restores.number
$$;
comment on function penstock.restored() is 'The restores in which something was lost, oldest first, with the next transaction of each.';

create or replace function penstock.is_unfenced()
returns boolean
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select coalesce(
        (last.system_id, last.timeline) <> (server.system_id, server.timeline) and num_nonnulls(last.system_id, server.system_id) = 2, false
    )
    from penstock.server_identity() as server
    cross join (select restores.system_id, restores.timeline from penstock.restores order by restores.number desc limit 1) as last
$$;
comment on function penstock.is_unfenced() is
    'Whether the database is on another server, or another timeline, than was noted: it was restored, moved or promoted, and fence_restored was not called.';

create or replace function penstock.raise_numbers(p_by bigint)
returns void
language plpgsql
as $$
declare
    raised text;
begin
    foreach raised in array array['job_seq', 'lease_id', 'place_ticket', 'member_age', 'segment_number', 'message_number'] loop
        perform setval(format('penstock.%I', raised)::regclass, nextval(format('penstock.%I', raised)::regclass) + p_by);
    end loop;
    perform setval(
        pg_get_serial_sequence('penstock.subscriptions', 'number'), nextval(pg_get_serial_sequence('penstock.subscriptions', 'number')) + p_by
    );
    update penstock.groups set generation = generation + p_by, balanced = -1;
    update penstock.slots set epoch = epoch + p_by, changed_at = penstock.clock();
    update penstock.group_offsets set epoch = epoch + p_by, revision = revision + 1;
    update penstock.leader_tasks set epoch = epoch + p_by;
    update penstock.topics set generation = generation + p_by;
    update penstock.standing_jobs set version = version + p_by;
end
$$;
comment on function penstock.raise_numbers(bigint) is
    'Part of fence_restored: raises all numbers that fence or order, so that none that was given out after the backup is given again.';

create or replace function penstock.end_all_work(p_moment timestamptz)
returns integer
language plpgsql
as $$
declare
    -- As of a slot that moves: a job that only its restore has interrupted is no suspect.
    error constant jsonb := jsonb_build_object('type', 'SlotMoved', 'message', 'the database was restored while a worker had the job');
    group_of record;
    lost penstock.leases;
    held record;
    ended integer := 0;
begin
    perform penstock.fold_finished(null);
    for lost in select * from penstock.leases order by id for update loop
        select array_agg(job.id) as ids, array_agg(job.attempt) as attempts into held from penstock.jobs_of_lease(lost) as job;
        if held.ids is not null then
            ended := ended + (
                select count(*)
                from penstock.end_attempts(
                    held.ids, held.attempts, array_fill(lost.id, array[cardinality(held.ids)]),
                    array_fill('moved'::text, array[cardinality(held.ids)]), array_fill(error, array[cardinality(held.ids)]),
                    array_fill(interval '0', array[cardinality(held.ids)]), p_moment
                )
            );
        end if;
    end loop;
    delete from penstock.leases;
    for group_of in select members.group_name, array_agg(members.id) as ids from penstock.members group by members.group_name loop
        perform penstock.lock_group(group_of.group_name);
        perform penstock.remove_members(group_of.group_name, group_of.ids, false);
    end loop;
    update penstock.slots set owner = null, target = null where owner is not null or target is not null;
    update penstock.schedules set running_by = null, running_until = null where running_by is not null;
    -- A logout after the backup is not undone.
    delete from penstock.sessions;
    delete from penstock.workers;
    delete from penstock.fleet_members;
    delete from penstock.place_waiters;
    delete from penstock.listeners;
    return ended;
end
$$;
comment on function penstock.end_all_work(timestamptz) is
    'Part of fence_restored: ends all attempts, memberships and workers that the restored database knows. Jobs go back to their places; at_most_once jobs that had begun fail. Returns how many jobs.';

create or replace function penstock.fence_restored(p_nothing_lost boolean default false, p_pause boolean default true)
returns table (number integer, jobs integer, paused text[])
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    moment constant timestamptz := penstock.clock();
    next_xid constant xid8 := penstock.next_transaction();
    server record;
    stream penstock.streams;
begin
    if p_nothing_lost is null or p_pause is null then
        raise exception 'p_nothing_lost and p_pause are true or false'
            using errcode = 'PS400', hint = 'For example: select * from penstock.fence_restored();';
    end if;
    perform penstock.ensure_archive(moment);
    lock table penstock.restores in share row exclusive mode;
    select * into server from penstock.server_identity();
    number := (select max(restores.number) + 1 from penstock.restores);
    jobs := 0;
    paused := '{}';
    insert into penstock.restores (number, noted_at, system_id, timeline, next_xid, nothing_lost)
    values (number, moment, server.system_id, server.timeline, next_xid, p_nothing_lost);
    if not p_nothing_lost then
        for stream in select * from penstock.streams order by streams.id loop
            insert into penstock.restored_ends (restore, stream, partition, next_offset)
            select number, stream.id, bounds.partition, bounds.next_offset from penstock.stream_bounds(stream.name) as bounds;
        end loop;
        jobs := penstock.end_all_work(moment);
        perform penstock.raise_numbers(1000000000);
        if p_pause then
            -- They may have run after the time to which the database was restored.
            with held as (
                update penstock.jobs as type
                set paused_at = moment
                where type.delivery_strategy = 'at_most_once' and type.paused_at is null and penstock.has_jobs(type.name)
                returning type.name
            )
            select coalesce(array_agg(held.name order by held.name), '{}') into paused from held;
        end if;
    end if;
    return next;
end
$$;
comment on function penstock.fence_restored(boolean, boolean) is
    'Call it once, on a database that was restored, before anything else writes. It ends all work that the database knows of, raises all numbers that fence, so that what workers of before report is refused, notes the ends of streams and the next transaction, by which checkpoints that are ahead are told, and (p_pause) pauses the at_most_once types with waiting jobs, since these may have run. p_nothing_lost: only note the server, as after a move or a promotion without loss. Returns the number of the restore, how many jobs were in progress, and which types are paused.';

create or replace function penstock.restore_report()
returns table (unfenced boolean, in_progress bigint, at_most_once text[], due_schedules text[], producers text[])
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        penstock.is_unfenced(),
        (select count(*) from penstock.queued_jobs as job where job.status = 'in-progress'),
        array(
            select type.name || case when type.paused_at is not null then ' (paused)' else '' end
            from penstock.jobs as type
            where type.delivery_strategy = 'at_most_once' and penstock.has_jobs(type.name)
            order by 1
        ),
        array(select schedules.name from penstock.schedules where schedules.next_at < penstock.clock() order by 1),
        array(
            select distinct streams.name || ': ' || producer.producer
            from penstock.stream_producers as producer
            join penstock.streams on streams.id = producer.stream
            order by 1
        )
$$;
comment on function penstock.restore_report() is
    'What to look at after a restore: whether the database is to be fenced, how many jobs it has in progress, at_most_once types with waiting jobs, schedules that are due, and producers that number their batches.';
