-- Which ticks of workflows have to be resolved at once.
--
-- Nothing follows from most ticks of a large group but its numbers, and a pass costs as much as to settle some hundred jobs. So a worker that
-- was told of ends looks at the ticks first, without writes, and leaves those to its pass at intervals (resolve_workflows, p_if_due).

create or replace function penstock.has_due_ticks()
returns boolean
language plpgsql
stable
as $$
declare
    -- More are folded in any case, so that a look at them costs a fraction of a pass.
    most constant integer := 100;
    due boolean;
begin
    select
        exists (select from penstock.job_dependencies as dependency where not dependency.linked)
        or exists (select from penstock.workflow_ticks as tick order by tick.id offset most - 1)
        or exists (
            select
            from (
                select
                    tick.workflow, sum(tick.added) as added, sum(tick.failed + tick.expired) as failed,
                    sum(tick.succeeded + tick.failed + tick.cancelled + tick.expired) as ended,
                    bool_or(
                        tick.jobs is not null or tick.resumed is not null
                        -- It asks for a look at the group.
                        or tick.added + tick.succeeded + tick.failed + tick.cancelled + tick.expired = 0
                    ) as asks
                -- All of them, by the index: the table may have many pages that are empty.
                from (select * from penstock.workflow_ticks as each order by each.id limit most) as tick
                group by tick.workflow
            ) as counted
            left join penstock.job_groups as job_group on job_group.id = counted.workflow
            where counted.asks
                or job_group.id is null
                or job_group.cancelled_at is not null and counted.added > 0
                or job_group.cancelled_at is null and job_group.on_failure = 'cancel' and counted.failed > 0
                -- It is complete.
                or job_group.sealed_at is not null and job_group.finished_at is null and job_group.added + counted.added
                    = job_group.succeeded + job_group.failed + job_group.cancelled + job_group.expired + counted.ended
        )
    into due;
    return due;
end
$$;
comment on function penstock.has_due_ticks() is
    'Part of resolve_workflows: whether anything follows from the ticks but the numbers of children that ended, or there are 100 of them.';
