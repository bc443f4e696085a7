-- Which versions of Penstock can work with this schema. A migration writes the row; see postgres/migrate.py.

create table penstock.protocol (
    is_row boolean primary key default true,
    number integer not null,
    oldest integer not null,
    version text not null,
    changed_at timestamptz not null default now(),
    constraint protocol_is_row_check check (is_row),
    constraint protocol_range_check check (oldest between 1 and number)
);
comment on table penstock.protocol is 'The protocol that the functions speak. One row.';
comment on column penstock.protocol.number is 'Number of the protocol; it grows when a function that clients call is added or changed.';
comment on column penstock.protocol.oldest is 'The oldest protocol whose clients still find all that they call; it grows when a function is dropped or means something else.';
comment on column penstock.protocol.version is 'The version of Penstock whose functions these are.';
