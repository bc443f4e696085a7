-- Readers of streams ask for several partitions at a time, and learn which stream a name stands for.

drop function if exists penstock.bounds_of_streams(text[]);
drop function if exists penstock.scan_events(text, integer, bigint, bigint, text[], jsonb, boolean);
