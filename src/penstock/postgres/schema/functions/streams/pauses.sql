-- Pauses and failures: partitions of which a group gets no more events, and what is recorded of a handler that fails.

create or replace function penstock.pause_partitions(p_stream text, p_group text, p_partitions integer[] default null, p_reason text default null)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    consuming constant penstock.stream_groups := penstock.require_consumer_group(p_stream, p_group);
    paused integer;
begin
    perform penstock.check_size(cardinality(p_partitions), 10000, 'partitions');
    update penstock.group_offsets
    set paused_at = penstock.clock(),
        pause_reason = p_reason,
        quarantined = false
    where stream = consuming.stream
        and group_id = p_group
        and (p_partitions is null or partition = any (p_partitions))
        and paused_at is null;
    get diagnostics paused = row_count;
    perform penstock.tell_consumers(consuming.group_name);
    return paused;
end
$$;
comment on function penstock.pause_partitions(text, text, integer[], text) is
    'Gives a group no more events of partitions (null: of any) until resume_partitions. Returns how many were not paused already.';

create or replace function penstock.resume_partitions(p_stream text, p_group text, p_partitions integer[] default null)
returns integer
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    consuming constant penstock.stream_groups := penstock.require_consumer_group(p_stream, p_group);
    resumed integer;
begin
    perform penstock.check_size(cardinality(p_partitions), 10000, 'partitions');
    update penstock.group_offsets
    set paused_at = null,
        pause_reason = null,
        quarantined = false,
        crashes = 0,
        crashed_at = null,
        doubt = 1000
    where stream = consuming.stream
        and group_id = p_group
        and (p_partitions is null or partition = any (p_partitions))
        and paused_at is not null;
    get diagnostics resumed = row_count;
    perform penstock.tell_consumers(consuming.group_name);
    return resumed;
end
$$;
comment on function penstock.resume_partitions(text, text, integer[]) is 'Ends a pause or quarantine of partitions (null: of all). Returns how many were paused.';

create or replace function penstock.quarantine_partition(
    p_stream text, p_group text, p_member text, p_partition integer, p_epoch bigint, p_revision integer, p_offset bigint, p_error text
)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.commit_exactly(p_stream, p_group, p_member, p_partition, p_epoch, p_revision, p_offset);
    update penstock.group_offsets
    set paused_at = penstock.clock(),
        pause_reason = penstock.kept_reason(penstock.require_stream(p_stream), p_error),
        quarantined = true
    where stream = (penstock.require_stream(p_stream)).id and group_id = p_group and partition = p_partition and paused_at is null;
end
$$;
comment on function penstock.quarantine_partition(text, text, text, integer, bigint, integer, bigint, text) is
    'Pauses a partition before the event that could not be handled, until it is resumed (and may have moved the group past it).';

create or replace function penstock.halt_partition(
    p_stream text, p_group text, p_member text, p_partition integer, p_epoch bigint, p_revision integer, p_offset bigint, p_error text
)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.commit_exactly(p_stream, p_group, p_member, p_partition, p_epoch, p_revision, p_offset);
    update penstock.group_offsets
    set halt_error = penstock.kept_reason(penstock.require_stream(p_stream), p_error)
    where stream = (penstock.require_stream(p_stream)).id and group_id = p_group and partition = p_partition;
end
$$;
comment on function penstock.halt_partition(text, text, text, integer, bigint, integer, bigint, text) is
    'Commits the events before the one that could not be handled, and notes why its consumer halts there, until that event is done. The next owner of the partition gets the event again.';

create or replace function penstock.note_failure(
    p_stream text, p_group text, p_member text, p_partition integer, p_epoch bigint, p_revision integer, p_offset bigint,
    p_attempt integer, p_error text
)
returns boolean
language sql
security definer
set search_path = penstock, pg_temp
as $$
    with wanted as materialized (
        -- A commit of the same events may be under way for long: a note is not worth waiting for it.
        select reached.ctid as place
        from penstock.group_offsets as reached
        where reached.stream = (penstock.require_consumer_group(p_stream, p_group)).stream
            and reached.group_id = p_group
            and reached.partition = p_partition
            and reached.epoch = p_epoch
            and reached.revision = p_revision
            and reached.next_offset <= p_offset
            and exists (
                select from penstock.slots
                where slots.group_name = (penstock.require_consumer_group(p_stream, p_group)).group_name
                    and slots.slot = p_partition and slots.owner = p_member and slots.epoch = p_epoch
            )
        for no key update of reached skip locked
    ),
    noted as (
        update penstock.group_offsets as reached
        set failing_since = case when reached.failing_offset = p_offset then reached.failing_since else penstock.clock() end,
            failing_offset = p_offset,
            failing_attempt = p_attempt,
            failing_error = left(penstock.kept_reason(penstock.require_stream(p_stream), p_error), 1000)
        from wanted
        where reached.ctid = wanted.place
        returning 1
    )
    select exists (select from noted)
$$;
comment on function penstock.note_failure(text, text, text, integer, bigint, integer, bigint, integer, text) is
    'A consumer says that its handler fails at the event p_offset, at first and then more and more seldom; group_lag shows it until that event is done. False: the partition is no longer this member''s, the event is done, or a commit is under way.';
