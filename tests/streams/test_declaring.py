"""What a stream or consumer is declared with is checked where it is written; a key that does not exist is not lost in silence."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, NamedTuple, NewType

import asyncpg
import pytest
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from penstock import Batch, InvalidInput, NewEvent, Penstock, Retention
from penstock.streams.partitioner import partition_of


class Order(BaseModel):
    customer: str
    total: float = 0

    @property
    def region(self) -> str:
        return self.customer[:2]


class Aliased(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    customer: str = Field(alias="customerName")


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


@dataclass
class Leg:
    tail: str


class Row(TypedDict):
    tail: str


class Pair(NamedTuple):
    tail: str
    n: int


Renamed = NewType("Renamed", Order)


@pytest.mark.parametrize(
    ("payload", "key"),
    [
        (Order, "custmer"),
        (Aliased, "customerName"),
        (Order | None, "custmer"),
        (Order | Leg, "customer"),
        (Annotated[Order, "x"], "custmer"),
        (Renamed, "custmer"),
        (Leg, "tial"),
        (Row, "tial"),
        (Pair, "tial"),
        (Order, ""),
        (Order, "model_dump"),
        (int, "real"),
        (bytes, "customer"),
        (list[int], "customer"),
        (Any, 3),
        (Any, object()),
    ],
)
async def test_a_key_that_names_no_field_is_refused_where_it_is_declared(payload: Any, key: Any) -> None:
    with pytest.raises(InvalidInput, match="key of stream orders"):
        Penstock().stream("orders", payload, key=key)


@pytest.mark.parametrize(
    ("payload", "key"),
    [
        (Order, "customer"), (Order, "region"), (Aliased, "customer"), (Leg, "tail"), (Row, "tail"), (Pair, "tail"),
        (Open, "anything"), (Order | dict[str, str], "customer"), (dict[str, str], "x"), (Any, "x"), (int, str),
    ],
)  # fmt: skip
async def test_a_key_that_can_exist_is_taken(payload: Any, key: Any) -> None:
    assert Penstock().stream("orders", payload, key=key).name == "orders"


async def test_an_event_without_the_field_of_its_key_is_refused_and_not_appended(app: Penstock) -> None:
    orders = app.stream("orders", partitions=4, key="custmer")
    with pytest.raises(InvalidInput, match="an event of stream orders has no field 'custmer'"):
        await orders.append({"customer": "acme"})
    with pytest.raises(InvalidInput, match="no field 'custmer'"):
        await orders.append_many([{"custmer": "acme"}, NewEvent({"customer": "acme"})])
    with pytest.raises(InvalidInput, match="no field 'custmer'"):
        await orders.load([{"customer": "acme"}])
    with pytest.raises(InvalidInput, match="no field 'custmer'"):
        await orders.producer("p").append({"customer": "acme"})
    # A key that is given counts, and a field that is null says that there is none.
    placed = await orders.append({"customer": "acme"}, key="acme")
    assert placed.partition == partition_of("acme", 4)
    await orders.append({"custmer": None})
    assert sum(bounds.next for bounds in (await orders.bounds()).values()) == 2


async def test_a_misspelled_key_is_refused_in_sql_too(app: Penstock, sql: asyncpg.Connection[Any]) -> None:
    orders = app.stream("orders", partitions=1)
    await orders.declare()
    for function in ("append_json", "append_each_json"):
        with pytest.raises(asyncpg.PostgresError, match="kye"):
            await sql.fetch(f"select * from penstock.{function}('orders', $1::jsonb)", '[{"data": 1, "kye": "acme"}]')
    assert await orders.read(0) == []


async def test_keys_can_be_optional(app: Penstock) -> None:
    orders = app.stream("orders", partitions=1, key="customer", key_optional=True)
    await orders.append_many([{"customer": "acme"}, {"total": 3}])
    assert [event.key for event in await orders.read(0)] == ["acme", None]


async def test_a_mapping_that_stands_for_a_model_has_the_key_of_the_model(app: Penstock) -> None:
    orders: Any = app.stream("orders", Aliased, partitions=1, key="customer")
    await orders.append({"customerName": "acme"})
    assert [event.key for event in await orders.read(0)] == ["acme"]


@pytest.mark.parametrize("function", [lambda data: data["custmer"], lambda data: 3])
async def test_a_function_that_gives_no_key_is_the_fault_of_the_event(app: Penstock, function: Any) -> None:
    orders = app.stream("orders", partitions=1, key=function)
    with pytest.raises(InvalidInput, match="key of (an event of )?stream orders"):
        await orders.append({"customer": "acme"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partitions": 0}, "partitions of stream orders"),
        ({"partitions": 1_025}, "partitions of stream orders"),
        ({"partitions": "4"}, "partitions of stream orders"),
        ({"partitions": True}, "partitions of stream orders"),
        ({"compression": "gzip"}, "unknown compression: 'gzip'"),
        ({"compact": "yes"}, "compact must be True or False"),
        ({"key_optional": 1}, "key_optional of stream orders"),
        ({"keep": 3}, "keep of stream orders must be a timedelta or a Retention"),
        ({"keep": Retention(age=3)}, "keep_age must be a span of time"),  # type: ignore[arg-type]
        ({"keep": Retention(events=-1)}, "keep_events must be an integer"),
        ({"compresion": "zstd"}, "stream orders has no option compresion .*\nDid you mean 'compression'?"),
        ({"segment_bytes": 0}, "segment_bytes must be an integer"),
    ],
)
async def test_options_of_a_stream_are_checked_where_it_is_declared(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Penstock().stream("orders", **options)


async def test_options_are_not_lost_when_they_are_said_together(app: Penstock) -> None:
    keep = Retention(age=timedelta(days=3), unread=True)
    record = await app.stream("orders", compression="zstd", keep=keep, compact=True).declare()
    options = record.options
    assert (options.compression, options.keep_age, options.keep_unread, options.compact) == (
        "zstd",
        timedelta(days=3),
        True,
        True,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "first"}, "start must be earliest or latest, not 'first'"),
        ({"auto_offset_reset": "skip"}, "auto_offset_reset must be error, earliest or latest, not 'skip'"),
        ({"linger": timedelta(seconds=11)}, r"linger \(11 s\) must not be longer than the grace \(10 s\)"),
        ({"linger": "1"}, "linger must be a span of time"),
        ({"linger": timedelta(seconds=-1)}, "linger must be a span of time"),
        ({"max_batch_size": 0}, "max_batch_size must be an integer"),
        ({"max_batch_size": "10"}, "max_batch_size must be an integer"),
        ({"group": "a/b"}, "invalid name of a consumer group: 'a/b'"),
        ({"group": None}, "invalid name of a consumer group: None"),
    ],
)
async def test_options_of_a_consumer_are_checked_where_it_is_declared(options: dict[str, Any], message: str) -> None:
    app = Penstock()
    orders = app.stream("orders")
    with pytest.raises(InvalidInput, match=message):

        @orders.consumer(**{"group": "billing", **options})
        async def handle(batch: Batch[Any]) -> None: ...

    with pytest.raises(InvalidInput, match=message):
        orders.sync.consume(**{"group": "billing", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": 0}, "prefetch must be an integer"),
        ({"concurrency": 0}, "concurrency must be an integer"),
        ({"grace": 3}, "grace must be a span of time"),
        ({"on_failure": "retri"}, "unknown policy: 'retri'"),
        ({"on_failure": None}, "unknown policy: None"),
        ({"linger": timedelta(seconds=2), "grace": timedelta(seconds=1)}, "longer than the grace"),
    ],
)
async def test_options_of_a_handler_are_checked_where_it_is_declared(options: dict[str, Any], message: str) -> None:
    app = Penstock()
    with pytest.raises(InvalidInput, match=message):
        app.stream("orders").consumer(**{"group": "billing", **options})


async def test_a_stream_that_was_looked_up_has_no_consumers(app: Penstock) -> None:
    await app.create_stream("orders")
    found = await app.find_stream("orders")
    with pytest.raises(InvalidInput, match="stream orders is not declared in this application"):
        found.consumer(group="billing")


WRONG: Any = [
    (NewEvent({}, headers="trace"), "headers of an event of stream orders must be a mapping, not 'trace'"),  # type: ignore[arg-type]
    (NewEvent({}, headers=5), "headers of an event"),  # type: ignore[arg-type]
    (NewEvent({}, headers=[1]), "headers of an event"),  # type: ignore[arg-type]
    (NewEvent({}, time="2026-01-31"), "time of an event must be a datetime, not '2026-01-31'"),  # type: ignore[arg-type]
    (NewEvent({}, time=5), "time of an event must be a datetime"),  # type: ignore[arg-type]
    (NewEvent({}, time=datetime(2026, 1, 31)), "time of an event has no time zone"),
    (NewEvent({}, key=5), "a key of stream orders must be text, not 5"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("event", "message"), WRONG)
async def test_what_an_event_cannot_have_is_a_clear_error(app: Penstock, event: Any, message: str) -> None:
    orders = app.stream("orders", partitions=1)
    with pytest.raises(InvalidInput, match=message):
        await orders.append_many([event])
    with pytest.raises(InvalidInput, match=message):
        await orders.load([event])


async def test_a_time_without_a_zone_is_nowhere_to_seek_or_follow_from(app: Penstock) -> None:
    orders = app.stream("orders", partitions=1)
    await orders.append({})
    async for _ in (batches := orders.consume("g")):
        break
    await batches.close()
    with pytest.raises(InvalidInput, match="the position to start at has no time zone"):
        await orders.seek("g", datetime(2026, 1, 31))
    with pytest.raises(InvalidInput, match="the position to start at has no time zone"):
        await anext(orders.tail(datetime(2026, 1, 31)))
    with pytest.raises(InvalidInput, match="the position to start at cannot be"):
        await orders.seek("g", 5)  # type: ignore[arg-type]


async def test_what_a_topic_cannot_have_is_a_clear_error(app: Penstock) -> None:
    with pytest.raises(InvalidInput, match="catch_up of topic news must be an integer"):
        app.topic("news", catch_up="x")  # type: ignore[call-overload]
    news: Any = app.topic("news")
    with pytest.raises(InvalidInput, match="unique must be text, not 5"):
        await news.publish({}, unique=5)
    with pytest.raises(InvalidInput, match="timeout must be a span of time, not 1"):
        await news.publish({}, background=False, timeout=1)
    with pytest.raises(InvalidInput, match="must be a datetime or a timedelta"):
        await news.publish({}, run_after="tomorrow")
    with pytest.raises(InvalidInput, match="ttl must be a span of time, not 5"):
        news.subscriber("ada", ttl=5)
    with pytest.raises(InvalidInput, match="ttl must be at "):
        await news.subscribe("ada", ttl=timedelta(milliseconds=1))


async def test_places_in_a_stream_are_numbers(app: Penstock) -> None:
    orders: Any = app.stream("orders", partitions=1)
    await orders.append({})
    for call in (
        lambda: orders.read("0"),
        lambda: orders.read(0, "0"),
        lambda: orders.read(0, -1),
        lambda: orders.read(0, 0, "1"),
        lambda: anext(orders.tail({0: "0"})),
        lambda: orders.seek("g", {"0": 0}),
    ):
        with pytest.raises(InvalidInput, match="must be an integer"):
            await call()
    with pytest.raises(InvalidInput, match="sequence must be an integer"):
        orders.producer("p", sequence="1")
    with pytest.raises(InvalidInput, match="the id of a producer"):
        orders.producer(5)
    # Spans of time are options as they are.
    assert (await orders.change(keep_age=timedelta(days=1))).options.keep_age == timedelta(days=1)
    with pytest.raises(InvalidInput, match="cannot be"):
        await orders.change(keep_age=object())
