-- Notifies idle workers of new jobs of their type, or, when the type is a pool, idle owners of the slots.

create or replace function penstock.wake_claimers(p_name text, p_jobs integer, p_slots integer[] default null)
returns void
language plpgsql
as $$
begin
    -- Every enqueue calls this function, and under load no worker is idle.
    if not exists (select from penstock.listeners where kind in ('jobs', 'keys') and subject = p_name) then
        return;
    end if;
    if p_slots is null then
        -- One more than there are jobs, since one of the workers may have crashed; at most nine, since each brings more when it finds work.
        perform penstock.wake('jobs', array[p_name], least(p_jobs, 8) + 1);
        perform penstock.wake('keys', array[p_name]);
    else
        perform penstock.wake(
            'keys',
            array[p_name],
            p_channels => array(
                select distinct 'penstock_' || slots.owner
                from penstock.slots
                where slots.group_name = p_name and slots.slot = any (p_slots) and slots.owner is not null
            )
        );
    end if;
end
$$;
comment on function penstock.wake_claimers(text, integer, integer[]) is
    'Notifies as many idle workers of a type as jobs have come, or the idle owners of these slots of a pool (null: all of its idle members).';
