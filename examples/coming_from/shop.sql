-- The tables of the order service. What each system keeps beside them is its own.

create table orders (
    id integer primary key,
    customer text not null,
    total integer not null
);
comment on table orders is 'What customers ordered.';

create table journal (
    line bigint generated always as identity primary key,
    what text not null,
    order_id integer,
    unique nulls not distinct (what, order_id)
);
comment on table journal is 'What the jobs did, in this order. A line is written once, however often its job runs.';

create table refusals (
    what text not null,
    order_id integer not null,
    primary key (what, order_id)
);
comment on table refusals is 'Work that fails when it is tried for the first time, as that of a payment provider that is busy.';
