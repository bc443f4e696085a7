"""Consumer groups: each partition in order, failures as the policy says, members that come and go, exactly once."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from itertools import product
from typing import Any, TypeAlias

import asyncpg
import pytest
import structlog
from pydantic import BaseModel

from conftest import eventually
from penstock import (
    Backoff,
    Batch,
    Event,
    Events,
    Fail,
    Halted,
    InvalidInput,
    NewEvent,
    OffsetGone,
    OnFailure,
    Penstock,
    Retention,
    Retry,
    Stream,
)
from penstock.errors import NotFound
from penstock.settings import Settings
from penstock.streams.group_models import Lag
from penstock.streams.partitioner import partition_of
from penstock.testing import running_worker
from penstock.worker import Worker

Sql: TypeAlias = "asyncpg.Connection[Any]"
KEYS = "ABCDEFGHIJ"
AT_ONCE = Backoff(base=timedelta(0), cap=timedelta(0))


async def lag(stream: Stream[Any], group: str) -> int:
    return sum(lag.lag for lag in await stream.lag(group))


async def lags(stream: Stream[Any], group: str) -> list[Lag]:
    """How far a group is; none before its first consumer has started."""
    try:
        return await stream.lag(group)
    except NotFound:
        return []


def caught_up(stream: Stream[Any], group: str) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        found = await lags(stream, group)
        return bool(found) and not any(lag.lag for lag in found)

    return check


def in_order(seen: list[tuple[str | None, int]]) -> bool:
    latest: dict[str | None, int] = defaultdict(lambda: -1)
    for key, n in seen:
        if n <= latest[key]:
            return False
        latest[key] = n
    return True


# Whoever takes one event at a time has no size of a batch, and whoever pulls has no prefetch.
FORMS = [
    *product(["event", "events"], [1, 50], [1]),
    *product(["batch", "take"], [1, 50], [1, 24]),
    *product(["pull"], [50], [1, 24]),
]


@pytest.mark.parametrize("partitions", [1, 8])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("form", "prefetch", "size"), FORMS)
async def test_every_event_is_seen_once_and_in_order(
    app: Penstock, url: str, form: str, workers: int, partitions: int, prefetch: int, size: int
) -> None:
    """Runnel's own matrix: 333 events over the keys A to J."""
    apps = [Penstock(url) for _ in range(workers)]
    seen: list[tuple[str | None, int]] = []
    streams: list[Stream[Any]] = []
    pulling: list[asyncio.Task[None]] = []
    running: list[tuple[Worker, asyncio.Task[None]]] = []
    for each in apps:
        stream = each.stream("events", int, partitions=partitions)
        streams.append(stream)
        options: dict[str, Any] = {"group": "g", "prefetch": prefetch}
        if form == "event":

            @each.consumer(stream, **options)
            async def one(event: Event[int]) -> None:
                seen.append((event.key, event.data))

        elif form == "batch":

            @each.consumer(stream, max_batch_size=size, linger=timedelta(seconds=0.01), **options)
            async def many(batch: Batch[int]) -> None:
                assert len(batch) <= size
                seen.extend((event.key, event.data) for event in batch)

        elif form == "events":

            @each.consumer(stream, **options)
            async def all_of_them(events: Events[int]) -> None:
                async for event in events:
                    seen.append((event.key, event.data))

        elif form == "take":

            @each.consumer(stream, **options)
            async def taking(events: Events[int]) -> None:
                async for batch in events.take(size, linger=timedelta(seconds=0.01)):
                    assert 1 <= len(batch) <= size
                    seen.extend((event.key, event.data) for event in batch)

        else:

            async def pull(stream: Stream[Any] = stream) -> None:
                async with stream.consume("g", max_batch_size=size) as batches:
                    async for batch in batches:
                        seen.extend((event.key, event.data) for event in batch)

            pulling.append(asyncio.create_task(pull()))
    if form != "pull":
        for each in apps:
            worker = await each.worker()
            running.append((worker, asyncio.create_task(worker.run())))
    try:
        stream = streams[0]
        for n in range(0, 333, 37):
            await stream.append_many([NewEvent(i, KEYS[i % 10]) for i in range(n, n + 37)])
        await eventually(lambda: len(seen) >= 333, "all events to be seen")
        if form != "pull":
            await eventually(caught_up(stream, "g"), "the group to catch up")
    finally:
        for worker, task in running:
            worker.stop()
            await task
        for task in pulling:
            task.cancel()
        await asyncio.gather(*pulling, return_exceptions=True)
        for each in apps:
            await each.close()
    assert len(seen) == 333
    assert sorted(n for _, n in seen) == list(range(333))
    assert in_order(seen)


async def test_whoever_waits_for_a_batch_only_for_a_while_loses_none(app: Penstock) -> None:
    events = app.stream("events", int, partitions=2)
    await events.declare()
    seen: list[int] = []

    async def write() -> None:
        for n in range(60):
            await events.append(n, key=str(n))

    async with events.consume("g", max_batch_size=3) as batches:
        writing = asyncio.create_task(write())
        async with asyncio.timeout(60):
            while len(seen) < 60:
                # However short the wait, sometimes a batch comes at the very moment at which it ends.
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.002):
                        seen += (await anext(batches)).records()
        await writing
    assert sorted(seen) == list(range(60))


async def test_a_slow_key_does_not_stop_other_partitions(app: Penstock) -> None:
    events = app.stream("events", int, partitions=8)
    seen: list[int] = []
    release = asyncio.Event()

    @app.consumer(events, group="g")
    async def handle(event: Event[int]) -> None:
        if event.key == "slow":
            await release.wait()
        seen.append(event.data)

    slow = await events.append(-1, key="slow")
    await events.append_many([NewEvent(n, str(n)) for n in range(200)])
    others = sum(
        1 for partition, bounds in (await events.bounds()).items() if partition != slow.partition for _ in range(bounds.next)
    )
    async with running_worker(app):
        await eventually(lambda: len(seen) == others, "the other partitions to be consumed")
        assert -1 not in seen
        release.set()
        await eventually(caught_up(events, "g"), "the slow one")
    assert len(seen) == 201


# -- failures


async def failing(app: Penstock, url: str, policy: Any, size: int = 1) -> tuple[Stream[Any], list[int], dict[int, int]]:
    events = app.stream("events", int, partitions=1)
    seen: list[int] = []
    tried: dict[int, int] = defaultdict(int)

    @app.consumer(events, group="g", max_batch_size=size, on_failure=policy)
    async def handle(batch: Batch[int]) -> None:
        for event in batch:
            tried[event.data] += 1
            if event.data == 5:
                raise ValueError("five")
        seen.extend(batch.records())

    await events.append_many([NewEvent(n, "k") for n in range(10)])
    return events, seen, tried


async def test_skip_goes_on(app: Penstock, url: str) -> None:
    events, seen, tried = await failing(app, url, OnFailure(attempts=3, then="skip", backoff=AT_ONCE))
    async with running_worker(app):
        await eventually(caught_up(events, "g"))
    assert seen == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert tried[5] == 3


@pytest.mark.parametrize(("size", "dead"), [(1, [5]), (4, [4, 5, 6, 7])])
async def test_dead_letters_can_be_read_and_replayed(app: Penstock, url: str, size: int, dead: list[int]) -> None:
    events, seen, _ = await failing(app, url, "dead-letter", size)
    letters = app.stream("events.dead", int, partitions=1)
    async with running_worker(app):
        await eventually(caught_up(events, "g"))
        assert seen == [n for n in range(10) if n not in dead]
        found = await letters.read(0)
        assert [letter.data for letter in found] == dead
        assert found[0].key == "k"
        header = found[0].headers["dead"]
        assert (header["stream"], header["group"], header["offset"], header["error"]) == (
            "events",
            "g",
            dead[0],
            "ValueError: five",
        )
        assert await events.replay_dead() == len(dead)
        replayed = await events.read(0, 10)
        assert [(event.key, event.data, event.headers["replayed"]["group"]) for event in replayed] == [
            ("k", n, "g") for n in dead
        ]
        await eventually(lambda: letters.read(0, len(dead)), "the replayed event to fail again")


async def test_quarantine_pauses_one_partition_visibly(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=4)
    seen: list[int] = []
    broken = True

    @app.consumer(events, group="g", on_failure="quarantine")
    async def handle(event: Event[int]) -> None:
        if event.data == 50 and broken:
            raise ValueError("fifty")
        seen.append(event.data)

    receipts = await events.append_many([NewEvent(n, str(n)) for n in range(100)])
    place = receipts[50]
    async with running_worker(app):

        async def quarantined() -> bool:
            found = await lags(events, "g")
            return len(found) == 4 and all(
                lag.quarantined == (lag.partition == place.partition) and (lag.quarantined or lag.lag == 0) for lag in found
            )

        await eventually(quarantined, "one partition to be in quarantine and the others done")
        stuck = (await events.lag("g"))[place.partition]
        assert stuck.next == place.offset
        assert stuck.pause_reason == f"offset {place.offset}: ValueError: fifty"
        broken = False
        assert await events.resume("g") == 1
        await eventually(caught_up(events, "g"))
    assert sorted(seen) == list(range(100))


async def test_halt_stops_the_consumer_with_the_error(app: Penstock, url: str) -> None:
    events, seen, _ = await failing(app, url, "halt")
    worker = await app.worker()
    with pytest.raises(Halted, match="offset 5: ValueError: five"):
        await worker.run()
    assert seen == [0, 1, 2, 3, 4]
    assert (await events.lag("g"))[0].next == 5


async def test_retry_waits_as_long_as_the_handler_says_and_keeps_the_order(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    seen: list[int] = []
    times = 0

    @app.consumer(events, group="g")
    async def handle(event: Event[int]) -> None:
        nonlocal times
        if event.data == 3 and times < 2:
            times += 1
            raise Retry(after=timedelta(milliseconds=1))
        seen.append(event.data)

    await events.append_many(range(6))
    async with running_worker(app):
        await eventually(caught_up(events, "g"))
    assert seen == list(range(6))
    assert times == 2


async def test_fail_is_not_retried(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    calls: list[int] = []

    @app.consumer(events, group="g", on_failure=OnFailure(attempts=10, then="skip"))
    async def handle(event: Event[int]) -> None:
        calls.append(event.data)
        raise Fail("never")

    await events.append_many(range(3))
    async with running_worker(app):
        await eventually(caught_up(events, "g"))
    assert calls == [0, 1, 2]


async def test_a_payload_that_does_not_fit_is_a_failure_of_its_own(app: Penstock, sql: Sql) -> None:
    class Order(BaseModel):
        total: int

    orders = app.stream("orders", Order, partitions=1)
    seen: list[int] = []

    @app.consumer(orders, group="g", max_batch_size=10, on_failure="skip")
    async def handle(batch: Batch[Any]) -> None:
        seen.extend(order.total for order in batch.records())

    await orders.append_many([Order(total=n) for n in range(3)])
    await sql.execute("select penstock.append('orders', '{\"total\": \"many\"}')")
    await orders.append_many([Order(total=n) for n in range(3, 6)])
    async with running_worker(app):
        await eventually(caught_up(orders, "g"))
    assert seen == list(range(6))


async def test_plain_handlers_run_in_threads(app: Penstock) -> None:
    events = app.stream("events", int, partitions=2)
    seen: list[int] = []

    @app.consumer(events, group="g")
    def handle(event: Event[int]) -> None:
        asyncio.run(asyncio.sleep(0))  # only possible outside of the loop
        seen.append(event.data)

    await events.append_many([NewEvent(n, str(n)) for n in range(20)])
    async with running_worker(app):
        await eventually(caught_up(events, "g"))
    assert sorted(seen) == list(range(20))


async def test_middleware_is_called_around_each_batch_outermost_first(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    calls: list[Any] = []

    async def outer(batch: Any, call_next: Any) -> None:
        calls.append("outer")
        await call_next(batch)
        calls.append("outer done")

    async def inner(batch: Any, call_next: Any) -> None:
        calls.append("inner")
        await call_next(batch)

    @app.consumer(events, group="g", max_batch_size=10, middleware=[outer, inner])
    async def handle(batch: Batch[int]) -> None:
        calls.append(batch.records())

    await events.append_many(range(3))
    async with running_worker(app):
        await eventually(caught_up(events, "g"))
    assert calls == ["outer", "inner", [0, 1, 2], "outer done"]


def test_handlers_that_cannot_be_used_are_refused() -> None:
    app = Penstock("postgresql://nowhere")
    events = app.stream("events")
    for bad in (lambda: None, lambda a, b: None):
        with pytest.raises(InvalidInput, match="one argument"):
            app.consumer(events, group="g")(bad)
    with pytest.raises(InvalidInput, match="unknown policy"):
        app.consumer(events, group="g", on_failure="pray")(lambda event: None)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="linger"):
        app.consumer(events, group="g", linger=timedelta(seconds=5), grace=timedelta(seconds=1))(lambda event: None)

    def iterate(events: Events[int]) -> None: ...

    with pytest.raises(InvalidInput, match="async"):
        app.consumer(events, group="g")(iterate)
    app.consumer(events, group="g")(lambda event: None)
    with pytest.raises(InvalidInput, match="twice"):
        app.consumer(events, group="g")(lambda event: None)


# -- offsets


async def test_the_offset_is_committed_in_the_transaction_of_the_handler(app: Penstock, url: str, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await sql.execute("create table sums (n integer)")
    await events.append_many(range(50))
    fail = iter([True, False] * 100)

    @app.consumer(events, group="g", max_batch_size=10, on_failure=OnFailure(backoff=AT_ONCE))
    async def handle(batch: Batch[int]) -> None:
        connection = await asyncpg.connect(url)
        try:
            async with connection.transaction():
                await connection.executemany("insert into sums values ($1)", [(n,) for n in batch.records()])
                await batch.commit(connection)
                if next(fail):
                    raise RuntimeError("after everything was written")
        finally:
            await connection.close()

    async with running_worker(app):
        await eventually(caught_up(events, "g"))
    assert [row["n"] for row in await sql.fetch("select n from sums order by n")] == list(range(50))


async def test_a_group_can_be_moved_back_and_forth_while_it_consumes(app: Penstock) -> None:
    events = app.stream("events", int, partitions=2)
    seen: list[int] = []

    @app.consumer(events, group="g", max_batch_size=7)
    async def handle(batch: Batch[int]) -> None:
        seen.extend(batch.records())

    await events.append_many([NewEvent(n, str(n)) for n in range(100)])
    async with running_worker(app) as worker:
        await eventually(caught_up(events, "g"))
        assert sorted(seen) == list(range(100))
        seen.clear()
        await events.seek("g", "earliest")
        await eventually(lambda: len(seen) == 100, "everything to be seen again")
        seen.clear()
        await events.pause("g")
        parts = worker._consumers[0].partitions
        await eventually(lambda: parts and all(part.paused for part in parts.values()), "the consumer to hear of the pause")
        await events.append_many([NewEvent(n, str(n)) for n in range(100, 200)])
        await events.seek("g", "latest")
        await events.resume("g")
        await events.append_many([NewEvent(n, str(n)) for n in range(200, 300)])
        await eventually(caught_up(events, "g"))
        await eventually(lambda: len(seen) >= 100)
    assert sorted(seen) == list(range(200, 300))


async def test_a_paused_partition_waits(app: Penstock) -> None:
    events = app.stream("events", int, partitions=2)
    paused, other = (next(key for key in "abcdef" if partition_of(key, 2) == partition) for partition in range(2))
    seen: list[int] = []

    @app.consumer(events, group="g")
    async def handle(event: Event[int]) -> None:
        seen.append(event.data)

    await events.append(0, key=paused)
    async with running_worker(app) as worker:
        await eventually(lambda: seen == [0])
        assert await events.pause("g", [0], reason="maintenance") == 1
        assert (await events.lag("g"))[0].pause_reason == "maintenance"
        await eventually(lambda: worker._consumers[0].partitions[0].paused, "the consumer to hear of it")
        await events.append(1, key=paused)
        # One fetch serves all partitions: whoever has heard of what came later would have this one too.
        for number in (2, 3):
            await events.append(number, key=other)
            await eventually(lambda number=number: number in seen, "the other partition")  # type: ignore[misc]
        assert seen == [0, 2, 3]
        assert await events.resume("g") == 1
        await eventually(lambda: seen == [0, 2, 3, 1])


async def test_a_new_group_starts_where_it_is_told(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append_many(range(10))
    async with events.consume("late", start="latest") as late, events.consume("early") as early:
        await events.append(10)
        assert (await anext(early)).records()[0] == 0
        assert (await anext(late)).records() == [10]


@pytest.mark.parametrize(("gone", "first"), [("earliest", 100), ("latest", None), ("error", None)])
async def test_a_group_that_retention_overtook_goes_on_as_told(app: Penstock, sql: Sql, gone: Any, first: Any) -> None:
    events = app.stream("events", int, partitions=1, keep=Retention(events=1))
    await events.append_many(range(100))
    await sql.execute("select penstock.declare_consumer_group('events', 'g')")
    await sql.execute("select penstock.roll_segment('events')")
    await events.append_many(range(100, 110))
    await sql.execute("select penstock.maintain_stream('events')")
    with pytest.raises(OffsetGone):
        await events.read(0, 0)
    async with events.consume("g", auto_offset_reset=gone) as batches:
        if gone == "earliest":
            assert (await anext(batches)).records()[0] == first
        elif gone == "latest":
            pulled = asyncio.ensure_future(anext(batches))
            await eventually(
                lambda: sql.fetchval("select count(*) from penstock.listeners where kind = 'events'"), "the reader to wait"
            )
            await events.append(110)
            assert (await pulled).records() == [110]
        else:
            with pytest.raises(OffsetGone, match="offset 0 of partition 0"):
                await anext(batches)


# -- members that come and go


async def test_members_that_come_and_go_lose_and_repeat_nothing(app: Penstock, url: str, sql: Sql) -> None:
    events = app.stream("events", int, partitions=8)
    await events.declare()
    seen: list[tuple[str | None, int]] = []
    stop = asyncio.Event()

    async def member(settings: Settings) -> tuple[Worker, asyncio.Task[None], Penstock]:
        each = Penstock(url, settings=settings)
        stream = each.stream("events", int, partitions=8)

        @each.consumer(stream, group="g", max_batch_size=5)
        async def handle(batch: Batch[int]) -> None:
            await asyncio.sleep(random.random() * 0.005)
            seen.extend((event.key, event.data) for event in batch)

        worker = await each.worker()
        return worker, asyncio.create_task(worker.run()), each

    async def produce() -> int:
        n = 0
        while not stop.is_set():
            await events.append_many([NewEvent(i, KEYS[i % 10]) for i in range(n, n + 10)])
            n += 10
        return n

    producing = asyncio.create_task(produce())
    members = []
    for _ in range(3):
        before = len(seen)
        members.append(await member(Settings(heartbeat_interval=timedelta(seconds=1))))
        await eventually(lambda before=before: len(seen) > before + 50, "events to flow")
    for worker, task, each in members[:2]:
        before = len(seen)
        worker.stop()
        await task
        await each.close()
        await eventually(lambda before=before: len(seen) > before + 50, "events to flow")
    stop.set()
    total = await producing
    await eventually(caught_up(events, "g"))
    worker, task, each = members[2]
    worker.stop()
    await task
    await each.close()
    assert len(seen) == total
    assert in_order(seen)


async def test_a_join_moves_the_fewest_partitions_and_does_not_touch_the_others(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=12)
    await events.append_many([NewEvent(n, str(n)) for n in range(10)])

    async def owners() -> dict[int, tuple[str, int]]:
        rows = await sql.fetch("select slot, owner, epoch from penstock.slots where owner is not null and owner = target")
        return {row["slot"]: (row["owner"], row["epoch"]) for row in rows}

    async with events.consume("g", id="first") as first:
        await eventually(lambda: len(first.partitions) == 12, "the first to have all")
        before = await owners()
        async with events.consume("g", id="second") as second:
            await eventually(lambda: len(second.partitions) == 6, "the second to have its half")
            during = await owners()
            stayed = {slot for slot, owner in during.items() if owner == before[slot]}
            assert len(stayed) == 6
        await eventually(lambda: len(first.partitions) == 12, "the first to have all again")
        after = await owners()
        assert all(after[slot] == before[slot] for slot in stayed), "a partition that stayed was given a new epoch"


async def test_growth_keeps_the_order_of_each_key_in_a_group(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=2)
    seen: list[tuple[str | None, int]] = []
    gate = asyncio.Event()

    @app.consumer(events, group="g", max_batch_size=10)
    async def handle(batch: Batch[int]) -> None:
        await gate.wait()
        await asyncio.sleep(random.random() * 0.002)
        seen.extend((event.key, event.data) for event in batch)

    await events.append_many([NewEvent(i, f"k{i % 50}") for i in range(500)])
    async with running_worker(app):
        await events.grow(8)
        await events.append_many([NewEvent(i, f"k{i % 50}") for i in range(500, 1000)])
        gate.set()
        await eventually(caught_up(events, "g"), "the group to consume the new partitions")
    assert len(seen) == 1000
    assert in_order(seen)


async def test_a_growth_that_waits_for_a_paused_partition_says_so(app: Penstock) -> None:
    events = app.stream("events", int, partitions=2)
    seen: list[int] = []
    broken = True

    @app.consumer(events, group="g", on_failure="quarantine")
    async def handle(event: Event[int]) -> None:
        if event.data == 1 and broken:
            raise ValueError("one")
        seen.append(event.data)

    await events.append_many([NewEvent(n, str(n)) for n in range(50)])
    place = partition_of("1", 2)

    async def quarantined() -> bool:
        return any(lag.quarantined for lag in await lags(events, "g"))

    with structlog.testing.capture_logs() as logs:
        async with running_worker(app):
            await eventually(quarantined, "the partition to be in quarantine")
            assert await events.held_back() == []
            await events.grow(4)
            await events.append_many([NewEvent(n, str(n)) for n in range(50, 100)])
            said = await eventually(
                lambda: [entry for entry in logs if entry["event"] == "growth_held_back"], "the log to say what is held back"
            )
            assert (said[0]["partition"], said[0]["holds"], said[0]["quarantined"]) == (place, [2, 3], True)
            assert "resume" in said[0]["hint"]
            (held,) = await events.held_back("g")
            assert (held.group, held.partition, held.holds) == ("g", place, [2, 3])
            assert held.pause_reason is not None
            assert held.pause_reason.endswith("ValueError: one")
            assert [lag.waits_for for lag in await events.lag("g")][2:] == [[place], [place]]
            broken = False
            await events.resume("g")
            await eventually(caught_up(events, "g"), "the new partitions to be consumed")
    assert sorted(seen) == list(range(100))
    assert await events.held_back() == []
    assert [lag.waits_for for lag in await events.lag("g")] == [[]] * 4


async def test_a_commit_under_an_old_epoch_is_refused(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append_many(range(10))
    async with events.consume("g", max_batch_size=5) as batches:
        batch = await anext(batches)
        # Another takes the partition over while this one does not look.
        await sql.execute(
            "update penstock.slots set owner = 'other', target = 'other', epoch = epoch + 1 where group_name = 'events/g'"
        )
        await sql.fetch(
            "select begun.* from penstock.slots"
            " cross join penstock.begin_partitions('events', 'g', 'other', '{0}', array[slots.epoch]) as begun"
            " where slots.group_name = 'events/g'"
        )
        with pytest.raises(Exception, match="no longer consumed"):
            await batch.commit(sql)
    assert (await events.lag("g"))[0].next == 0
