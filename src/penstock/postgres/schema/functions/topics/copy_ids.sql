-- The ids of the copies of a message: a range of the primary key that begins at a random place.

create or replace function penstock.random_number()
returns bigint
language sql
volatile
as $$
    -- From the server's strong random numbers; random() can be predicted.
    select ('x' || left(gen_random_uuid()::text, 8))::bit(32)::bigint
$$;
comment on function penstock.random_number() is 'Part of publish and publish_many: 32 bits that no caller can guess.';

create or replace function penstock.first_copy_id(p_published_at timestamptz, p_number bigint)
returns uuid
language plpgsql
immutable
strict
parallel safe
as $$
begin
    -- RFC 9562, version 7: 48 bits of milliseconds; then the last 26 bits of the number.
    return (
        lpad(to_hex((extract(epoch from p_published_at) * 1000)::bigint), 12, '0')
        || '7' || lpad(to_hex((p_number >> 14) & 4095), 3, '0')
        || to_hex(32768 | (p_number & 16383)) || '000000000000'
    )::uuid;
end
$$;
comment on function penstock.first_copy_id(timestamptz, bigint) is
    'Where the ids of the copies of a message begin; they end 2^48 later. p_number: a random one, so that no role can take these ids before the copies are there; topic_messages.first_copy keeps what became of it.';

create or replace function penstock.copy_id(p_first uuid, p_subscription bigint)
returns uuid
language sql
immutable
strict
parallel safe
as $$
    select (left(p_first::text, 24) || lpad(to_hex(p_subscription), 12, '0'))::uuid
$$;
comment on function penstock.copy_id(uuid, bigint) is 'The id of the copy for one subscription that was there when the message was published.';

create or replace function penstock.late_copy_ids(p_firsts uuid[], p_messages bigint[], p_subscriptions bigint[])
returns uuid[]
language sql
stable
as $$
    -- Who has got a copy knows where the ids of the others begin, and can guess numbers of subscriptions to come. So the ids of their copies
    -- are derived: of the last 48 bits the first is set, 17 are of the number of the subscription, and 30 are derived.
    select array_agg(
        (
            left(given.first::text, 24)
            || lpad(to_hex((1::bigint << 47) | ((given.subscription & 131071) << 30) | (('x' || right(derived.id::text, 8))::bit(32)::bigint & 1073741823)), 12, '0')
        )::uuid
        order by given.place
    )
    from unnest(
        p_firsts, p_subscriptions,
        penstock.derived_ids(null, array(
            select format('copy %s %s', wanted.message, wanted.subscription)
            from unnest(p_messages, p_subscriptions) with ordinality as wanted (message, subscription, place)
            order by wanted.place
        ))
    ) with ordinality as given (first, subscription, derived, place)
    cross join lateral (select given.derived as id) as derived
$$;
comment on function penstock.late_copy_ids(uuid[], bigint[], bigint[]) is
    'The ids of the copies that subscriptions get of messages which were published before their time: derived ids, in the range of the message.';

create or replace function penstock.last_copy_id(p_first uuid)
returns uuid
language sql
immutable
strict
parallel safe
as $$
    select (left(p_first::text, 24) || 'ffffffffffff')::uuid
$$;
comment on function penstock.last_copy_id(uuid) is 'Where the ids of the copies of a message end.';
