"""Dead letters: from which partitions they are replayed, how often, and for whom; and of which streams there are any."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Batch, Conflict, Event, InvalidInput, NewEvent, NotFound, Penstock, Retention, Stream
from penstock.testing import running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


def caught_up(stream: Stream[Any], group: str) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        with suppress(NotFound):
            return not any(lag.lag for lag in await stream.lag(group))
        return False

    return check


async def test_letters_of_all_partitions_are_replayed_once_and_for_their_group_alone(app: Penstock, sql: Sql) -> None:
    orders = app.stream("orders", int, partitions=4)
    letters = app.stream("orders.dead", int, partitions=3)
    await letters.declare()
    broken = True
    billed: Counter[int] = Counter()
    audited: Counter[int] = Counter()

    @orders.consumer(group="billing", on_failure="dead-letter")
    async def bill(event: Event[int]) -> None:
        if broken and event.data % 2:
            raise ValueError("odd")
        billed[event.data] += 1

    @orders.consumer(group="audit", max_batch_size=10)
    async def audit(event: Event[int]) -> None:
        audited[event.data] += 1

    await orders.append_many([NewEvent(n, str(n), headers={"n": n}) for n in range(40)])
    async with running_worker(app):
        await eventually(caught_up(orders, "billing"))
        await eventually(caught_up(orders, "audit"))
        ends = [bounds.next for bounds in (await letters.bounds()).values()]
        assert sum(ends) == 20
        assert min(ends) > 0
        broken = False
        assert await orders.replay_dead(limit=3) == 3
        assert await orders.replay_dead() == 17
        assert await orders.replay_dead() == 0
        await orders.append(100)
        await eventually(caught_up(orders, "billing"))
        # The others pass over them, and are done with them.
        await eventually(caught_up(orders, "audit"))
    assert billed == Counter([*range(40), 100])
    assert audited == Counter([*range(40), 100])
    assert sum(lag.lag for lag in await letters.lag("penstock.replay")) == 0
    # On purpose they are replayed again.
    assert await orders.replay_dead(offsets={0: 0, 1: 0}) == ends[0] + ends[1]
    header = (await orders.read(0, 0, 1_000))[-1].headers
    assert (header["replayed"]["stream"], header["replayed"]["group"]) == ("orders", "billing")
    with pytest.raises(InvalidInput, match="offset of partition 0 must be an integer"):
        await orders.replay_dead(offsets={0: -1})


@pytest.mark.parametrize(("events", "size"), [(30, 10), (12, 900_000)], ids=["two segments", "more than one read has"])
async def test_all_events_of_a_batch_that_fails_are_dead_letters(app: Penstock, sql: Sql, events: int, size: int) -> None:
    orders = app.stream("orders", str, partitions=1, max_event_bytes=2_000_000)
    sizes: list[int] = []

    @orders.consumer(group="g", max_batch_size=events, linger=timedelta(seconds=10), on_failure="dead-letter")
    async def handle(batch: Batch[str]) -> None:
        sizes.append(len(batch))
        raise ValueError("broken")

    await orders.declare()
    for n in range(events):
        await orders.append(f"{n} " + "x" * size)
        if n == events // 3 and size < 1_000:
            await sql.execute("select penstock.roll_segment('orders')")
    async with running_worker(app):
        await eventually(caught_up(orders, "g"), "the end of the batch", 60)
    # One batch over the border of two segments, or over what one read gives.
    assert sizes == [events]
    letters = app.stream("orders.dead", str)
    found = [event async for event in _all(letters)]
    assert [event.headers["dead"]["offset"] for event in found] == list(range(events))
    assert [event.data.split()[0] for event in found] == [str(n) for n in range(events)]


async def test_what_was_replayed_for_another_group_is_no_letter_of_a_batch_that_fails(app: Penstock, sql: Sql) -> None:
    """It lies between events of a batch of this group, which passes over it."""
    orders = app.stream("orders", int, partitions=1)
    await orders.declare()
    await orders.append(0)
    other = json.dumps({"replayed": {"stream": "orders", "partition": 0, "offset": 0, "group": "other"}})
    await sql.execute("select penstock.append('orders', '1', null, $1)", other)
    await orders.append(2)

    @orders.consumer(group="g", max_batch_size=2, linger=timedelta(seconds=10), on_failure="dead-letter")
    async def handle(batch: Batch[int]) -> None:
        raise ValueError("broken")

    async with running_worker(app):
        await eventually(caught_up(orders, "g"), "the end of the batch", 60)
    assert [event.data async for event in _all(app.stream("orders.dead", int))] == [0, 2]


async def _all(stream: Stream[Any]) -> AsyncIterator[Event[Any]]:
    """The events of a stream, partition by partition."""
    for partition, bounds in (await stream.bounds()).items():
        at = bounds.first
        while at < bounds.next:
            for event in await stream.read(partition, at, 100):
                yield event
                at = event.offset + 1


async def test_replayed_letters_at_the_end_and_in_gaps_hold_no_group_up(app: Penstock, sql: Sql) -> None:
    orders = app.stream("orders", int, partitions=1, keep=Retention(events=1))
    await orders.append_many([0, 1])
    other = {"replayed": {"group": "other"}}
    await orders.append_many([NewEvent(2, headers=other), NewEvent(3), NewEvent(4, headers=other), NewEvent(5, headers=other)])
    seen = []
    async with orders.consume("g", max_batch_size=2) as batches:
        async for batch in batches:
            seen += batch.records()
            if len(seen) == 3:
                batches.done()
                await eventually(caught_up(orders, "g"), "what is for others to be done")
                # Nothing that is for this group comes behind it, nor is under way before it.
                await orders.append_many([NewEvent(6, headers=other)])
                await eventually(caught_up(orders, "g"), "what is for others and comes alone to be done")
                break
    assert seen == [0, 1, 3]


async def test_a_stream_with_a_long_name_has_dead_letters(app: Penstock) -> None:
    name = "s" * 98
    orders = app.stream(name, int, partitions=1)

    @orders.consumer(group="g" * 90, on_failure="dead-letter")
    async def handle(event: Event[int]) -> None:
        raise ValueError("no")

    await orders.append(1)
    async with running_worker(app):
        await eventually(caught_up(orders, "g" * 90))
    assert [event.data for event in await app.stream(f"{name}.dead", int).read(0)] == [1]
    with pytest.raises(InvalidInput, match="invalid stream name"):
        await app.stream("s" * 101).declare()


async def test_a_producer_is_told_that_an_old_batch_is_there(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    producer = events.producer("p")
    first = await producer.append(1)
    await producer.append(2)
    again = events.producer("p", sequence=0)
    assert await again.append(1) is None
    assert await again.append(2) == (await events.producer("p", sequence=1).append(2))
    assert first is not None
    assert [event.data for event in await events.read(0)] == [1, 2]


@pytest.mark.parametrize(
    "other",
    [
        [NewEvent(1, "a", headers={"n": 2}), NewEvent(2, "b")],
        [NewEvent(1, "a"), NewEvent(2, "b", headers={"n": 1})],
        [NewEvent(1, "b", headers={"n": 1}), NewEvent(2, "a")],
        [NewEvent(1, "a"), NewEvent(2, "b")],
    ],
)
async def test_a_batch_with_other_headers_is_another_batch(app: Penstock, other: Any) -> None:
    events = app.stream("events", int, partitions=1)
    batch = [NewEvent(1, "a", headers={"n": 1}), NewEvent(2, "b")]
    await events.producer("p").append_many(batch)
    assert len(await events.producer("p", sequence=0).append_many(batch)) == 2
    with pytest.raises(Conflict, match="was another one"):
        await events.producer("p", sequence=0).append_many(other)
    assert len(await events.read(0)) == 2


async def test_what_is_gone_is_said_of_its_own_partition(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=4, keep=Retention(events=1))
    places = await events.append_many([NewEvent(n, str(n)) for n in range(200)])
    await sql.execute("select penstock.declare_consumer_group('events', 'g')")
    await sql.execute("select penstock.roll_segment('events')")
    await events.append_many([NewEvent(n, str(n)) for n in range(200)])
    await sql.execute("select penstock.retire_segments('events')")
    firsts = Counter(place.partition for place in places)

    @events.consumer(group="g")
    async def handle(event: Event[int]) -> None: ...

    async with running_worker(app):

        async def quarantined() -> bool:
            return all(lag.quarantined for lag in await events.lag("g"))

        await eventually(quarantined, "all partitions to be in quarantine")
    for lag in await events.lag("g"):
        reason = (
            f"offset 0 of partition {lag.partition} of stream events is gone: the first stored offset is {firsts[lag.partition]}"
        )
        assert lag.pause_reason == reason


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (r'{"a": "\u0000", "b": 1}', {"a": "\ufffd", "b": 1}),
        (r'{"a": "\ud83d"}', {"a": "\ufffd"}),
        ('{"a": 1e9999999}', {}),
        ("[1]", {}),
    ],
)
async def test_an_event_with_headers_that_postgresql_cannot_read_is_a_dead_letter_like_others(
    app: Penstock, sql: Sql, given: str, kept: dict[str, Any]
) -> None:
    orders = app.stream("orders", int, partitions=1)

    @orders.consumer(group="g", on_failure="dead-letter")
    async def handle(event: Event[int]) -> None:
        if event.data == 1:
            raise ValueError("broken")

    await orders.declare()
    await sql.execute("select penstock.append('orders', '1', null, $1::json)", given)
    await orders.append(2)
    async with running_worker(app):
        await eventually(caught_up(orders, "g"), "the end of the stream")
    (letter,) = [event async for event in _all(app.stream("orders.dead", int))]
    assert letter.headers["dead"]["offset"] == 0
    assert {name: value for name, value in letter.headers.items() if name != "dead"} == kept
    assert await orders.replay_dead() == 1
