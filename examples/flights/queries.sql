-- The questions of the report, each under its title; columns are what the table shows.

-- Worst routes
select origin || ' - ' || dest as route, count(*) as departures, round(avg(arr_delay)::numeric, 1) as "mean delay, min"
from flights.facts
group by origin, dest
having count(*) >= 20
order by avg(arr_delay) desc
limit 5;

-- Worst carriers
select carrier, sum(departures) as departures, round((sum(mean_delay * departures) / sum(departures))::numeric, 1) as "mean delay, min",
    round((100 * sum(late_share * departures) / sum(departures))::numeric, 1) as "late, %"
from flights.carrier_days
group by carrier
order by 3 desc
limit 5;

-- Worst days
select day, sum(departures) as departures, round((sum(mean_delay * departures) / sum(departures))::numeric, 1) as "mean delay, min"
from flights.carrier_days
group by day
order by 3 desc
limit 5;

-- Worst delays at five airports, received through the topic of delays
select airport, count(*) as "over 2 h", round(max(minutes)) as "longest, min", mode() within group (order by carrier) as "most often by"
from flights.long_delays
group by airport
order by 2 desc;
