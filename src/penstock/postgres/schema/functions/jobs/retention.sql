-- Retention: how long finished jobs are kept, and the partitions of the archive.
--
-- A job type says how long its jobs are kept that succeeded, and that ended otherwise (keep_succeeded, keep_failed). Each span is rounded up
-- to a retention class, and a job is archived with its class. So nothing is ever deleted row by row: the partitions of each class are
-- dropped when all that is in them has been kept for long enough. Class 0 has the jobs of types that say nothing, which
-- are kept for as long as the table retention says. docs/decisions/0030-retention-classes.md has the reasons.

create or replace function penstock.retention_class(p_keep interval)
returns smallint
language sql
immutable
parallel safe
as $$
    select (
        case
            when p_keep is null then 0
            when p_keep <= interval '1 day' then 1
            when p_keep <= interval '3 days' then 3
            when p_keep <= interval '7 days' then 7
            when p_keep <= interval '30 days' then 30
            when p_keep <= interval '90 days' then 90
            else 365
        end
    )::smallint
$$;
comment on function penstock.retention_class(interval) is
    'The retention class of jobs that are to be kept for this long: the next of 1, 3, 7, 30, 90 and 365 days; 0: as long as the table retention says.';

create or replace function penstock.class_of_type(p_name text)
returns smallint
language sql
stable
as $$
    select penstock.retention_class(jobs.keep_succeeded) from penstock.jobs where jobs.name = p_name
$$;
comment on function penstock.class_of_type(text) is
    'Part of settle: the retention class of jobs of a type that succeed, for a lease that does not have it. Null when there is no such type.';

create or replace function penstock.archive_partition(p_keep smallint, p_days smallint, p_moment timestamptz)
returns text
language sql
stable
parallel safe
as $$
    -- An expression alone, since each settle calls this, and the server makes such a function part of the caller's query.
    select
        'archived_jobs' || case when p_keep = 0 then '' else '_k' || p_keep end
        || '_p'
        || to_char(
            ((p_moment at time zone 'UTC')::date - ((p_moment at time zone 'UTC')::date - date '0001-01-01') % p_days)::timestamp,
            'YYYYMMDD'
        )
$$;
comment on function penstock.archive_partition(smallint, smallint, timestamptz) is
    'The name of the partition for jobs of a retention class that finish at p_moment; the date in it is its first day (UTC).';

create or replace function penstock.make_archive_partition(p_name text, p_keep smallint, p_days smallint)
returns void
language plpgsql
as $$
declare
    class constant text := 'archived_jobs_k' || p_keep;
    first constant date := to_date(right(p_name, 8), 'YYYYMMDD');
begin
    perform pg_advisory_xact_lock(hashtext('penstock.ensure_archive'));
    if to_regclass('penstock.' || p_name) is not null then
        return;
    end if;
    -- Created as tables and then attached: unlike "partition of", this does not wait for readers and writers of the archive.
    if to_regclass('penstock.' || class) is null then
        execute format(
            'create table penstock.%I (like penstock.archived_jobs including defaults including constraints) partition by range (finished_at)',
            class
        );
        execute format(
            'comment on table penstock.%I is %L', class,
            case when p_keep = 0 then 'Jobs that are kept as long as penstock.retention says.' else 'Jobs that are kept for ' || p_keep || ' days.' end
        );
        execute format('alter table penstock.archived_jobs attach partition penstock.%I for values in (%s)', class, p_keep);
    end if;
    execute format('create table penstock.%I (like penstock.archived_jobs including defaults including constraints)', p_name);
    execute format(
        'comment on table penstock.%I is %L', p_name,
        case
            when p_days = 1 then format('Jobs that finished on %s UTC.', first)
            else format('Jobs that finished from %s to %s UTC.', first, first + p_days - 1)
        end
    );
    execute format('alter table penstock.%I add primary key (id, finished_at)', p_name);
    execute format(
        'alter table penstock.%I attach partition penstock.%I for values from (%L) to (%L)',
        class, p_name, first::timestamp at time zone 'UTC', (first + p_days)::timestamp at time zone 'UTC'
    );
end
$$;
comment on function penstock.make_archive_partition(text, smallint, smallint) is
    'Part of ensure_archive: makes a partition of a retention class, and the table of the class when it is the first.';

create or replace function penstock.ensure_archive(p_moment timestamptz)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_times(array[p_moment]);
    perform penstock.make_archive_partition(penstock.archive_partition(class.keep, class.days, p_moment), class.keep, class.days)
    from penstock.retention_classes as class
    where class.in_use and to_regclass('penstock.' || penstock.archive_partition(class.keep, class.days, p_moment)) is null
    order by class.keep;
end
$$;
comment on function penstock.ensure_archive(timestamptz) is
    'Makes the partitions of archived_jobs for p_moment that are missing, one for each retention class in use.';

create or replace function penstock.use_retention_classes()
returns trigger
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    update penstock.retention_classes
    set in_use = true
    where keep in (penstock.retention_class(new.keep_succeeded), penstock.retention_class(new.keep_failed)) and not in_use;
    if found then
        -- Before the first job of the class, and the next one too: a query that was planned while a partition is attached does not see it.
        perform penstock.ensure_archive(penstock.clock());
        perform penstock.ensure_archive(penstock.clock() + interval '1 day');
    end if;
    return null;
end
$$;
comment on function penstock.use_retention_classes() is 'Makes the partitions of the retention classes that a job type begins to use.';

create or replace trigger jobs_use_retention_classes
after insert or update of keep_succeeded, keep_failed on penstock.jobs
for each row
when (new.keep_succeeded is not null or new.keep_failed is not null)
execute function penstock.use_retention_classes();

create or replace function penstock.lake_without(p_partition text)
returns text
language plpgsql
stable
as $$
declare
    lacking text;
begin
    -- The position of a lake and its manifest are written in one transaction. The position says which transactions are in it, also those
    -- that archived a job long after its day; the manifest says that the files with the jobs of each day are still its own. Other
    -- partitions of the same day may be gone already, so it can have more jobs of a day than this partition has.
    execute format(
        'select lakes.name
        from penstock.lakes
        where lakes.guards
            and (
                lakes.seen = '''' and exists (select from penstock.%1$I)
                or exists (
                    select from penstock.%1$I as job
                    where job.xid >= pg_snapshot_xmin(nullif(lakes.seen, '''')::pg_snapshot)
                        and not pg_visible_in_snapshot(job.xid, nullif(lakes.seen, '''')::pg_snapshot)
                )
                or exists (
                    select
                    from (
                        select (job.finished_at at time zone ''UTC'')::date as day, count(*) as jobs
                        from penstock.%1$I as job
                        group by 1
                    ) as days
                    where days.jobs > (
                        select coalesce(sum(file.rows), 0)
                        from penstock.lake_files as file
                        where file.lake = lakes.name and file.kind = ''jobs'' and file.day = days.day
                    )
                )
            )
        order by lakes.name
        limit 1',
        p_partition
    ) into lacking;
    return lacking;
end
$$;
comment on function penstock.lake_without(text) is
    'Part of prune: a lake that guards and does not have all jobs of a partition of the archive, which the caller has locked. Null: there is none.';

-- Long for the reasons for which a partition is kept, each of which is looked at under its lock.
create or replace function penstock.prune(p_keep interval default null, p_limit integer default 1000000000)
returns table (partition text, jobs bigint)
language plpgsql
security definer
set search_path = penstock, pg_temp
-- A drop waits for readers, and blocks writers while it waits, so it waits for a short time only; the next prune tries again.
set lock_timeout = '2s'
as $$
declare
    moment constant timestamptz := penstock.clock();
    old record;
    newest xid8;
    total bigint;
    room bigint := p_limit;
    awaited boolean;
    behind text;
    partitions text[] := '{}';
    counts bigint[] := '{}';
    classes smallint[] := '{}';
    class smallint;
begin
    if p_keep < interval '0' or p_keep > interval '366000 days' and isfinite(p_keep) then
        raise exception 'cannot keep %', p_keep
            using errcode = 'PS400', hint = 'Give the time for which finished jobs are kept, for example 30 days; null: for ever.';
    end if;
    perform penstock.check_limit(p_limit, 1000000000);
    perform pg_advisory_xact_lock(hashtext('penstock.prune'));
    -- First all that takes long, while others read and write: a lock against writers of the partition alone, so that no job is added to it
    -- between the count and the drop.
    for old in
        select leaf.relation, leaf.keep, leaf.day, leaf.until
        from penstock.archive_leaves() as leaf
        where leaf.until::timestamp at time zone 'UTC' <= moment - case when leaf.keep = 0 then p_keep else leaf.keep * interval '1 day' end
        order by leaf.keep, leaf.day
    loop
        execute format('lock table penstock.%I in share mode', old.relation);
        -- A job that waits for one of them is released first, and a job group, or a run of a workflow, with one of them ends.
        execute format(
            'select exists (select from penstock.job_dependencies as dependency join penstock.%1$I as job on job.id = dependency.after)
                or exists (
                    select from penstock.job_groups as job_group join penstock.%1$I as job on job.workflow = job_group.id
                    where job_group.finished_at is null
                )
                or exists (
                    select from penstock.job_groups as run
                    join penstock.graph_steps as step on step.run = run.id
                    join penstock.%1$I as job on job.id = step.job
                    where run.finished_at is null
                )
                or exists (
                    select from penstock.job_groups as run
                    join penstock.graph_steps as step on step.run = run.id and step.jobs is not null
                    join penstock.%1$I as job on job.workflow = step.job
                    where run.finished_at is null
                )',
            old.relation
        ) into awaited;
        continue when awaited;
        behind := penstock.lake_without(old.relation);
        if behind is not null then
            raise warning 'the lake % does not have all jobs of %, which are therefore kept', behind, old.relation
                using hint = 'Run: penstock history run';
            continue;
        end if;
        execute format('select count(*), max(xid) from penstock.%I', old.relation) into total, newest;
        if total > 0 then
            insert into penstock.pruned_days as pruned (day, jobs, last_xid, pruned_at)
            values (old.day, total, newest, moment)
            on conflict (day) do update
            set jobs = pruned.jobs + excluded.jobs, last_xid = greatest(pruned.last_xid, excluded.last_xid), pruned_at = excluded.pruned_at;
        end if;
        execute format(
            'delete from penstock.quarantined_payloads as payload using penstock.%I as job where job.id = payload.id', old.relation
        );
        execute format('delete from penstock.job_steps as step using penstock.%I as job where job.id = step.job', old.relation);
        execute format('delete from penstock.job_signals as signal using penstock.%I as job where job.id = signal.job', old.relation);
        partitions := partitions || old.relation;
        counts := counts || total;
        classes := classes || old.keep;
        -- An empty partition costs something too.
        room := room - greatest(total, 1000);
        exit when room <= 0;
    end loop;
    if p_keep is not null then
        perform penstock.forget_groups(moment - p_keep);
        perform penstock.forget_operations(moment - p_keep);
        perform penstock.cancel_unsealed(moment - greatest(p_keep, interval '7 days'));
    end if;
    -- Then the drops. A query over the archive locks the tables of the classes in the order of their values, and each before its partitions,
    -- so that no two transactions wait for each other.
    for class in select distinct unnest(classes) order by 1 loop
        execute format('lock table only penstock.%I in access exclusive mode', 'archived_jobs_k' || class);
    end loop;
    for place in 1..cardinality(partitions) loop
        execute format('drop table penstock.%I', partitions[place]);
        partition := partitions[place];
        jobs := counts[place];
        return next;
    end loop;
end
$$;
comment on function penstock.prune(interval, integer) is
    'Drops the partitions of the archive whose jobs have all been kept for long enough: as long as their type says, and p_keep (null: for ever) where it says nothing; but none whose jobs are not all in every lake that guards, none of whose jobs another one waits for, and none with children of a job group that has not ended. A job group that was never sealed is cancelled when its last child ended p_keep ago, or a week ago if that is longer. Operations that ended p_keep ago are deleted, without erasures. An id can be used again once its partition is gone. It ends with the partition that makes it p_limit jobs, and each partition counts for at least a thousand. Returns what was dropped.';

create or replace function penstock.kept(p_kind text)
returns interval
language sql
stable
as $$
    select retention.keep from penstock.retention where retention.kind = p_kind
$$;
comment on function penstock.kept(text) is 'Part of prune_due and its like: the stored retention of jobs or history. Null: for ever.';

create or replace function penstock.prune_due(p_limit integer default 100000)
returns table (partition text, jobs bigint)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_limit(p_limit, 1000000000);
    return query
    select * from penstock.prune(penstock.kept('jobs'), p_limit);
end
$$;
comment on function penstock.prune_due(integer) is
    'As prune, by the stored retention: what a worker calls. It ends with the partition that makes it p_limit jobs: call it until it returns nothing.';

create or replace function penstock.check_retention(p_kind text, p_keep interval)
returns void
language plpgsql
immutable
as $$
begin
    if p_kind is null or p_kind not in ('jobs', 'history') then
        raise exception 'unknown kind of retention: %', coalesce(left(p_kind, 100), 'null')
            using errcode = 'PS400', hint = 'It is jobs or history.';
    end if;
    if p_keep is not null then
        perform penstock.check_span(p_keep, 'time for which ' || p_kind || ' are kept', '0', '366000 days');
    end if;
end
$$;
comment on function penstock.check_retention(text, interval) is 'Raises PS400 unless this kind can be kept for this long.';

create or replace function penstock.change_retention(p_kind text, p_keep interval)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_retention(p_kind, p_keep);
    update penstock.retention
    set keep = p_keep,
        changed_at = penstock.clock()
    where retention.kind = p_kind and retention.keep is distinct from p_keep;
    return found;
end
$$;
comment on function penstock.change_retention(text, interval) is
    'Stores for how long workers keep finished jobs of types that do not say it, and messages (jobs), or what comes back from lakes (history). Null: for ever. Returns whether that is a change.';

create or replace function penstock.lengthen_retention(p_kind text, p_keep interval)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_retention(p_kind, p_keep);
    update penstock.retention
    set keep = p_keep,
        changed_at = penstock.clock()
    -- A null in the table is the longest, and equals no other.
    where retention.kind = p_kind and (retention.keep < p_keep or retention.keep is not null and p_keep is null);
    return found;
end
$$;
comment on function penstock.lengthen_retention(text, interval) is
    'As change_retention, for a worker: stores the span if it is longer than the stored one, so that nothing is deleted that would have been kept. Returns whether it was.';
