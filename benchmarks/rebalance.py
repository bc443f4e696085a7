"""How long a rebalance holds up the events of a stream: of partitions that move to another member, and of those that stay.

Part of `benchmarks.streams`; alone: `.venv/bin/python -m benchmarks.rebalance`.

Every 20 ms each partition gets an event. What counts is the time from before its append to its handler: the longest one of a
partition around the join or leave is its pause. Members are apps of their own in one process, so that they share a clock.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any

import structlog
import uvloop
from rich.console import Console

from benchmarks.environments import ON_DISK
from penstock import Batch, NewEvent, Penstock, Stream
from penstock.streams.partitioner import partition_of
from penstock.testing import TemporaryDatabases

PARTITIONS = 64
TICK_S = 0.02
BEFORE_S, AFTER_S = 1.0, 2.0


class Members:
    """The members of the group, and what their handlers noted: of each partition (when appended, when handled)."""

    def __init__(self, url: str) -> None:
        self.seen: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._url = url
        self._running: list[tuple[Any, asyncio.Task[None], Penstock]] = []

    async def join(self) -> None:
        """One more."""
        app = Penstock(self._url)
        stream: Stream[float] = app.stream("rebalanced", float, partitions=PARTITIONS)
        stream.consumer(group="g")(self._note)
        worker = await app.worker()
        running = asyncio.create_task(worker.run())
        await worker.started()
        self._running.append((worker, running, app))

    async def leave(self) -> None:
        """The one that joined last goes."""
        worker, running, app = self._running.pop()
        worker.stop()
        await running
        await app.close()

    async def stop(self) -> None:
        """All of them go."""
        while self._running:
            await self.leave()

    async def _note(self, batch: Batch[float]) -> None:
        now = time.perf_counter()
        self.seen[batch.partition] += [(event.data, now) for event in batch]


async def measure(url: str) -> list[dict[str, Any]]:
    """Two members; a third joins, and leaves."""
    async with Penstock(url) as app:
        stream: Stream[float] = app.stream("rebalanced", float, partitions=PARTITIONS)
        await stream.declare()
        members = Members(url)
        appending = asyncio.create_task(_append(stream))
        try:
            await members.join()
            await members.join()
            while len(members.seen) < PARTITIONS:
                await asyncio.sleep(0.1)
            return [await _around(app, members, change) for change in ("join", "leave")]
        finally:
            await members.stop()
            appending.cancel()
            with suppress(asyncio.CancelledError):
                await appending


async def _append(stream: Stream[float]) -> None:
    keys: dict[int, str] = {}
    number = 0
    while len(keys) < PARTITIONS:
        keys.setdefault(partition_of(str(number), PARTITIONS), str(number))
        number += 1
    while True:
        now = time.perf_counter()
        await stream.append_many([NewEvent(now, key) for key in keys.values()])
        await asyncio.sleep(TICK_S)


async def _around(app: Penstock, members: Members, change: str) -> dict[str, Any]:
    await asyncio.sleep(BEFORE_S)
    owners = await _owners(app)
    began = time.perf_counter()
    await (members.join() if change == "join" else members.leave())
    await asyncio.sleep(AFTER_S)
    after = await _owners(app)
    pauses: dict[str, list[float]] = {"before": [], "stayed": [], "moved": []}
    for partition, seen in members.seen.items():
        kind = "stayed" if owners[partition] == after[partition] else "moved"
        pauses["before"].append(max(done - sent for sent, done in seen if began - BEFORE_S < done < began) * 1000)
        pauses[kind].append(max(done - sent for sent, done in seen if done >= began) * 1000)
    row: dict[str, Any] = {"change": change, "partitions": PARTITIONS}
    for kind, found in pauses.items():
        row[kind] = {"partitions": len(found)}
        if found:
            row[kind] |= {"median_ms": round(statistics.median(found), 1), "longest_ms": round(max(found), 1)}
    return row


async def _owners(app: Penstock) -> dict[int, str | None]:
    rows = await (await app.database()).fetch("select slot, owner from penstock.slots where group_name = 'rebalanced/g'")
    return {row["slot"]: row["owner"] for row in rows}


def main() -> None:
    """Measure once."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with TemporaryDatabases(parent=ON_DISK) as databases, databases.database() as url:
        for row in uvloop.run(measure(url)):
            Console().print(row)


if __name__ == "__main__":
    main()
