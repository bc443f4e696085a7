-- Streams are tended one by one, see tend_stream.
-- A commit in the transaction of a handler says where its events begin.

drop function if exists penstock.tend_streams();
drop function if exists penstock.commit_exactly(text, text, text, integer, bigint, integer, bigint);

-- A producer that begins anew under its name, or a second one that has taken it, must not have its events taken for repeated ones.

alter table penstock.stream_producers add column digest numeric;
comment on column penstock.stream_producers.digest is 'Tells its last batch from another one under the same number; null: it was appended before there were any.';

drop function if exists penstock.last_batch(integer, text, bigint);
