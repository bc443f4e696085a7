-- Events on their way into a stream by COPY (begin_load, end_load). The table is permanent and belongs to the owner of the
-- schema, so that end_load, which runs with the owner's rights, touches nothing that its caller made. A row is seen by no other
-- transaction before end_load appends it and deletes it; what is committed without end_load is swept after a day.

create unlogged table penstock.loaded_chunks (
    xid xid8 not null default pg_current_xact_id(),
    place bigint generated always as identity,
    loaded_at timestamptz not null default clock_timestamp(),
    stream text not null,
    partition integer not null,
    events integer not null,
    keys text[],
    times timestamptz[],
    headers json[],
    data json[],
    bytes bytea[],
    constraint loaded_chunks_events_check check (events between 1 and 1000)
);
comment on table penstock.loaded_chunks is 'Chunks of events that the transaction xid copies into a stream. Unlogged: they live as long as their transaction.';
comment on column penstock.loaded_chunks.xid is 'The transaction that copied the chunk; only its own end_load appends it. Producers cannot set it.';
comment on column penstock.loaded_chunks.place is 'Order in which the chunks were copied.';
create index loaded_chunks_xid on penstock.loaded_chunks (xid, place);

drop function if exists penstock.check_load();
