-- Losses: what the loss of a worker says about the jobs that it had. The head of tables/0002_jobs.sql explains what follows from it.

create or replace function penstock.process_of(p_holder text)
returns text
language sql
immutable
as $$
    -- Only ids that Penstock's own processes make for themselves (host.pid.xxxxxx) have a number that is no part of the process.
    select coalesce(substring(p_holder from '^(.*[.][0-9]+[.][0-9a-f]{6})[.](?:[pcl][0-9]+|[0-9]{1,5})$'), p_holder)
$$;
comment on function penstock.process_of(text) is
    'The id of the process of a worker or member: without the number with which a worker registered again, or that of its membership. The ids of other clients are processes themselves.';

create or replace function penstock.loss_speaks(p_lost penstock.workers)
returns boolean
language sql
stable
as $$
    select case
        -- Its supervisor outlived it, and said so.
        when p_lost.ended_at is not null then true
        -- Of a worker that was alone on its machine nothing else is known; a supervisor starts a successor, or was lost too.
        when count(*) = 0 then p_lost.supervisor is null
        else bool_or(beside.lives)
    end
    from (
        select
            present.state <> 'dead' and present.ended_at is null and present.seen_at >= p_lost.seen_at + p_lost.dead_after * 0.55 as lives
        from penstock.workers as present
        where penstock.process_of(present.id) <> penstock.process_of(p_lost.id)
            and present.supervisor is not distinct from p_lost.supervisor
            and (present.supervisor is not null or present.host = p_lost.host)
        union all
        select false
        from penstock.lost_workers as gone
        where gone.process <> penstock.process_of(p_lost.id)
            and gone.supervisor is not distinct from p_lost.supervisor
            and (gone.supervisor is not null or gone.host = p_lost.host)
            and gone.first_at <= p_lost.seen_at + p_lost.dead_after * 0.55
            and gone.last_at >= p_lost.seen_at
    ) as beside
$$;
comment on function penstock.loss_speaks(penstock.workers) is
    'Part of note_losses: whether the loss of a worker says anything about its jobs. It does not when its node was lost: other workers of its supervisor, or of its machine when it has none, are known, and none of them has been seen since.';

create or replace function penstock.note_losses(p_ids text[], p_moment timestamptz)
returns void
language sql
as $$
    insert into penstock.lost_workers (id, process, host, supervisor, started_at, first_at, last_at, lost_at, how, speaks)
    select
        workers.id, penstock.process_of(workers.id), workers.host, workers.supervisor, workers.started_at,
        -- Its supervisor notices an end within a second.
        coalesce(workers.ended_at - interval '1 second', workers.seen_at),
        coalesce(workers.ended_at, workers.seen_at + workers.dead_after * 0.55),
        p_moment, workers.ended_how, penstock.loss_speaks(workers)
    from penstock.workers
    where workers.id = any (p_ids)
    on conflict (id) do nothing;
    delete from penstock.lost_workers where lost_at < p_moment - interval '1 hour';
$$;
comment on function penstock.note_losses(text[], timestamptz) is
    'Part of recover: records workers that were lost, and what their losses say, and forgets those of more than an hour ago.';

create or replace function penstock.lost_together(p_process text)
returns boolean
language sql
stable
as $$
    with lost as (
        select process, started_at, first_at, last_at
        from penstock.lost_workers
        where lost_at > penstock.clock() - interval '5 minutes'
        union all
        select penstock.process_of(id), started_at, seen_at, seen_at + dead_after * 0.55
        from penstock.workers
        where state <> 'dead' and ended_at is null and seen_at < penstock.clock() - dead_after * 0.6
    ),
    last as (select lost.first_at, lost.last_at from lost where lost.process = p_process order by lost.last_at desc limit 1)
    select exists (
        select
        from last
        join lost as other on other.first_at <= last.last_at and other.last_at >= last.first_at
        where other.process <> p_process
            -- One that ends as soon as it begins, again and again, would excuse everything.
            and other.first_at > other.started_at
    )
$$;
comment on function penstock.lost_together(text) is
    'Part of end_lost, lose_standing and lose_partitions: whether another worker, which had lived for a heartbeat or longer, was lost at the same time as this process.';

create or replace function penstock.speaks_of(p_holder text)
returns boolean
language sql
stable
as $$
    select coalesce(
        -- One that lives has lost no more than a lease, by what it ran; a member may be evicted before its worker is found to be lost.
        (
            select case
                when workers.ended_at is null and workers.seen_at > penstock.clock() - workers.dead_after * 0.6 then true
                else penstock.loss_speaks(workers)
            end
            from penstock.workers
            where penstock.process_of(workers.id) = penstock.process_of(p_holder) and workers.state <> 'dead'
            order by workers.started_at desc
            limit 1
        ),
        (
            select lost.speaks
            from penstock.lost_workers as lost
            where lost.process = penstock.process_of(p_holder)
            order by lost.lost_at desc
            limit 1
        ),
        true
    )
$$;
comment on function penstock.speaks_of(text) is
    'Part of what ends the work of a lost worker or member: whether the loss says anything about that work. True when its process is not known.';

create or replace function penstock.end_workers(p_supervisor text, p_pids integer[], p_how text[])
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    moment constant timestamptz := penstock.clock();
    ended text[];
begin
    perform penstock.check_sender('supervisor', p_supervisor, interval '10 seconds');
    perform penstock.check_size(greatest(cardinality(p_pids), cardinality(p_how)), 10000, 'processes');
    perform penstock.check_lists(array[array_dims(p_pids), array_dims(p_how)]);
    with told as (
        update penstock.workers
        set ended_at = moment,
            ended_how = left(given.how, 100)
        from unnest(p_pids, p_how) as given (pid, how)
        where workers.supervisor = p_supervisor and workers.pid = given.pid and workers.ended_at is null
        returning workers.id
    )
    select array_agg(told.id) into ended from told;
    if ended is null then
        return 0;
    end if;
    -- The other members of its groups evict it when they look next, as if it had been silent for long.
    update penstock.members
    set seen_at = least(seen_at, moment - dead_after * 1.1),
        suspected_at = moment - dead_after * 0.6
    where penstock.process_of(id) = any (array(select penstock.process_of(each) from unnest(ended) as each));
    perform penstock.recover();
    return cardinality(ended);
end
$$;
comment on function penstock.end_workers(text, integer[], text[]) is
    'A supervisor says that processes of its workers have ended without leaving, and how (SIGKILL, exit code 1): their jobs are recovered at once. Give all that ended within the same second in one call. Returns how many workers these were.';
