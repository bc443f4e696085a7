-- Pruning: the end of what is kept of history.

create or replace function penstock.prune_history(p_keep interval, p_limit integer default 1000)
returns bigint
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    before timestamptz;
    first_day date;
    lake record;
    more bigint;
    pruned bigint := 0;
begin
    perform penstock.check_span(p_keep, 'time for which the history is kept', '0', '366000 days');
    perform penstock.check_limit(p_limit, 100000);
    before := penstock.clock() - p_keep;
    first_day := (before at time zone 'UTC')::date;
    for lake in select lakes.name from penstock.lakes order by lakes.name loop
        delete from penstock.rollups
        where ctid = any (array(
            select old.ctid
            from penstock.rollups as old
            where old.lake = lake.name and old.minute < before
            order by old.minute
            limit p_limit
            for update skip locked
        ));
        get diagnostics more = row_count;
        pruned := pruned + more;
        delete from penstock.worker_use
        where ctid = any (array(
            select old.ctid
            from penstock.worker_use as old
            where old.lake = lake.name and old.minute < before
            order by old.minute
            limit p_limit
            for update skip locked
        ));
        get diagnostics more = row_count;
        pruned := pruned + more;
        delete from penstock.run_history
        where ctid = any (array(
            select old.ctid
            from penstock.run_history as old
            where old.lake = lake.name and old.finished_at < before
            order by old.finished_at
            limit p_limit
            for update skip locked
        ));
        get diagnostics more = row_count;
        pruned := pruned + more;
        delete from penstock.failure_signatures
        where ctid = any (array(
            select old.ctid
            from penstock.failure_signatures as old
            where old.lake = lake.name and old.day < first_day
            order by old.day
            limit p_limit
            for update skip locked
        ));
        get diagnostics more = row_count;
        pruned := pruned + more;
    end loop;
    return pruned;
end
$$;
comment on function penstock.prune_history(interval, integer) is
    'Deletes rollups, worker use, runs of workflows and failures that came back from lakes and are older than p_keep: up to p_limit of each kind and lake. Returns how many; call it until it is 0. The files of the lakes stay.';

create or replace function penstock.prune_history_due(p_limit integer default 1000)
returns bigint
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    keep constant interval := penstock.kept('history');
begin
    perform penstock.check_limit(p_limit, 100000);
    if keep is null then
        return 0;
    end if;
    return penstock.prune_history(keep, p_limit);
end
$$;
comment on function penstock.prune_history_due(integer) is
    'As prune_history, by the stored retention: what a worker calls. Returns how many rows; call it until it is 0.';
