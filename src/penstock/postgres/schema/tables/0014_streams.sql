-- Streams are tended one by one, see tend_stream.

drop function if exists penstock.tend_streams();
