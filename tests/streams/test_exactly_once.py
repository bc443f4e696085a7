"""Exactly once into the same database, also when the answer to a successful commit is lost."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Backoff, Batch, Conflict, OnFailure, Penstock, Stream
from penstock.streams import group_queries
from penstock.streams.group_queries import Commit
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
AT_ONCE = OnFailure(backoff=Backoff(base=timedelta(0), cap=timedelta(0)))


async def all_done(stream: Stream[Any]) -> bool:
    found = await stream.lag()
    return bool(found) and not any(lag.lag for lag in found)


async def sums(sql: Sql) -> list[int]:
    return [row["n"] for row in await sql.fetch("select n from sums order by n")]


async def test_a_handler_that_fails_after_its_commit_is_not_called_with_the_same_events_again(
    app: Penstock, url: str, sql: Sql
) -> None:
    events = app.stream("events", int, partitions=1)
    await sql.execute("create table sums (n integer)")
    await events.append_many(range(30))

    @events.consumer(group="g", max_batch_size=10, on_failure=AT_ONCE)
    async def handle(batch: Batch[int]) -> None:
        connection = await asyncpg.connect(url)
        try:
            async with connection.transaction():
                await connection.executemany("insert into sums values ($1)", [(n,) for n in batch.records()])
                await batch.commit(connection)
            raise ConnectionError("as if the answer to the commit had been lost")
        finally:
            await connection.close()

    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    await eventually(lambda: all_done(events))
    worker.stop()
    await running
    assert await sums(sql) == list(range(30))


async def test_a_commit_that_arrives_while_its_events_are_handled_again_counts_alone(app: Penstock, url: str, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await sql.execute("create table sums (n integer)")
    await events.append_many(range(5))
    first = await asyncpg.connect(url)
    attempts: list[int] = []
    refused: list[Exception] = []
    second: list[int] = []

    @events.consumer(group="g", max_batch_size=10, on_failure=AT_ONCE)
    async def handle(batch: Batch[int]) -> None:
        attempts.append(batch.attempt)
        if len(attempts) == 1:
            await first.execute("begin")
            await first.executemany("insert into sums values ($1)", [(n,) for n in batch.records()])
            await batch.commit(first)
            raise ConnectionError("the network is cut, and the commit is still on its way")
        connection = await asyncpg.connect(url)
        second.append(connection.get_server_pid())
        try:
            async with connection.transaction():
                await connection.executemany("insert into sums values ($1)", [(n,) for n in batch.records()])
                await batch.commit(connection)
        except Conflict as error:
            refused.append(error)
            raise
        finally:
            await connection.close()

    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    waits = "select exists (select from pg_stat_activity where pid = any ($1) and cardinality(pg_blocking_pids(pid)) > 0)"
    await eventually(lambda: sql.fetchval(waits, second), "the second attempt to wait for the first")
    await first.execute("commit")
    await eventually(lambda: all_done(events))
    worker.stop()
    await running
    await first.close()
    assert attempts == [1, 2]
    assert "done already" in str(refused[0])
    assert await sums(sql) == list(range(5))


async def test_a_dead_letter_whose_answer_was_lost_is_there_once(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append_many(range(5))
    async with events.consume("g", max_batch_size=3) as batches:
        batch = await anext(batches)
        fence = batch.fence
        commit = Commit(0, fence.epoch, fence.revision, 3)
        database = await app.database()
        letters = [await group_queries.dead_letter(database, "events", "g", fence.member, commit, 0, "bad") for _ in range(2)]
    assert letters == [3, 0]
    dead = await Stream.found(app.context, "events.dead")
    assert [letter.data for letter in await dead.read(0)] == [0, 1, 2]


@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_dead_letters_are_as_readable_and_as_large_as_events(app: Penstock, compression: Any) -> None:
    events = app.stream("events", str, partitions=1, compression=compression)
    await events.declare()
    await events.change(max_event_bytes=3_000_000)
    await events.append("ä" * 1_000_000)

    @events.consumer(group="g", on_failure="dead-letter")
    async def handle(batch: Batch[str]) -> None:
        raise ValueError("no")

    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    await eventually(lambda: all_done(events))
    worker.stop()
    await running
    dead = app.stream("events.dead", str, partitions=1, compression=compression)
    assert (await dead.read(0))[0].data == "ä" * 1_000_000
