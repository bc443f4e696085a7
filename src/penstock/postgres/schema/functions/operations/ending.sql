-- The end of operations and erasures on request: after their current batch or step.

create or replace function penstock.require_operation(p_id uuid, p_erasure boolean)
returns penstock.operations
language plpgsql
stable
as $$
declare
    required penstock.operations;
begin
    select * into required from penstock.operations where id = p_id and (kind = 'erase' or not p_erasure);
    if not found then
        raise exception 'no such %: %', case when p_erasure then 'erasure' else 'operation' end, p_id
            using errcode = 'PS404', hint = 'See: select * from penstock.operations order by started_at desc;';
    end if;
    return required;
end
$$;
comment on function penstock.require_operation(uuid, boolean) is
    'The operation with this id, which is an erasure where p_erasure says so; raises PS404 when there is none.';

create or replace function penstock.end_running(p_id uuid, p_erasure boolean)
returns penstock.operations
language plpgsql
as $$
begin
    update penstock.operations
    set state = 'cancelled',
        finished_at = penstock.clock(),
        -- No row says whom an erasure was for.
        filter = case when p_erasure then filter - '{key,value,job}'::text[] else filter end
    where id = p_id and (kind = 'erase') = p_erasure and state = 'running';
    return penstock.require_operation(p_id, p_erasure);
end
$$;
comment on function penstock.end_running(uuid, boolean) is
    'Part of cancel_operation and cancel_erasure: ends an operation, or an erasure, that runs. Returns it; PS404 when there is none.';

create or replace function penstock.cancel_operation(p_id uuid)
returns penstock.operations
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    cancelled constant penstock.operations := penstock.end_running(p_id, false);
begin
    if cancelled.kind = 'erase' and cancelled.state = 'running' then
        raise exception 'operation % is an erasure', p_id
            using errcode = 'PS409', hint = format('Who may erase may also end it: select penstock.cancel_erasure(%L);', p_id);
    end if;
    return cancelled;
end
$$;
comment on function penstock.cancel_operation(uuid) is
    'Ends an operation after its current batch; what it has changed stays so. Returns it; one that has ended stays as it is. PS404 when there is none, PS409 when it is an erasure (see cancel_erasure).';

create or replace function penstock.cancel_erasure(p_id uuid)
returns penstock.operations
language sql
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.end_running(p_id, true)
$$;
comment on function penstock.cancel_erasure(uuid) is
    'Ends an erasure after its current step; what it has removed stays removed. Returns it; one that has ended stays as it is. PS404 when there is none.';
