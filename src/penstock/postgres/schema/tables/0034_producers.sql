-- The name of a producer belongs to the database role that appends, and over HTTP to the user too: two that use a name do not meet.

alter table penstock.stream_producers
    add column role text not null default '',
    add column user_name text not null default '';
alter table penstock.stream_producers drop constraint stream_producers_pkey;
alter table penstock.stream_producers add primary key (stream, producer, role, user_name);
comment on column penstock.stream_producers.role is
    'The database role that appends. Empty: noted before roles were; the first role that appends to the stream under the name gets the row.';
comment on column penstock.stream_producers.user_name is
    'The user of the HTTP API for whom the role appends; empty: the role appends for itself.';

drop function if exists penstock.last_batch(integer, text, bigint, numeric);
drop function if exists penstock.append_routed(
    text, integer, integer[], integer[], json[], bytea[], text[], json[], timestamptz[], text, bigint
);
