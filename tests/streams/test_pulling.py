"""Batches that a program pulls: which count as done, and what it is told."""

from __future__ import annotations

import asyncio
from contextlib import closing
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest
import structlog

from penstock import DatabaseUnavailable, InvalidInput, NewEvent, OffsetGone, Penstock, Retention, Settings
from tests.activity import seen_now
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def test_a_batch_in_hand_at_break_is_not_done(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append_many(range(10))
    async with events.consume("g", max_batch_size=2) as batches:
        async for batch in batches:
            if batch.records() == [2, 3]:
                break
    async with events.consume("g", max_batch_size=2) as batches:
        async for batch in batches:
            assert batch.records() == [2, 3]
            batches.done()
            break
    async with events.consume("g", max_batch_size=2) as batches:
        assert (await anext(batches)).records() == [4, 5]


async def test_batches_that_the_program_left_are_no_failures(app: Penstock) -> None:
    events = app.stream("events", int, partitions=4)
    await events.append_many([NewEvent(n, key=str(n)) for n in range(100)])
    with structlog.testing.capture_logs() as logs:
        async with events.consume("g", max_batch_size=2) as batches:
            async for _ in batches:
                break
    assert [entry for entry in logs if entry["log_level"] in ("warning", "error")] == []
    lags = await events.lag("g")
    assert sum(lag.lag for lag in lags) == 100
    assert [(lag.failing_since, lag.failing_error) for lag in lags] == [(None, None)] * 4


def test_a_batch_in_hand_at_break_is_not_done_without_a_loop(url: str) -> None:
    app = Penstock(url)
    events = app.stream("events", int, partitions=1)
    with closing(app.sync):
        events.sync.append_many(range(10))
        for expected, done in (([0, 1], False), ([0, 1], True), ([2, 3], False)):
            with events.sync.consume("g", max_batch_size=2, idle_timeout=timedelta(seconds=30)) as batches:
                for batch in batches:
                    assert batch.records() == expected
                    if done:
                        batches.done()
                    break


async def test_an_idle_timeout_ends_the_iteration(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append_many(range(10))
    idle = timedelta(seconds=0.5)
    async with events.consume("g", max_batch_size=4, idle_timeout=idle) as batches:
        assert [batch.records() async for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [lag.lag for lag in await events.lag("g")] == [0]
    async with events.tail("earliest", idle_timeout=idle) as tail:
        assert [event.data async for event in tail] == list(range(10))
    for refused in (0.5, timedelta(0)):
        with pytest.raises(InvalidInput, match="idle_timeout must be a span of time"):
            events.tail(idle_timeout=refused)  # type: ignore[arg-type]


@pytest.mark.parametrize("table", ["streams", "stream_partitions", "segments", "slots", "group_offsets"])
@pytest.mark.parametrize("form", ["consume", "tail"])
async def test_a_slow_database_does_not_use_up_the_idle_timeout(app: Penstock, sql: Sql, form: str, table: str) -> None:
    if form == "tail" and table in ("slots", "group_offsets"):
        pytest.skip("a reader without a group does not use this table")
    events = app.stream("events", int, partitions=2)
    await events.append_many(range(10))

    async def read() -> list[int]:
        idle = timedelta(seconds=0.2)
        if form == "tail":
            async with events.tail("earliest", idle_timeout=idle) as tail:
                return [event.data async for event in tail]
        async with events.consume("g", idle_timeout=idle) as batches:
            return [record async for batch in batches for record in batch.records()]

    async with sql.transaction():
        await sql.execute(f"lock table penstock.{table} in access exclusive mode")
        reading = asyncio.create_task(read())
        waits = """
            select count(*) from pg_stat_activity
            where datname = current_database() and wait_event_type = 'Lock'
            and query_start < clock_timestamp() - interval '1 second'
        """

        async def waited() -> bool:
            return reading.done() or await seen_now(sql, waits) > 0

        await eventually(waited, "a call that waits for longer than the idle timeout", 60)
        ended_early = reading.done()
    assert (sorted(await reading), ended_early) == (list(range(10)), False)


async def test_a_pull_consumer_is_told_that_what_comes_next_is_gone(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=2, keep=Retention(events=1))
    await events.append_many(range(100))
    await sql.execute("select penstock.declare_consumer_group('events', 'g')")
    await sql.execute("select penstock.roll_segment('events')")
    await events.append_many(range(100, 110))
    await sql.execute("select penstock.retire_segments('events')")
    async with events.consume("g") as batches:

        async def ask() -> None:
            while True:
                await anext(batches)

        asking = asyncio.create_task(ask())

        async def over() -> bool:
            return asking.done() or any(lag.quarantined for lag in await events.lag("g"))

        await eventually(over, "an answer, or a partition that waits for an operator")
        assert asking.done(), "the program was not told"
        with pytest.raises(OffsetGone, match="offset 0 of partition . of stream events is gone: the first stored offset is 100"):
            await asking
    assert not any(lag.quarantined or lag.owner for lag in await events.lag("g"))
    # It goes on where it is told.
    await events.seek("g", "earliest")
    async with events.consume("g") as batches:
        assert (await anext(batches)).records()


async def test_an_idle_timeout_does_not_begin_while_a_crashed_member_has_the_partitions(url: str) -> None:
    settings = Settings(heartbeat_interval=timedelta(seconds=0.2), dead_after=timedelta(seconds=3))
    async with asyncio.timeout(60), Penstock(url, settings=settings) as app:
        events = app.stream("events", int, partitions=2)
        await events.append_many(range(10))
        crashed = events.consume("g", max_batch_size=1)
        await anext(crashed)
        work = [task for task in asyncio.all_tasks() if task.get_name() in ("penstock-consumer", "penstock-listener")]
        assert len(work) == 2
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        async with events.consume("g", idle_timeout=timedelta(seconds=0.2)) as batches:
            seen = [record async for batch in batches for record in batch.records()]
        assert sorted(seen) == list(range(10))


@pytest.mark.parametrize("form", ["consume", "tail"])
async def test_an_iteration_continues_after_a_request_that_was_cancelled(app: Penstock, form: str) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append_many(range(3))
    iteration: Any = events.tail("earliest") if form == "tail" else events.consume("g", max_batch_size=1)

    async def following() -> int:
        item = await anext(iteration)
        return item.data if form == "tail" else item.records()[0]

    async with asyncio.timeout(60), iteration:
        assert [await following() for _ in range(3)] == [0, 1, 2]
        for n in (3, 4):
            asking = asyncio.create_task(following())
            await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await events.append(n)
            assert await following() == n


async def test_a_tail_whose_requests_are_cancelled_gets_to_partitions_that_are_added(
    app: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append(0)
    looks = 0
    bounds = events.bounds

    async def counted() -> Any:
        nonlocal looks
        looks += 1
        return await bounds()

    async with asyncio.timeout(60), events.tail("earliest") as tail:
        await anext(tail)
        monkeypatch.setattr(events, "bounds", counted)
        while not looks:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(tail), 0.2)


async def test_a_tail_passes_a_gap_while_the_database_comes_and_goes(
    app: Penstock, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = app.stream("events", int, partitions=1, keep=Retention(events=1))
    await events.append_many(range(100))
    bounds, failures = events.bounds, iter([DatabaseUnavailable("the database is not available")])

    async def failing() -> Any:
        for failure in failures:
            raise failure
        return await bounds()

    async with asyncio.timeout(60), events.tail("latest", auto_offset_reset="earliest") as tail:
        asking = asyncio.create_task(anext(tail))  # type: ignore[arg-type]
        await events.append(100)
        assert (await asking).offset == 100
        await events.append_many(range(101, 105))
        await sql.execute("select penstock.roll_segment('events')")
        await events.append_many(range(105, 110))
        await sql.execute("select penstock.retire_segments('events')")
        monkeypatch.setattr(events, "bounds", failing)
        assert (await anext(tail)).offset == 105


@pytest.mark.parametrize("form", ["consume", "tail"])
async def test_an_idle_timeout_ends_the_iteration_in_each_task_that_shares_it(app: Penstock, form: str) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append_many(range(10))
    idle = timedelta(seconds=0.2)
    seen: list[int] = []
    iteration: Any
    if form == "tail":
        iteration = events.tail("earliest", idle_timeout=idle)
    else:
        iteration = events.consume("g", max_batch_size=1, idle_timeout=idle)

    async def iterate() -> None:
        async for item in iteration:
            seen.append(item.offset if form == "tail" else item.first_offset)

    async with asyncio.timeout(60), iteration:
        await asyncio.gather(iterate(), iterate())
    assert sorted(seen) == list(range(10))
