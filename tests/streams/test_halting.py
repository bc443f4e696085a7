"""The policy `halt`: what stops, what goes on, what is committed, and how it is seen."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from penstock import Event, Halted, Job, NewEvent, NotFound, OnFailure, Penstock, Stream
from penstock.streams.group_models import Lag
from penstock.streams.partitioner import partition_of
from penstock.worker import fleets
from tests.waiting import eventually

PARTITIONS = 4
BAD = 7


async def filled(app: Penstock, per_partition: int = 20) -> tuple[Stream[int], int]:
    """A stream whose partitions have as many events each, numbered from 0; and the partition that halts."""
    events = app.stream("events", int, partitions=PARTITIONS)
    keys: dict[int, str] = {}
    for n in range(1_000):
        keys.setdefault(partition_of(str(n), PARTITIONS), str(n))
    await events.append_many([NewEvent(n, key) for n in range(per_partition) for key in keys.values()])
    return events, 2


async def lags(events: Stream[int], group: str) -> list[Lag]:
    """How far a group is; none before its first consumer has started."""
    try:
        return await events.lag(group)
    except NotFound:
        return []


async def test_only_the_consumer_halts_and_its_worker_works_on(app: Penstock) -> None:
    events, bad = await filled(app)
    audited: list[int] = []
    ran: list[int] = []

    @events.consumer(group="billing", on_failure="halt")
    async def bill(event: Event[int]) -> None:
        if (event.partition, event.data) == (bad, BAD):
            raise ValueError("seven")

    @events.consumer(group="audit")
    async def audit(event: Event[int]) -> None:
        audited.append(event.data)

    @app.job("echo")
    async def echo(job: Job[int]) -> None:
        ran.append(job.data)

    worker = await app.worker()
    running = asyncio.create_task(worker.run())

    async def halted() -> bool:
        found = await lags(events, "billing")
        return any(lag.halt_error for lag in found) and all(lag.owner is None for lag in found)

    await eventually(halted, "the member to have left its group")
    lag = (await events.lag("billing"))[bad]
    assert (lag.next, lag.halt_error, lag.paused_at) == (BAD, f"offset {BAD}: ValueError: seven", None)
    assert [other.halt_error for other in await events.lag("billing") if other.partition != bad] == [None] * 3
    # The worker's row shows the halt, although the worker is alive.
    database = await app.database()

    async def shown() -> Any:
        (row,) = await fleets.workers(database)
        return row.alive and row.halted

    said = f"events/billing, partition {bad}, offset {BAD}: ValueError: seven"
    assert await eventually(shown, "the halt in the worker's row") == {"events/billing": said}
    # What was done by then is committed; the rest of the worker does not notice.
    await echo.enqueue(1)
    await events.append_many([NewEvent(100, str(n)) for n in range(10)])
    await eventually(lambda: ran == [1] and audited.count(100) == 10, "the job and the other group to go on")
    worker.stop()
    with pytest.raises(Halted, match=f"partition {bad}, offset {BAD}: ValueError: seven"):
        await running


async def test_handlers_of_other_partitions_finish_what_they_have_in_hand(app: Penstock) -> None:
    events, bad = await filled(app, per_partition=1)
    in_hand, release = set(), asyncio.Event()

    @events.consumer(group="g", on_failure="halt")
    async def handle(event: Event[int]) -> None:
        if event.partition == bad:
            await eventually(lambda: len(in_hand) == PARTITIONS - 1, "the other partitions to be at work")
            raise ValueError("bad")
        in_hand.add(event.partition)
        await release.wait()

    worker = await app.worker()
    running = asyncio.create_task(worker.run())

    async def noted() -> Any:
        return (await events.lag("g"))[bad].halt_error if in_hand else None

    await eventually(noted, "the consumer to halt")
    release.set()
    with pytest.raises(Halted):
        await running
    assert {lag.partition: lag.next for lag in await events.lag("g")} == {at: int(at != bad) for at in range(PARTITIONS)}


async def test_another_member_takes_over_and_gets_the_event_again(app: Penstock, url: str) -> None:
    events, bad = await filled(app)
    seen: dict[int, list[int]] = defaultdict(list)

    @events.consumer(group="g", on_failure="halt")
    async def broken(event: Event[int]) -> None:
        if (event.partition, event.data) == (bad, BAD):
            raise ValueError("seven")
        seen[event.partition].append(event.data)

    with pytest.raises(Halted):
        await (await app.worker()).run()
    async with Penstock(url) as mended:
        same = mended.stream("events", int, partitions=PARTITIONS)

        @same.consumer(group="g", on_failure="halt")
        async def works(event: Event[int]) -> None:
            seen[event.partition].append(event.data)

        worker = await mended.worker()
        running = asyncio.create_task(worker.run())

        async def done() -> bool:
            found = await lags(events, "g")
            return bool(found) and all(lag.lag == 0 for lag in found)

        await eventually(done, "the other member to finish")
        worker.stop()
        await running
    assert seen == {at: list(range(20)) for at in range(PARTITIONS)}
    assert [lag.halt_error for lag in await events.lag("g")] == [None] * PARTITIONS


async def test_attempts_come_first_and_a_move_past_the_event_ends_it(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append_many(range(3))
    tried: list[int] = []

    @events.consumer(group="g", on_failure=OnFailure(max_attempts=2, then="halt"))
    async def handle(event: Event[int]) -> None:
        tried.append(event.data)
        if event.data == 1:
            raise ValueError("one")

    for _ in range(2):
        with pytest.raises(Halted, match="seek"):
            await (await app.worker()).run()
    assert tried == [0, 1, 1, 1, 1]
    await events.seek("g", {0: 2})
    assert (await events.lag("g"))[0].halt_error is None
