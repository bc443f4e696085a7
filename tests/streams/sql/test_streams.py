"""The log: dense offsets in commit order, keys in order, repeated batches, loads, bad input."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

import asyncpg
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import create_async_engine

from penstock import Conflict, InvalidInput, NewEvent, Penstock, Position
from penstock.streams.partitioner import bucket_of, partition_of, routes_of
from tests.streams.sql.stream_contents import contents

Sql: TypeAlias = "asyncpg.Connection[Any]"


class Order(BaseModel):
    customer: str
    total: int


@dataclass
class Leg:
    tail: str
    delay: float


# -- routing

VECTORS = [("", 13), ("a", 4), ("N14228", 11), ("é", 0)]


@pytest.mark.parametrize(("key", "partition"), VECTORS)
def test_keys_are_routed_as_the_vectors_say(key: str, partition: int) -> None:
    assert partition_of(key, 16) == partition


async def test_sql_routes_as_python_does(sql: Sql) -> None:
    keys = ["", "a", "N14228", "é", "ключ", "👍", *(str(n) for n in range(200))]
    for partitions in (1, 2, 7, 16, 100):
        rows = await sql.fetch(
            "select penstock.partition_of(key, $2) as p, penstock.bucket_of(key) as b from unnest($1::text[]) as key",
            keys,
            partitions,
        )
        assert [row["p"] for row in rows] == [partition_of(key, partitions) for key in keys]
        assert [row["b"] for row in rows] == [bucket_of(key) for key in keys]
    assert tuple(await sql.fetchval("select penstock.routes_of(12)")) == routes_of(12)


@given(st.integers(1, 200), st.integers(0, 200))
def test_growth_moves_buckets_only_to_new_partitions(before: int, more: int) -> None:
    after = routes_of(before + more)
    assert all(new == old or new >= before for old, new in zip(routes_of(before), after, strict=True))


# -- appending


async def test_events_of_a_key_keep_their_order_and_offsets_are_dense(app: Penstock, sql: Sql) -> None:
    orders = app.stream("orders", Order, partitions=4, key="customer")
    given = [Order(customer=f"c{n % 13}", total=n) for n in range(2500)]
    receipts = await orders.append_many(given)
    found = await contents(sql, "orders", 4)
    assert sum(map(len, found.values())) == 2500
    for partition, events in found.items():
        assert [offset for offset, _ in events] == list(range(len(events)))
        totals = defaultdict(list)
        for _, data in events:
            assert partition_of(data["customer"], 4) == partition
            totals[data["customer"]].append(data["total"])
        assert all(values == sorted(values) for values in totals.values())
    for place in (0, 1, 999, 2499):
        position = receipts[place]
        assert found[position.partition][position.offset] == (position.offset, given[place].model_dump())


async def test_concurrent_producers_in_long_transactions_never_make_a_reader_skip(app: Penstock, url: str, sql: Sql) -> None:
    events = app.stream("events", int, partitions=2)
    await events.declare()
    stop = asyncio.Event()
    seen: dict[int, list[int]] = {0: [], 1: []}

    async def read() -> None:
        at = {0: 0, 1: 0}
        while True:
            last = stop.is_set()
            for partition in at:
                for event in await events.read(partition, at[partition], 1000):
                    assert event.offset == at[partition], "a reader skipped an event"
                    seen[partition].append(event.data)
                    at[partition] += 1
            if last:
                return

    async def write(worker: int) -> None:
        connection = await asyncpg.connect(url)
        for n in range(40):
            transaction = connection.transaction()
            await transaction.start()
            await events.append(worker * 1000 + n, key=str(n), connection=connection)
            await asyncio.sleep(0)
            if n % 4 == 3:
                await transaction.rollback()
            else:
                await transaction.commit()
        await connection.close()

    reading = asyncio.create_task(read())
    await asyncio.gather(*(write(worker) for worker in range(5)))
    stop.set()
    await reading
    assert sorted(seen[0] + seen[1]) == sorted(w * 1000 + n for w in range(5) for n in range(40) if n % 4 != 3)


async def test_appends_made_at_the_same_time_share_a_commit_and_keep_their_order(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await events.declare()
    receipts = await asyncio.gather(*(events.append(n) for n in range(500)))
    assert [receipt.offset for receipt in receipts] == list(range(500))
    assert await sql.fetchval("select count(*) from penstock.events_1") <= 3


async def test_one_bad_append_does_not_harm_those_that_travel_with_it(app: Penstock) -> None:
    events = app.stream("events", str, partitions=1)
    await events.change(max_event_bytes=100)
    results = await asyncio.gather(*(events.append("x" * (200 if n == 5 else 5)) for n in range(10)), return_exceptions=True)
    assert [isinstance(result, InvalidInput) for result in results] == [n == 5 for n in range(10)]
    assert (await events.bounds())[0].next == 9


async def test_headers_times_and_typed_payloads_come_back(app: Penstock) -> None:
    legs = app.stream("legs", Leg, partitions=3, key=lambda leg: leg.tail)
    time = datetime(2013, 1, 1, 5, 17, tzinfo=UTC)
    where = await legs.append(Leg("N14228", 2.5), headers={"carrier": "UA"}, time=time)
    (event,) = await legs.read(where.partition)
    assert (event.key, event.data, event.headers, event.time) == ("N14228", Leg("N14228", 2.5), {"carrier": "UA"}, time)
    assert event.appended_at.tzinfo is not None


@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_bytes_come_back(app: Penstock, compression: Any) -> None:
    blobs = app.stream("blobs", bytes, partitions=1, compression=compression)
    await blobs.append_many([b"", b"\x00\xff" * 100, NewEvent(b"keyed", "k")])
    assert [(event.key, event.data) for event in await blobs.read(0)] == [(None, b""), (None, b"\x00\xff" * 100), ("k", b"keyed")]
    with pytest.raises(InvalidInput, match="takes bytes"):
        await blobs.append("text")


async def test_compressed_models_come_back(app: Penstock) -> None:
    orders = app.stream("orders", Order, partitions=1, compression="zstd")
    await orders.append(Order(customer="acme", total=1))
    assert [event.data for event in await orders.read(0)] == [Order(customer="acme", total=1)]


@pytest.mark.parametrize(
    "keys", [["a", ""], [""], ["a\x1eb", "c"], ["\x1d", None, "x"], [None, "\x1e"], ["\x1d"], ["é", "a b", "'\"\\,{}"]]
)
@pytest.mark.parametrize("payload", [bytes, str])
async def test_keys_and_payloads_are_what_they_were_whatever_characters_they_have(
    app: Penstock, keys: list[str | None], payload: type
) -> None:
    events = app.stream("events", payload, partitions=1)
    given: list[Any] = [b"\x1e\x1d\x00"] * len(keys) if payload is bytes else ["\x1e\x1d", None, ""][: len(keys)]
    await events.append_many([NewEvent(data, key) for data, key in zip(given, keys, strict=True)])
    assert [(event.key, event.data) for event in await events.read(0)] == list(zip(keys, given, strict=True))


async def test_events_without_a_key_take_turns_among_the_partitions(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=3)
    for n in range(6):
        await events.append(n)
    assert {partition: bounds.next for partition, bounds in (await events.bounds()).items()} == {0: 2, 1: 2, 2: 2}
    for n in range(6):
        await sql.execute("select penstock.append('events', $1::text::json)", str(n))
    assert {partition: bounds.next for partition, bounds in (await events.bounds()).items()} == {0: 4, 1: 4, 2: 4}


async def test_appends_belong_to_the_transaction_of_the_caller(app: Penstock, url: str) -> None:
    orders = app.stream("orders", Order, partitions=2, key="customer")
    connection = await psycopg.AsyncConnection.connect(url)
    where = await orders.append(Order(customer="a", total=1), headers={"n": 1}, connection=connection)
    assert await orders.read(where.partition) == []
    await connection.rollback()
    assert await orders.append_many([Order(customer="a", total=2), Order(customer="b", total=3)], connection=connection)
    await connection.commit()
    await connection.close()
    assert await orders.append(Order(customer="a", total=3)) == Position(where.partition, 1)


MIXED = [NewEvent(n, None if n % 3 == 0 else f"k{n}") for n in range(40)]


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "sqlalchemy"])
@pytest.mark.parametrize("items", [MIXED, MIXED[:1], list(range(7))], ids=["mixed", "one", "without keys"])
async def test_receipts_say_where_events_are_also_when_the_stream_grew_meanwhile(
    app: Penstock, url: str, driver: str, items: list[Any]
) -> None:
    events = app.stream("events", int, partitions=2)
    await events.append(-1)
    async with Penstock(url) as other:
        await other.stream("events", int, partitions=2).grow(9)
    if driver == "asyncpg":
        connection: Any = await asyncpg.connect(url)
        async with connection.transaction():
            receipts = await events.append_many(items, connection=connection)
        await connection.close()
    elif driver == "psycopg":
        async with await psycopg.AsyncConnection.connect(url) as connection:
            receipts = await events.append_many(items, connection=connection)
    else:
        engine = create_async_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        async with engine.begin() as connection:
            receipts = await events.append_many(items, connection=connection)
        await engine.dispose()
    new = [item if isinstance(item, NewEvent) else NewEvent(item) for item in items]
    assert len(receipts) == len(new)
    for event, receipt in zip(new, receipts, strict=True):
        (found,) = await events.read(receipt.partition, receipt.offset, 1)
        assert (found.data, found.key, found.offset) == (event.data, event.key, receipt.offset)
        assert event.key is None or receipt.partition == partition_of(event.key, 9)


async def test_a_repeated_batch_is_appended_once(app: Penstock) -> None:
    events = app.stream("events", int, partitions=4)
    producer = events.producer("p1")
    first = await producer.append_many([NewEvent(n, str(n)) for n in range(50)])
    producer.sequence = 0  # as if the answer had been lost
    again = await producer.append_many([NewEvent(n, str(n)) for n in range(50)])
    assert list(first) == list(again)
    assert sum(bounds.next for bounds in (await events.bounds()).values()) == 50
    producer.sequence = 2
    with pytest.raises(Conflict, match="not the next"):
        await producer.append(7)


async def test_millions_can_be_loaded(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=4)
    await events.append(-1, key="7")
    assert await events.load(NewEvent(n, str(n % 100)) for n in range(250_000)) == 250_000
    await events.append(250_000, key="7")
    place = partition_of("7", 4)
    sevens = [
        int(row["data"])
        for row in await sql.fetch("select data from penstock.read_events('events', $1, 0, 100000) where key = '7'", place)
    ]
    assert sevens == [-1, *range(7, 250_000, 100), 250_000]
    assert sum(bounds.next for bounds in (await events.bounds()).values()) == 250_002


@pytest.mark.parametrize("events", [10, 2_500])
@pytest.mark.parametrize(
    "large",
    [NewEvent("x" * 1_000), NewEvent("x", "k" * 1_001), NewEvent("x", headers={"h": "x" * 1_000})],
    ids=["data", "key", "headers"],
)
async def test_a_load_with_an_event_that_is_too_large_appends_nothing(app: Penstock, events: int, large: NewEvent[str]) -> None:
    # Easily compressed, so that what counts is what was given.
    stream = app.stream("events", str, partitions=2, max_event_bytes=1_000)
    await stream.append("there")
    fitting = [NewEvent("x" * 900, str(n)) for n in range(events)]
    with pytest.raises(InvalidInput, match="an event of stream events is larger than 1000 bytes") as refused:
        await stream.load([*fitting, large])
    assert "max_event_bytes" in str(refused.value)
    assert sum(bounds.next for bounds in (await stream.bounds()).values()) == 1
    assert await stream.load(fitting) == events


async def test_a_load_whose_chunks_do_not_fit_is_refused(app: Penstock, sql: Sql) -> None:
    await app.stream("events", int, partitions=2).declare()
    columns = ["stream", "partition", "events", "data", "bytes"]
    for chunk in ((0, 2, ["1"], None), (2, 1, ["1"], None), (-1, 1, ["1"], None), (0, 1, None, [b"1"])):
        with pytest.raises(asyncpg.PostgresError) as refused:
            async with sql.transaction():
                await sql.execute("select penstock.begin_load('events')")
                await sql.copy_records_to_table(
                    "loaded_chunks", schema_name="penstock", records=[("events", *chunk)], columns=columns
                )
        assert refused.value.sqlstate == "PS400"


@pytest.mark.parametrize(
    "odd",
    [
        "(array['a', 'b'], array[array['1'], array['2']])",
        "('[7:8]={a,b}', array['1', '2'])",
        "(array[array['a'], array['b']], array['1', '2'])",
    ],
)
async def test_loaded_and_staged_arrays_that_are_no_plain_lists_are_refused(app: Penstock, sql: Sql, odd: str) -> None:
    """Their elements are not at the places at which readers look for them: the events would have neither key nor payload."""
    await app.stream("events", int, partitions=1).declare()
    values = f"select 'events', 0, 2, given.keys::text[], given.data::text[] from (values {odd}) as given (keys, data)"
    loaded = values.replace("data::text", "data::json")
    with pytest.raises(asyncpg.PostgresError, match="an array has the dimensions") as refused:
        await sql.execute(f"insert into penstock.loaded_chunks (stream, partition, events, keys, data) {loaded}")
    assert refused.value.sqlstate == "PS400"
    part = await sql.fetchval("select penstock.parts_of(1, 'stream events') || '0'")
    await sql.execute(
        "insert into penstock.staged_events (writer, part, place, width, stream, partition, events, keys, data)"
        f" select 'w', $1, 1, 1, staged.* from ({values}) as staged",
        part,
    )
    with pytest.raises(asyncpg.PostgresError, match="an array has the dimensions") as refused:
        await sql.execute("select penstock.commit_staged_events('w', 1, array[$1], 2, 'stream events')", part)
    assert refused.value.sqlstate == "PS400"


# -- bad input

BAD = [
    ("select penstock.create_stream('a b')", "PS400"),
    ("select penstock.create_stream('x', 0)", "PS400"),
    ("select penstock.create_stream('x', 1, '{\"keep\": 1}')", "PS400"),
    ("select penstock.create_stream('x', 1, '{\"keep_age\": \"soon\"}')", "PS400"),
    ("select penstock.create_stream('x', 1, '{\"format\": \"xml\"}')", "PS400"),
    ("select penstock.create_stream('x', 1, '{\"compression\": \"zstd\"}')", "PS400"),
    ("select penstock.create_stream('there')", "PS409"),
    ("select penstock.change_stream('there', '{\"format\": \"bytes\"}')", "PS409"),
    ("select penstock.grow_stream('there', 1)", "PS400"),
    ("select penstock.grow_stream('nowhere', 4)", "PS404"),
    ("select penstock.drop_stream('nowhere')", "PS404"),
    ("select penstock.drop_stream(null)", "PS404"),
    ("select penstock.append('nowhere', '1')", "PS404"),
    ("select penstock.append_json('there', '{}')", "PS400"),
    ("select penstock.append_json('there', '[{\"payload\": 1}]')", "PS400"),
    ('select penstock.append_json(\'there\', \'[{"data": 1, "time": "soon"}]\')', "PS400"),
    ("select penstock.append_many('there', p_bytes => '{\"a\"}')", "PS400"),
    ("select penstock.append_many('there', '{1,2}', '{a}')", "PS400"),
    ("select penstock.append_routed('there', 2, '{0}', '{2}', '{1}')", "PS400"),
    ("select penstock.append_routed('there', 2, '{2}', '{1}', '{1}')", "PS400"),
    ("select penstock.append_routed('there', 3, '{0}', '{1}', '{1}')", "PS412"),
    ("select penstock.append('there', ('\"' || repeat('x', 2000000) || '\"')::json)", "PS413"),
    ("select * from penstock.read_events('there', 5)", "PS404"),
    ("select * from penstock.read_events('nowhere', 0)", "PS404"),
    ("select penstock.declare_consumer_group('there', 'a b')", "PS400"),
    ("select penstock.seek_group('there', 'none', '{0}', '{0}')", "PS404"),
]


@pytest.mark.parametrize(("call", "state"), BAD)
async def test_bad_calls_are_refused_with_a_hint(sql: Sql, call: str, state: str) -> None:
    await sql.execute("select penstock.create_stream('there', 2)")
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.execute(call)
    assert refused.value.sqlstate == state
    assert refused.value.hint  # type: ignore[attr-defined]
    assert await sql.fetchval("select sum(next_offset) from penstock.stream_bounds('there')") == 0


async def test_roles_can_append_load_and_consume_as_they_were_granted(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=2)
    await events.append_many(range(10))
    for access in ("reader", "producer", "worker"):
        await sql.execute(f"do $$ begin create role test_{access}; exception when duplicate_object then null; end $$")
        await sql.execute("select penstock.grant_access($1::name, $2)", f"test_{access}", access)
    await sql.execute("select penstock.roll_segment('events')")
    calls = {
        "select * from penstock.read_events('events', 0)": {"reader", "producer", "worker"},
        "select * from penstock.events_1": {"reader", "producer", "worker"},
        "select * from penstock.append('events', '1')": {"producer", "worker"},
        "select penstock.declare_consumer_group('events', 'g')": {"worker"},
        "select penstock.grow_stream('events', 4)": set(),
    }
    for access in ("reader", "producer", "worker"):
        await sql.execute(f"set session authorization test_{access}")
        for call, allowed in calls.items():
            if access in allowed:
                await sql.execute(call)
            else:
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await sql.execute(call)
        if access != "reader":
            async with sql.transaction():
                await sql.execute("select penstock.begin_load('events')")
                await sql.copy_records_to_table(
                    "loaded_chunks",
                    schema_name="penstock",
                    records=[("events", 0, 2, ["1", "2"])],
                    columns=["stream", "partition", "events", "data"],
                )
                assert await sql.fetchval("select events from penstock.end_load('events', 2)") == 2
        await sql.execute("reset session authorization")
