-- Producers: a batch that a producer sends again is not appended again.

create or replace function penstock.digest_of(p_data json[], p_bytes bytea[], p_keys text[], p_headers json[], p_times timestamptz[])
returns numeric
language sql
stable
as $$
    -- Of each event a hash of all that it is; of the batch their sum, since one that is sent again after the stream grew comes in
    -- another order.
    select count(*) + coalesce(
        sum(
            hashtextextended(
                coalesce(event.data::text, encode(event.bytes, 'hex'), ''),
                hashtextextended(
                    coalesce('=' || event.key, ''),
                    case
                        -- Of most events: computed once for all of them.
                        when event.header is null and event.time is null then hashtextextended('', 1)
                        else hashtextextended(coalesce(penstock.untraced_header(event.header), ''), coalesce((extract(epoch from event.time) * 1000000)::bigint, 1))
                    end
                )
            )
        ),
        0
    )
    from unnest(p_data, p_bytes, p_keys, p_headers, p_times) as event (data, bytes, key, header, time)
$$;
comment on function penstock.digest_of(json[], bytea[], text[], json[], timestamptz[]) is
    'Part of append: tells a batch of a producer from another one, by payloads, keys, headers (without the trace context) and times.';

create or replace function penstock.last_batch(
    p_stream integer, p_producer text, p_user text, p_sequence bigint, p_digest numeric,
    out is_repeated boolean, out last bigint, out partitions integer[], out first_offsets bigint[], out counts integer[]
)
language plpgsql
as $$
declare
    last_digest numeric;
begin
    is_repeated := false;
    if p_producer is null then
        return;
    end if;
    if p_sequence is null or p_sequence < 0 or length(p_producer) not between 1 and 200 then
        raise exception 'invalid producer or sequence: %, %', left(p_producer, 100), coalesce(p_sequence::text, 'null')
            using errcode = 'PS400',
                  hint = 'A producer has a name of up to 200 characters, and numbers its batches one by one, not below zero.';
    end if;
    if length(p_user) > 200 then
        raise exception 'invalid user: %', quote_literal(left(p_user, 100))
            using errcode = 'PS400', hint = 'The name of a user for whom a producer appends has up to 200 characters.';
    end if;
    -- Append runs with the rights of the schema's owner; session_user is who called it. A producer's name belongs to
    -- the role that appends: one role cannot use up the numbers of another.
    loop
        select noted.sequence, noted.digest, noted.partitions, noted.first_offsets, noted.counts
        into last, last_digest, partitions, first_offsets, counts
        from penstock.stream_producers as noted
        where noted.stream = p_stream
            and noted.producer = p_producer
            and noted.role = session_user::text
            and noted.user_name = coalesce(p_user, '')
        for update;
        exit when found;
        insert into penstock.stream_producers (stream, producer, role, user_name, sequence, partitions, first_offsets, counts, seen_at)
        values (p_stream, p_producer, session_user, coalesce(p_user, ''), p_sequence - 1, '{}', '{}', '{}', penstock.clock())
        on conflict do nothing;
    end loop;
    if p_sequence - 1 > last then
        raise exception 'batch % of producer % is not the next one: the last was %', p_sequence, p_producer, last
            using errcode = 'PS409', hint = 'A batch before it is missing; append that one first.';
    end if;
    is_repeated := p_sequence <= last;
    if p_sequence = last and last_digest <> p_digest then
        raise exception 'batch % of producer % was another one', p_sequence, p_producer
            using errcode = 'PS409',
                  hint = 'Each writer needs a name of its own, and goes on after its last batch: select penstock.last_sequence(stream, producer);';
    end if;
end
$$;
comment on function penstock.last_batch(integer, text, text, bigint, numeric) is
    'Part of append: locks the producer of the caller''s role and says whether this batch of it was appended before. PS409 when one is missing in between, and when its last one was another.';

create or replace function penstock.last_sequence(p_stream text, p_producer text)
returns bigint
language sql
stable
security definer
set search_path = penstock, pg_temp
as $$
    select coalesce(
        (
            select sequence
            from penstock.stream_producers
            where stream = (penstock.require_stream(p_stream)).id
                and producer = p_producer
                and role = session_user::text
                and user_name = ''
        ),
        0
    )
$$;
comment on function penstock.last_sequence(text, text) is
    'Number of the last batch that a producer of the caller''s role appended; 0: none, or it was not seen for 30 days.';

create or replace function penstock.forget_producers(p_moment timestamptz)
returns void
language sql
as $$
    delete from penstock.stream_producers
    where ctid = any (array(
        select old.ctid
        from penstock.stream_producers as old
        where old.seen_at < p_moment - interval '30 days'
        order by old.stream, old.producer, old.role, old.user_name
        for update skip locked
    ))
$$;
comment on function penstock.forget_producers(timestamptz) is 'Part of recover: removes producers that have not appended for 30 days.';
