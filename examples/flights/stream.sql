-- What the group of examples/flights/stream.py finds out.

create schema if not exists flights;

create table if not exists flights.aircraft (
    tail text primary key,
    day date not null,
    leg integer not null,
    arr_delay double precision
);
comment on table flights.aircraft is 'The latest leg of each aircraft.';

create table if not exists flights.legs (
    tail text not null,
    day date not null,
    leg integer not null,
    dest text not null,
    dep_delay double precision,
    passed_on double precision not null
);
comment on table flights.legs is 'Each leg, and how much of its delay came with the aircraft.';
