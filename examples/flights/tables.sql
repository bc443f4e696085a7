-- What the jobs of the example learn.

create schema if not exists flights;

create table if not exists flights.facts (
    day date not null,
    carrier text not null,
    flight integer not null,
    origin text not null,
    scheduled integer not null,
    dest text not null,
    dep_delay double precision not null,
    arr_delay double precision not null,
    made_up double precision not null,
    primary key (day, carrier, flight, origin, scheduled)
);
comment on table flights.facts is 'One row for each departure that took place; delays in minutes.';

create table if not exists flights.carrier_days (
    day date not null,
    carrier text not null,
    departures integer not null,
    mean_delay double precision not null,
    late_share double precision not null,
    primary key (day, carrier)
);
comment on table flights.carrier_days is 'One row for each carrier and day, kept up to date by its summary job.';

create table if not exists flights.long_delays (
    id uuid primary key,
    airport text not null,
    day date not null,
    carrier text not null,
    flight integer not null,
    minutes double precision not null
);
comment on table flights.long_delays is 'The delays that the destination airports received through the topic.';
