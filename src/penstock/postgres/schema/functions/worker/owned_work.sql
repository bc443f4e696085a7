-- The work of a member in its slots: the keys of a pool, or the partitions of a consumer group. The functions of groups call these two
-- functions when a slot changes its owner, and so know neither pools nor consumer groups.

create or replace function penstock.end_owned_work(p_group text, p_member text, p_slots integer[], p_error jsonb)
returns void
language plpgsql
as $$
begin
    if p_slots is null and coalesce(p_error ->> 'type', '') <> 'WorkerLeft' and penstock.speaks_of(p_member) then
        perform penstock.lose_partitions(p_group, p_member);
    end if;
    perform penstock.end_slots(p_group, p_member, p_slots, p_error);
end
$$;
comment on function penstock.end_owned_work(text, text, integer[], jsonb) is
    'Part of revoke_slots: ends the work of a member in slots, with this error. Null instead of the slots: in all of them,'
    ' since the member was lost.';

create or replace function penstock.has_owned_work(p_group text, p_slot integer)
returns boolean
language sql
stable
as $$
    select penstock.is_busy(p_group, p_slot)
$$;
comment on function penstock.has_owned_work(text, integer) is
    'Part of take: whether work in a slot is still in progress, so that the next owner has to wait.';
