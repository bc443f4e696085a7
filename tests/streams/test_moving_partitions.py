"""A partition whose handler is at work goes to another member when the handler is done, and not before."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Event, Penstock
from penstock.settings import Settings
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
QUICK = {"heartbeat_interval": timedelta(seconds=0.2), "handover_grace": timedelta(milliseconds=50)}


async def beats(sql: Sql, member: str, times: int) -> None:
    """Wait until a member has beaten so often."""
    seen = set()

    async def enough() -> bool:
        seen.add(await sql.fetchval("select seen_at from penstock.members where id like $1", member))
        return len(seen - {None}) > times

    await eventually(enough, f"{times} heartbeats of {member}")


@pytest.mark.parametrize("grace", [None, timedelta(milliseconds=50)])
async def test_a_handler_is_not_cut_off_while_no_other_needs_its_partition(url: str, sql: Sql, grace: timedelta | None) -> None:
    async with Penstock(url, settings=Settings(**QUICK)) as app:  # type: ignore[arg-type]
        events = app.stream("events", int, partitions=2)
        began: list[int] = []
        cancelled: list[int] = []
        release = asyncio.Event()

        @events.consumer(group="g", grace=grace)
        async def handle(event: Event[int]) -> None:
            began.append(event.partition)
            try:
                await release.wait()
            except asyncio.CancelledError:
                cancelled.append(event.partition)
                raise

        await events.append_many([])
        for partition in (0, 1):
            while (await events.append(0)).partition != partition:
                pass
        worker = await app.worker()
        running = asyncio.create_task(worker.run())
        await eventually(lambda: sorted(set(began)) == [0, 1], "both handlers to be at work")
        async with events.consume("g", id="second") as second:
            asking = asyncio.ensure_future(anext(second))
            if grace is None:
                await beats(sql, "second", 5)
                assert not cancelled
                assert second.partitions == []
                release.set()
                await eventually(lambda: second.partitions, "the partition to move when its handler is done")
                assert not cancelled
            else:
                # An explicit grace applies as it is.
                await eventually(lambda: second.partitions, "the partition to move")
                assert cancelled == second.partitions
                release.set()
            asking.cancel()
        worker.stop()
        await running


async def test_a_worker_that_stops_waits_for_its_own_grace_alone(url: str, sql: Sql) -> None:
    settings = Settings(**QUICK, shutdown_grace=timedelta(milliseconds=300))  # type: ignore[arg-type]
    async with Penstock(url, settings=settings) as app:
        events = app.stream("events", int, partitions=2)
        began, ended = asyncio.Event(), asyncio.Event()

        @events.consumer(group="g")
        async def handle(event: Event[int]) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        for _ in range(8):
            await events.append(0)
        worker = await app.worker()
        running = asyncio.create_task(worker.run())
        await began.wait()
        async with events.consume("g", id="second"):
            await beats(sql, "second", 3)
            worker.stop()
            await running
        assert ended.is_set()
