-- Suspects: partitions with an event that may crash its worker. The head of tables/0006_streams.sql explains how few further crashes
-- find it.

create or replace function penstock.try_partition(
    p_stream text, p_group text, p_partition integer, p_epoch bigint, p_tried integer, p_acquitted boolean default false
)
returns boolean
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    update penstock.group_offsets
    set tried = greatest(p_tried, 0),
        crashes = case when p_acquitted then 0 else crashes end,
        doubt = case when p_acquitted then 1000 else doubt end,
        crashed_at = case when p_acquitted then null else crashed_at end
    where stream = (penstock.require_stream(p_stream)).id and group_id = p_group and partition = p_partition and epoch = p_epoch;
    return found;
end
$$;
comment on function penstock.try_partition(text, text, integer, bigint, integer, boolean) is
    'Says that the owner of a suspect partition handles so many events of it now, and of no other suspect, or (0) that they are done; p_acquitted: it has come past where members were lost. False: the epoch is another.';

create or replace function penstock.lose_partitions(p_group_name text, p_member text)
returns void
language plpgsql
as $$
declare
    consuming penstock.stream_groups;
    held integer[];
    on_trial integer[];
    -- What ends several workers at once is not the event.
    together boolean;
begin
    select * into consuming from penstock.stream_groups where group_name = p_group_name;
    if not found then
        return;
    end if;
    -- As in begin_partitions: a commit may be under way in the transaction of a handler, on a machine that hangs. This does not
    -- wait for it, and its partition does not count.
    select array_agg(free.partition), array_agg(free.partition) filter (where free.tried > 0) into held, on_trial
    from (
        select reached.partition, reached.tried
        from penstock.slots
        join penstock.group_offsets as reached on reached.stream = consuming.stream
            and reached.group_id = consuming.name
            and reached.partition = slots.slot
        where slots.group_name = p_group_name and slots.owner = p_member
        order by reached.partition
        for no key update of reached skip locked
    ) as free;
    if on_trial is not null then
        together := penstock.lost_together(penstock.process_of(p_member));
        update penstock.group_offsets as reached
        set crashes = case
                when reached.tried > 1 then 2
                when reached.crashes >= 3 and reached.crashed_at = reached.next_offset
                    then least(reached.crashes + case when together then 0 else 1 end, 5)
                else 3
            end,
            crashed_at = reached.next_offset,
            doubt = reached.tried,
            tried = 0
        where reached.stream = consuming.stream and reached.group_id = consuming.name and reached.partition = any (on_trial);
        return;
    end if;
    update penstock.group_offsets as reached
    set crashes = case
            when reached.crashes >= 2 and reached.next_offset between reached.crashed_at and reached.crashed_at + reached.doubt then reached.crashes
            when reached.next_offset between reached.crashed_at and reached.crashed_at + 1000 then reached.crashes + 1
            else 1
        end,
        crashed_at = case
            when reached.crashes >= 2 and reached.next_offset between reached.crashed_at and reached.crashed_at + reached.doubt then reached.crashed_at
            else reached.next_offset
        end,
        doubt = case
            when reached.crashes >= 2 and reached.next_offset between reached.crashed_at and reached.crashed_at + reached.doubt then reached.doubt
            else 1000
        end
    from penstock.stream_bounds((select streams.name from penstock.streams where streams.id = consuming.stream)) as bounds
    where bounds.partition = any (held)
        and reached.stream = consuming.stream
        and reached.group_id = consuming.name
        and reached.partition = bounds.partition
        and reached.next_offset < bounds.next_offset
        and reached.paused_at is null;
end
$$;
comment on function penstock.lose_partitions(text, text) is
    'Part of end_owned_work: a member of a consumer group was lost. Counts the crash for the partitions whose events can have caused it.';
