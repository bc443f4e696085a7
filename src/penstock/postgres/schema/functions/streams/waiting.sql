-- Idle readers of streams: they listen on a channel, and an append notifies them (see core/listeners.sql).

create or replace function penstock.listen_for_events(p_streams text[], p_channel text)
returns void
language plpgsql
as $$
begin
    if p_channel is null or p_channel !~ '^penstock_[A-Za-z0-9_.-]{1,50}$' then
        raise exception 'invalid channel: %', coalesce(quote_literal(left(p_channel, 100)), 'null')
            using errcode = 'PS400', hint = 'A channel is penstock_ and 1 to 50 letters, digits, ".", "-" or "_".';
    end if;
    perform penstock.listen_for('events', p_streams, p_channel, p_places => 100);
end
$$;
comment on function penstock.listen_for_events(text[], text) is
    'Part of wait_for_events and wait_for_events_of: announces a reader that is idle and listens on a channel, at streams given by their numbers as text.';

create or replace function penstock.wait_for_events(p_stream text, p_channel text)
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    select penstock.listen_for_events(array[(penstock.require_stream(p_stream)).id::text], p_channel)
$$;
comment on function penstock.wait_for_events(text, text) is
    'Says that a reader is idle and listens on a channel; good for 30 seconds. Read once more after it: something may have come in between. A role has 100 places at a stream; who finds none is not notified, and polls.';

create or replace function penstock.stop_waiting(p_channel text)
returns void
language sql
security definer
set search_path = penstock, pg_temp
as $$
    delete from penstock.listeners where channel = p_channel and kind = 'events' and role = session_user
$$;
comment on function penstock.stop_waiting(text) is 'Takes back what the caller''s role said with wait_for_events.';
