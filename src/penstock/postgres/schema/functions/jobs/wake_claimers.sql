-- Jobs have come: idle workers of the type are notified, or idle owners of the slots when the type is a pool.

create or replace function penstock.idle_workers(p_name text, p_limit integer)
returns text[]
language plpgsql
as $$
begin
    return array(
        select there.channel
        from penstock.listeners as there
        where there.kind = 'jobs' and p_name = any (there.names) and there.until > clock_timestamp()
        order by random()
        limit p_limit
    );
end
$$;
comment on function penstock.idle_workers(text, integer) is 'The channels of up to p_limit workers that wait for jobs of a type.';

create or replace function penstock.idle_owners(p_name text, p_slots integer[])
returns text[]
language plpgsql
stable
as $$
begin
    return array(
        select there.channel
        from penstock.listeners as there
        where there.kind = 'keys'
            and there.subject = p_name
            and there.until > clock_timestamp()
            and exists (
                select from penstock.slots
                where slots.group_name = p_name
                    and there.channel = 'penstock_' || slots.owner
                    and (p_slots is null or slots.slot = any (p_slots))
            )
    );
end
$$;
comment on function penstock.idle_owners(text, integer[]) is
    'The channels of the members of a pool that wait for jobs and own one of these slots (null: any slot).';

create or replace function penstock.wake_claimers(p_name text, p_jobs integer, p_slots integer[] default null)
returns void
language plpgsql
as $$
begin
    -- While jobs wait for workers, and not workers for jobs, an enqueue pays for this look alone.
    if not exists (select from penstock.listeners where kind = 'jobs' or (kind = 'keys' and subject = p_name)) then
        return;
    end if;
    if p_slots is null then
        -- One more than there are jobs, since one of them may have died; at most nine, since each brings more when it finds work.
        perform penstock.wake(penstock.idle_workers(p_name, least(p_jobs, 8) + 1), 'jobs');
    end if;
    perform penstock.wake(penstock.idle_owners(p_name, p_slots), 'keys ' || p_name);
end
$$;
comment on function penstock.wake_claimers(text, integer, integer[]) is
    'Notifies as many idle workers of a type as jobs have come, or the idle owners of these slots of a pool (null: of any).';
