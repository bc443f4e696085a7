-- Retention of operations: how long the rows of those are kept that have ended.

create or replace function penstock.forget_operations(p_before timestamptz)
returns void
language sql
as $$
    -- An erasure stays: its row is the record that it was done, and says nothing of whom.
    delete from penstock.operations as forgotten
    where forgotten.id = any (array(
        select operation.id
        from penstock.operations as operation
        where operation.started_at < p_before and operation.finished_at < p_before and operation.state <> 'running' and operation.kind <> 'erase'
        order by operation.started_at, operation.id
        limit 10000
    ))
$$;
comment on function penstock.forget_operations(timestamptz) is
    'Part of prune: deletes up to 10,000 operations that ended before, also those that cancelled the children of job groups, and no erasures.';
