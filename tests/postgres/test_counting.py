"""What is paced by what its statements cost the database, and not by the time for which they wait beside a full machine."""

from __future__ import annotations

import asyncio

import pytest

from penstock import Penstock
from penstock.core.cached import Kept
from penstock.core.spending import spending
from penstock.jobs.claiming import WatermarkedClaims


class Slow:
    """The monotonic clock of a machine on which each look at the clock comes ten seconds after the one before."""

    now = 1_000.0

    def monotonic(self) -> float:
        self.now += 10.0
        return self.now


async def test_a_value_that_waited_for_a_processor_is_not_kept_for_longer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.core.cached.time", Slow())
    async with Penstock(url) as app:
        database, read = await app.database(), 0

        async def value() -> int:
            nonlocal read
            read += 1
            return int(await database.fetchval("select $1::integer", read))

        kept = Kept(value, kept_s=5.0)
        assert [await kept() for _ in range(3)] == [1, 2, 3]


async def test_a_full_scan_that_waited_is_made_again_soon(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or jobs of a transaction that stayed open for long would wait below the watermark for minutes beside a full machine."""
    clock = Slow()
    monkeypatch.setattr("penstock.jobs.claiming.time", clock)
    async with Penstock(url) as app:

        @app.job("slow")
        async def slow() -> None: ...

        await slow.enqueue()
        claims = WatermarkedClaims(await app.database())
        assert len(await claims.claim("holder", ["slow"], 10)) == 1
        for latest_s in (2.1, 1.1, 1.1):
            assert claims.watermarks.for_claim(clock.now + 0.5) != {}, "a scan was made just now"
            assert claims.watermarks.for_claim(clock.now + latest_s) == {}
            await claims.claim("holder", ["slow"], 10)


async def test_a_task_that_outlives_the_count_is_not_counted_any_more(url: str) -> None:
    async with Penstock(url) as app:
        database, go = await app.database(), asyncio.Event()

        async def later() -> None:
            await database.fetchval("select 1")
            await go.wait()
            await database.fetchval("select 1")

        with spending() as spent:
            task = asyncio.create_task(later())
            await database.fetchval("select 1")
            while spent.statements < 2:
                await asyncio.sleep(0.001)
        go.set()
        await task
        assert spent.statements == 2
