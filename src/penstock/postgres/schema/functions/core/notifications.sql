-- Notifications: all that the schema says with NOTIFY is sent here. postgres/notifications.py lists the kinds, and who gets which.
--
-- The payload is the kind, followed by a subject where the kind has one. A worker or member listens on the channel penstock_<its id>, every
-- process on penstock. An id has 54 bytes at most (see check_worker), so that the name of its channel has no more than the 63 of a name.

create or replace function penstock.tell(p_listener text, p_kind text, p_subject text)
returns void
language sql
as $$
    select pg_notify('penstock_' || p_listener, p_kind || ' ' || p_subject)
$$;
comment on function penstock.tell(text, text, text) is 'Notifies one worker or member.';

create or replace function penstock.tell_all(p_kind text, p_subject text)
returns void
language sql
as $$
    select pg_notify('penstock', p_kind || ' ' || p_subject)
$$;
comment on function penstock.tell_all(text, text) is 'Notifies every process.';

create or replace function penstock.wake(p_channels text[], p_payload text)
returns void
language plpgsql
as $$
declare
    channel text;
begin
    foreach channel in array p_channels loop
        perform pg_notify(channel, p_payload);
    end loop;
end
$$;
comment on function penstock.wake(text[], text) is
    'Notifies listeners. The payload is the kind of what has come, and its subject where the kind has one.';
