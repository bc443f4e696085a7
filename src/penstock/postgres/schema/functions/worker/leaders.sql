-- Tasks of the leader. See tables/0003_workers.sql.

create or replace function penstock.declare_leader_task(p_name text)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.declare_group('/' || p_name, 1);
    insert into penstock.leader_tasks (name, changed_at) values (p_name, penstock.clock()) on conflict (name) do nothing;
end
$$;
comment on function penstock.declare_leader_task(text) is 'Creates a task of the leader, with its group /<name>, unless it exists.';

create or replace function penstock.check_leader(p_name text, p_fence jsonb)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
declare
    longest bigint;
    idle bigint;
begin
    -- The lock lets no member take the slot away before this transaction ends.
    perform from penstock.slots
    where group_name = '/' || p_name and slot = 0 and owner = p_fence ->> 'member' and epoch = (p_fence ->> 'epoch')::bigint
    for share;
    if not found then
        raise exception '% is not the leader of %', left(p_fence ->> 'member', 100), left(p_name, 100)
            using errcode = 'PS409', hint = 'Another worker has taken over: roll back, and stop.';
    end if;
    -- A process that is suspended within its transaction must not hold the slot for ever: the server ends its session after the
    -- silence after which the member counts as dead.
    select extract(epoch from dead_after) * 1000 into longest
    from penstock.members
    where group_name = '/' || p_name and id = p_fence ->> 'member';
    select setting::bigint into idle from pg_settings where name = 'idle_in_transaction_session_timeout';
    if longest is not null and (idle = 0 or idle > longest) then
        perform set_config('idle_in_transaction_session_timeout', longest::text, true);
    end if;
end
$$;
comment on function penstock.check_leader(text, jsonb) is
    'Refuses the transaction (PS409) unless the member leads the task under this epoch, {"member": ..., "epoch": ...}; no member takes over before it ends. The server ends a session that is idle in such a transaction for as long as the silence after which its member counts as dead.';

create or replace function penstock.note_leader(p_name text, p_fence jsonb, p_state text, p_error jsonb)
returns void
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
begin
    perform penstock.check_leader(p_name, p_fence);
    update penstock.leader_tasks
    set state = p_state,
        worker = p_fence ->> 'member',
        epoch = (p_fence ->> 'epoch')::bigint,
        failures = case p_state when 'failed' then failures + 1 when 'ended' then 0 else failures end,
        last_error = case when p_state = 'failed' then penstock.error_text(p_error) else last_error end,
        last_error_at = case when p_state = 'failed' then penstock.clock() else last_error_at end,
        changed_at = penstock.clock()
    where name = p_name;
end
$$;
comment on function penstock.note_leader(text, jsonb, text, jsonb) is
    'Writes the state of a task (running, failed, ended), as its leader; refused with PS409 for any other.';

create or replace function penstock.leader_list()
returns table (
    name text, state text, leader text, epoch bigint, leads_since timestamptz, candidates integer, failures integer, last_error text,
    last_error_at timestamptz
)
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select
        task.name,
        case when slot.owner is null then 'waiting' when task.epoch < slot.epoch then 'waiting' else task.state end,
        slot.owner,
        slot.epoch,
        case when slot.owner is not null then slot.changed_at end,
        groups.members,
        task.failures,
        task.last_error,
        task.last_error_at
    from penstock.leader_tasks as task
    join penstock.groups on groups.name = '/' || task.name
    join penstock.slots as slot on slot.group_name = groups.name
    order by task.name
$$;
comment on function penstock.leader_list() is
    'Tasks of the leader by name: the member that leads (null: none), under which epoch and since when, how many could, and what became of the task.';
