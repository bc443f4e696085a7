-- Dead letters are replayed from all partitions, each once; headers and times tell a producer's batches apart.

drop function if exists penstock.replay_dead(text, bigint, integer);
drop function if exists penstock.digest_of(json[], bytea[], text[]);

-- Those of before are of payloads and keys alone: the last batch of each producer, sent again, is taken for a repeated one.
update penstock.stream_producers set digest = null;
