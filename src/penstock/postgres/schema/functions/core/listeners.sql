-- Listeners: an idle process registers here, and a call that brings work notifies only registered processes.
--
-- The order matters on both sides. A listener listens on its channel, then says that it waits, then looks once more: that look finds
-- what committed before its row was visible, and whatever commits later sees the row.

create or replace function penstock.listen_for(
    p_kind text, p_subjects text[], p_channel text, p_for interval default '30 seconds', p_places integer default null
)
returns void
language plpgsql
as $$
declare
    moment constant timestamptz := clock_timestamp();
begin
    insert into penstock.listeners (channel, kind, subject, until)
    select p_channel, p_kind, wanted.subject, moment + p_for
    from (select distinct unnest(p_subjects) as subject) as wanted
    where p_places is null
        or exists (
            select from penstock.listeners as present
            where present.channel = p_channel and present.kind = p_kind and present.subject = wanted.subject
        )
        or penstock.listener_places(p_kind, wanted.subject, p_places) > 0
    order by wanted.subject
    on conflict (channel, kind, subject) do update set until = excluded.until;
end
$$;
comment on function penstock.listen_for(text, text[], text, interval, integer) is
    'Part of wait_for_slots, wait_for_events and wait_for_history: notes that a listener waits for each of these subjects. p_places: how many listeners the role of the caller may have at a subject (null: any number); a listener that finds no place is not notified, and polls.';

create or replace function penstock.listener_places(p_kind text, p_subject text, p_places integer)
returns bigint
language plpgsql
as $$
declare
    -- The readers of the archive share one channel, and each is a subject of its own.
    of_kind constant boolean := p_kind = 'history';
    taken bigint;
begin
    select count(*) into taken
    from penstock.listeners
    where kind = p_kind and (of_kind or subject = p_subject) and role = session_user;
    if taken >= p_places then
        delete from penstock.listeners
        where ctid = any (array(
            select old.ctid
            from penstock.listeners as old
            where old.kind = p_kind and (of_kind or old.subject = p_subject) and old.role = session_user and old.until < clock_timestamp()
            for update skip locked
        ));
        select count(*) into taken
        from penstock.listeners
        where kind = p_kind and (of_kind or subject = p_subject) and role = session_user;
    end if;
    return p_places - taken;
end
$$;
comment on function penstock.listener_places(text, text, integer) is
    'Part of listen_for: how many more listeners of the role of the caller can wait at a subject.';

create or replace function penstock.forget_listeners()
returns void
language sql
as $$
    delete from penstock.listeners
    where ctid = any (array(
        select old.ctid
        from penstock.listeners as old
        where old.until < clock_timestamp() - interval '10 minutes'
        order by old.channel, old.kind, old.subject
        for update skip locked
    ))
$$;
comment on function penstock.forget_listeners() is 'Part of recover: removes listeners that have not said for long that they wait.';

create or replace function penstock.listening(p_kind text, p_subject text)
returns text[]
language plpgsql
stable
as $$
begin
    return array(
        select there.channel
        from penstock.listeners as there
        where there.kind = p_kind and there.subject = p_subject and there.until > clock_timestamp()
    );
end
$$;
comment on function penstock.listening(text, text) is
    'The channels of the listeners of a subject (keys, events). For jobs see idle_workers, idle_owners and idle_subscribers.';
