-- Pools: pool_details takes the place of pool_counts, and a claim says how many jobs a turn of each key has.

drop function if exists penstock.pool_counts();
drop function if exists penstock.claim_keys(text, text, integer[], bigint[], integer, integer, integer, text, jsonb);
