-- The operation set-priority: another priority for all jobs that match. jobs/priorities.sql says what that means for a job.

create or replace function penstock.check_new_priority(p_filter jsonb)
returns void
language plpgsql
stable
as $$
begin
    if coalesce(p_filter ->> 'new_priority', '') !~ '^-?[0-9]{1,3}$' then
        raise exception 'new_priority is no priority: %', coalesce(left(p_filter ->> 'new_priority', 100), 'null')
            using errcode = 'PS400', hint = 'Give the number as a text, from "-100" (first) to "100" (last).';
    end if;
    perform penstock.check_priority((p_filter ->> 'new_priority')::bigint);
    if exists (select from penstock.pools where name = p_filter ->> 'name') then
        raise exception 'jobs of the pool % have no priority', p_filter ->> 'name'
            using errcode = 'PS400', hint = 'Jobs of a key run in the order in which they came; keys take turns, with weights.';
    end if;
end
$$;
comment on function penstock.check_new_priority(jsonb) is
    'Part of check_operation: raises PS400 unless the filter of a set-priority has a priority, and is for jobs that can have one.';

create or replace function penstock.prioritise_matching(operation penstock.operations, p_looked uuid[], p_moment timestamptz)
returns penstock.operations
language plpgsql
as $$
declare
    -- Those that wait for others first: what is released meanwhile is found in the queue.
    dependents constant record := penstock.lock_dependents(operation, p_looked);
    queued constant record := penstock.lock_queued(operation, p_looked);
begin
    operation.done := operation.done + (
        select count(*) from penstock.change_priorities(dependents.locked || queued.locked, (operation.filter ->> 'new_priority')::smallint, p_moment)
    );
    operation.postponed := operation.postponed + penstock.left_over(operation, dependents.matching, queued.matching);
    return operation;
end
$$;
comment on function penstock.prioritise_matching(penstock.operations, uuid[], timestamptz) is
    'Part of advance_operation: gives those of these jobs that match another priority. Returns the operation as it is then.';
