-- The archive for readers of many rows: in commit order, by blocks, with pushed filters.
--
-- The scans. A reader asks for the text of a query and runs it through COPY, which is what moves columns fastest. The
-- text is made here and not by the reader, so that names and values are quoted in one place; the reader runs it with
-- its own rights, so it can read nothing that it could not read anyway.

create or replace function penstock.notify_readers()
returns trigger
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    -- All readers listen on one channel.
    perform penstock.wake(
        array(select channel from penstock.listeners where kind = 'history' and until > clock_timestamp() limit 1), 'history'
    );
    return null;
end
$$;
comment on function penstock.notify_readers() is 'Wakes readers of the archive that said they are idle.';

create or replace trigger archived_jobs_notify
after insert on penstock.archived_jobs
for each statement execute function penstock.notify_readers();

create or replace trigger job_groups_notify
after update of ended_xid on penstock.job_groups
for each row
when (new.ended_xid is not null and old.ended_xid is null)
execute function penstock.notify_readers();

create or replace function penstock.wait_for_history(p_reader text, p_waiting boolean)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    if p_reader is null or length(p_reader) not between 1 and 200 then
        raise exception 'invalid reader: %', coalesce(quote_literal(left(p_reader, 100)), 'null')
            using errcode = 'PS400', hint = 'Name the reader with 1 to 200 characters.';
    end if;
    if p_waiting then
        perform penstock.listen_for('history', array[p_reader], 'penstock_archive', '10 minutes', 100);
    else
        delete from penstock.listeners
        where channel = 'penstock_archive' and kind = 'history' and subject = p_reader and role = session_user;
    end if;
end
$$;
comment on function penstock.wait_for_history(text, boolean) is
    'Says that a reader of the archive is idle and listens on the channel penstock_archive, or that it no longer is; good for 10 minutes. Look once more after saying so. A role has 100 places; who finds none is not notified, and polls.';

create or replace function penstock.archive_counts(
    p_late xid8[], p_low xid8, p_high xid8, p_without xid8[], p_part xid8, p_after uuid, p_limit bigint
)
returns table (xid xid8, jobs bigint)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_size(greatest(cardinality(p_late), cardinality(p_without)), 100000, 'transactions');
    select penstock.check_limit(p_limit, 9223372036854775807);
    select found.xid, count(*)
    from (
        (
            select late.xid
            from penstock.archived_jobs as late
            where late.xid = any (p_late)
                and (p_part is null or late.xid <> p_part or late.id > p_after)
            order by late.xid
            limit p_limit
        )
        union all
        (
            select fresh.xid
            from penstock.archived_jobs as fresh
            where fresh.xid >= p_low
                and fresh.xid < p_high
                and fresh.xid <> all (p_without)
                and (p_part is null or fresh.xid <> p_part or fresh.id > p_after)
            order by fresh.xid
            limit p_limit
        )
        union all
        (
            -- A transaction that has only ended runs of workflows is worth a batch too, and counts as one job.
            select distinct run.ended_xid
            from penstock.job_groups as run
            where (run.ended_xid = any (p_late) or run.ended_xid >= p_low and run.ended_xid < p_high and run.ended_xid <> all (p_without))
                and (p_part is null or run.ended_xid <> p_part)
                and (select 1 from penstock.archived_jobs as job where job.xid = run.ended_xid limit 1) is null
            order by run.ended_xid
            limit p_limit
        )
    ) as found
    group by found.xid
    order by found.xid
$$;
comment on function penstock.archive_counts(xid8[], xid8, xid8, xid8[], xid8, uuid, bigint) is
    'How many jobs the transactions of a batch have archived, in order: those of p_late, and those from p_low up to p_high without p_without. Of p_part only the jobs after p_after. A transaction that has ended runs of workflows and archived no job counts as one. Looks at about p_limit jobs; the last transaction may be counted short.';

create or replace function penstock.archive_cuts(p_xid xid8, p_after uuid, p_until uuid, p_every bigint)
returns table (id uuid)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.check_limit(p_every, 9223372036854775807, 'number of jobs');
    select numbered.id
    from (
        select job.id, row_number() over (order by job.id) as place
        from penstock.archived_jobs as job
        where job.xid = p_xid
            and (p_after is null or job.id > p_after)
            and (p_until is null or job.id <= p_until)
    ) as numbered
    where numbered.place % p_every = 0
    order by numbered.id
$$;
comment on function penstock.archive_cuts(xid8, uuid, uuid, bigint) is 'Where to cut the jobs of one large transaction: every p_every-th id after p_after.';

create or replace function penstock.archive_start(p_since timestamptz)
returns text
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select format('%s:%s:', first.xid, first.xid)
    from (
        select coalesce(
            (select min(job.xid) from penstock.archived_jobs as job where job.finished_at >= p_since),
            pg_snapshot_xmin(pg_current_snapshot())
        ) as xid
    ) as first
$$;
comment on function penstock.archive_start(timestamptz) is
    'A snapshot after which everything that finished at or after p_since becomes visible; some that finished shortly before may too.';

create or replace function penstock.archive_lost(p_seen pg_snapshot)
returns table (day date, jobs bigint)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select pruned.day, pruned.jobs
    from penstock.pruned_days as pruned
    where not pg_visible_in_snapshot(pruned.last_xid, p_seen)
    order by pruned.day
$$;
comment on function penstock.archive_lost(pg_snapshot) is 'First days of the tables that were pruned before a reader with this snapshot had read all of them.';

create or replace function penstock.archive_leaves()
returns table (relation text, oid oid, keep smallint, day date, until date)
language sql
stable
as $$
    select leaf.name, leaf.oid, leaf.keep, leaf.day, leaf.day + class.days
    from (
        select
            child.relname::text as name,
            child.oid,
            coalesce(substring(child.relname from '_k([0-9]+)_p')::smallint, 0::smallint) as keep,
            case when child.relname ~ '_p[0-9]{8}$' then to_date(right(child.relname, 8), 'YYYYMMDD') end as day
        from pg_partition_tree('penstock.archived_jobs') as tree
        join pg_class as child on child.oid = tree.relid
        where tree.isleaf and child.relkind = 'r'
    ) as leaf
    join penstock.retention_classes as class on class.keep = leaf.keep
$$;
comment on function penstock.archive_leaves() is
    'Part of prune and archive_blocks: the tables of the archive, their retention class, their first day and the day after their last one.';

create or replace function penstock.archive_blocks()
returns table (relation text, day date, until date, blocks bigint, jobs bigint)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        leaf.relation,
        leaf.day,
        leaf.until,
        pg_relation_size(child.oid) / current_setting('block_size')::bigint,
        greatest(child.reltuples, 0)::bigint
    from penstock.archive_leaves() as leaf
    join pg_class as child on child.oid = leaf.oid
    order by leaf.day, leaf.relation
$$;
comment on function penstock.archive_blocks() is
    'The tables of the archive: name, first day and the day after the last one, size in blocks and estimated number of jobs; what a parallel read is cut by.';

create or replace function penstock.scan_filter(p_column text, p_type text, p_filter jsonb)
returns text
language plpgsql
immutable
as $$
declare
    operation constant text := p_filter ->> 'op';
    value constant text := p_filter ->> 'value';
    -- Spark orders text by its bytes; so does the collation C, and no other for sure.
    operand constant text := case
        when p_type in ('text', 'uuid', 'name') or p_type like '%status' then format('%I::text collate "C"', p_column)
        else format('%I', p_column)
    end;
    cast_to constant text := case when operand like '%::text%' then 'text' when p_type = 'smallint' then 'bigint' else p_type end;
begin
    return case
        when operation = 'is null' then format('%I is null', p_column)
        when operation = 'is not null' then format('%I is not null', p_column)
        when operation = '=' and p_type in ('text', 'uuid') then format('%I = %L::%s', p_column, value, p_type)
        when operation in ('=', '<', '<=', '>', '>=') then format('%s %s %L::%s', operand, operation, value, cast_to)
        when operation = 'in' then format('%s = any (%L::%s[])', operand, array(select jsonb_array_elements_text(p_filter -> 'value')), cast_to)
        when operation = 'starts with' then format('starts_with(%s, %L)', operand, value)
        when operation = 'ends with' then format('right(%s, %s) = %L', operand, length(value), value)
        when operation = 'contains' then format('strpos(%s, %L) > 0', operand, value)
        when operation = 'not' then format('not (%s)', penstock.scan_filter(p_column, p_type, p_filter -> 'value'))
    end;
end
$$;
comment on function penstock.scan_filter(text, text, jsonb) is 'Part of scan and scan_events: one filter as a condition.';

-- Long, since it makes the text of one query and checks all that goes into it, so that nothing of the caller's is unquoted.
create or replace function penstock.scan(
    p_relation text, p_columns text[], p_filters jsonb default '[]', p_range jsonb default '{}', p_seldom text[] default '{}'
)
returns text
language plpgsql
stable
security definer
set search_path = penstock, pg_temp
as $$
declare
    source regclass;
    columns text[] := '{}';
    seldom text[] := '{}';
    present text[] := '{}';
    conditions text[] := '{}';
    wanted text;
    filter jsonb;
    column_type text;
begin
    perform penstock.check_size(greatest(cardinality(p_columns), cardinality(p_seldom)), 1600, 'columns');
    if p_relation !~ '^(queued_jobs|archived_jobs((_k[0-9]{1,3})?_p[0-9]{8})?)$' then
        raise exception 'cannot scan %', left(p_relation, 100)
            using errcode = 'PS400', hint = 'Scan queued_jobs or archived_jobs.';
    end if;
    source := to_regclass('penstock.' || p_relation);
    if source is null then
        return null;
    end if;
    foreach wanted in array p_columns loop
        select format_type(atttypid, null) into column_type
        from pg_attribute
        where attrelid = source and attname = wanted and attnum > 0 and not attisdropped;
        if not found then
            raise exception 'no such column: %', left(wanted, 100)
                using errcode = 'PS400', hint = format('Its columns: select * from penstock.%s limit 0;', p_relation);
        end if;
        if wanted = any (p_seldom) then
            seldom := seldom || format('%I::text', wanted);
            present := present || format('%I is not null', wanted);
            continue;
        end if;
        columns := columns || case
            -- The payload of copies of a message is stored once, with the message.
            when wanted = 'data' and p_relation = 'queued_jobs'
                then 'coalesce(penstock.shown(case when message is null then data else penstock.payload(message) end), ''null'') as data'
            when p_relation = 'queued_jobs' and column_type = 'timestamp with time zone'
                then format('penstock.shown_time(%I) as %I', wanted, wanted)
            when wanted = 'data' then 'case when message is null then data else penstock.payload(message) end::text as data'
            when column_type = 'xid8' then format('%I::text::bigint as %I', wanted, wanted)
            when column_type in ('text', 'smallint', 'bigint', 'boolean', 'timestamp with time zone') then format('%I', wanted)
            else format('%I::text as %I', wanted, wanted)
        end;
    end loop;
    if cardinality(seldom) > 0 then
        -- A null costs as much to send and to take as a value does.
        columns := columns || format('case when %s then array[%s] end as seldom', array_to_string(present, ' or '), array_to_string(seldom, ', '));
    end if;
    for filter in select jsonb_array_elements(coalesce(p_filters, '[]')) loop
        select format_type(atttypid, null) into column_type
        from pg_attribute
        where attrelid = source and attname = filter ->> 'column' and attnum > 0 and not attisdropped;
        wanted := penstock.scan_filter(filter ->> 'column', column_type, filter);
        if wanted is null then
            raise exception 'cannot filter by %', left(filter::text, 200)
                using errcode = 'PS400', hint = 'A filter has a column, an op and a value.';
        end if;
        conditions := conditions || wanted;
    end loop;
    if p_range ? 'blocks' then
        conditions := conditions
            || format('ctid >= %L::tid', format('(%s,0)', (p_range #>> '{blocks,0}')::bigint))
            || format('ctid < %L::tid', format('(%s,0)', (p_range #>> '{blocks,1}')::bigint));
    end if;
    if p_range ? 'snapshot' then
        -- The comparison spares the search for all but the latest transactions.
        conditions := conditions || format(
            '(xid < %L::xid8 or pg_visible_in_snapshot(xid, %L::pg_snapshot))',
            pg_snapshot_xmin((p_range ->> 'snapshot')::pg_snapshot), p_range ->> 'snapshot'
        );
    end if;
    if p_range ? 'low' then
        conditions := conditions || format('xid >= %L::xid8', p_range ->> 'low') || format('xid < %L::xid8', p_range ->> 'high');
    end if;
    if p_range ? 'only' then
        conditions := conditions || format('xid = any (%L::xid8[])', array(select jsonb_array_elements_text(p_range -> 'only')));
    end if;
    if jsonb_array_length(coalesce(p_range -> 'without', '[]')) > 0 then
        conditions := conditions || format('xid <> all (%L::xid8[])', array(select jsonb_array_elements_text(p_range -> 'without')));
    end if;
    if p_range ? 'after' then
        conditions := conditions || format('id > %L::uuid', p_range ->> 'after');
    end if;
    if p_range ? 'until' then
        conditions := conditions || format('id <= %L::uuid', p_range ->> 'until');
    end if;
    return 'select '
        || case when cardinality(columns) = 0 then '1 as one' else array_to_string(columns, ', ') end
        || format(' from penstock.%I', p_relation)
        || case when cardinality(conditions) > 0 then ' where ' || array_to_string(conditions, ' and ') else '' end;
end
$$;
comment on function penstock.scan(text, text[], jsonb, jsonb, text[]) is
    'The text of a query over queued_jobs, archived_jobs or one table of it, with columns, filters and a range: blocks and snapshot, or transactions (low, high, without, only; after and until for the jobs of one). JSON, ids and enums come as text. Columns of p_seldom come together, last, as an array of text in the order of p_columns, which is null when all of them are. Null when the table is gone.';
