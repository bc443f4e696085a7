"""Streams, topics and pools for threads without a loop: scripts, Django, Flask."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy

from penstock import Conflict, DatabaseUnavailable, Event, InvalidInput, Job, NewEvent, NewJob, NewMessage, Penstock, Status
from penstock.worker import Worker

IDLE_TIMEOUT = timedelta(seconds=1)


@pytest.fixture
def plain(url: str) -> Iterator[Penstock]:
    """An app that is used without a loop."""
    app = Penstock(url)
    yield app
    app.sync.close()


def test_events_are_appended_read_and_followed(plain: Penstock, url: str) -> None:
    events = plain.stream("events", int, partitions=3)
    first = events.sync.append(0, key="a")
    assert (first.offset, events.sync.append(1, key="a").offset) == (0, 1)
    with psycopg.connect(url) as connection:
        receipts = events.sync.append_many([NewEvent(2, "a"), 3, NewEvent(4, "b")], connection=connection)
        connection.rollback()
        again = events.sync.append_many([NewEvent(2, "a"), NewEvent(3, "b")], connection=connection)
        with pytest.raises(InvalidInput):
            events.sync.append_many([NewEvent(9, "a\x00")], connection=connection)
    engine = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as core:
        events.sync.append(4, key="a", connection=core)
    engine.dispose()
    assert (receipts[0], again[0]) == (again[0], receipts[0])
    assert [event.data for event in events.sync.read(first.partition)][:4] == [0, 1, 2, 4]
    assert events.sync.load(NewEvent(n, "a") for n in range(5, 8)) == 3
    followed = [event.data for event in events.sync.tail("earliest", idle_timeout=IDLE_TIMEOUT)]
    assert sorted(followed) == list(range(8))


def test_a_group_is_dropped(plain: Penstock) -> None:
    events = plain.stream("events", int, partitions=1)
    events.sync.append(1)
    with events.sync.consume("g", idle_timeout=IDLE_TIMEOUT) as batches:
        assert next(iter(batches)).records() == [1]
    events.sync.drop_group("g")
    assert events.sync.lag() == []


def test_a_tail_sees_what_another_thread_appends(plain: Penstock) -> None:
    events = plain.stream("events", int)
    events.sync.declare()
    writer = threading.Thread(target=lambda: [events.sync.append(n) for n in range(20)])
    following = events.sync.tail("earliest")
    writer.start()
    assert sorted(next(following).data for _ in range(20)) == list(range(20))
    following.close()
    writer.join()


def test_a_group_is_consumed_exactly_once_with_a_connection_that_blocks(plain: Penstock, url: str) -> None:
    events = plain.stream("events", int, partitions=2)
    events.sync.append_many([NewEvent(n, str(n)) for n in range(100)])
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("create table written (n integer primary key)")
        with pytest.raises(ZeroDivisionError), events.sync.consume("g", max_batch_size=10) as batches:
            for batch in batches:
                with connection.transaction():
                    connection.cursor().executemany("insert into written values (%s)", [(n,) for n in batch.records()])
                    batch.commit_blocking(connection)
                raise ZeroDivisionError
        with events.sync.consume("g", max_batch_size=10, idle_timeout=IDLE_TIMEOUT) as batches:
            for batch in batches:
                with connection.transaction():
                    connection.cursor().executemany("insert into written values (%s)", [(n,) for n in batch.records()])
                    batch.commit_blocking(connection)
        assert sorted(row[0] for row in connection.execute("select n from written")) == list(range(100))
        with pytest.raises(Conflict, match="no longer consumed"):
            batch.commit_blocking(connection)
    assert [lag.lag for lag in events.sync.lag("g")] == [0, 0]
    events.sync.seek("g", "earliest")
    assert sum(lag.lag for lag in events.sync.lag("g")) == 100
    assert events.sync.pause("g", [1], reason="repairs") == 1
    assert events.sync.resume("g") == 1


def test_messages_are_published_in_blocking_transactions(plain: Penstock, url: str) -> None:
    memos = plain.topic("memos").sync
    assert memos.subscribe("bob", ttl=timedelta(minutes=1)).created
    assert memos.renew("bob")
    assert [subscriber.client_id for subscriber in memos.subscribers()] == ["bob"]
    with psycopg.connect(url) as connection:
        receipts = memos.publish_many([1, NewMessage(2, unique="u"), NewMessage(3, unique="u")], connection=connection)
        connection.rollback()
    assert [(r.seq, r.coalesced) for r in receipts] == [(1, 0), (2, 0), (3, 1)]
    assert [r.seq for r in memos.publish_many(range(1500))] == list(range(1, 1501))
    receipt = memos.outcomes(memos.publish("x"))
    assert [outcome.status for outcome in receipt.outcomes or []] == [Status.QUEUED]
    assert len(memos.read(limit=2000)) == 1501


def test_jobs_of_pools_and_standing_jobs(plain: Penstock) -> None:
    pool = plain.pool("accounts", payload=int, slots=4)
    sync = plain.sync
    record = sync.find(pool.sync.enqueue("acme", 1).id)
    assert (record.name, record.key, record.data) == ("accounts", "acme", 1)
    assert len(pool.sync.enqueue_many([NewJob(n, key="acme") for n in range(3)])) == 3

    @pool.standing
    async def watch(standing: Any) -> None: ...

    assert pool.sync.start("acme") == "starting"
    assert pool.sync.start("acme") == "unchanged"
    pool.sync.notify("acme", {"hello": 1})
    assert pool.sync.reconcile({"other": {}}) == (1, 0, 1)
    assert pool.sync.stop("other")
    assert not pool.sync.stop("other")


async def test_handlers_in_threads_append_and_commit_beside_those_on_the_loop(app: Penstock, url: str) -> None:
    events = app.stream("events", int, partitions=4)
    copies = app.stream("copies", int, partitions=4)

    @events.consumer(group="g")
    def copy(event: Event[int]) -> None:
        copies.sync.append(event.data, key=event.key)

    @app.job("late")
    def late(job: Job[Any]) -> None:
        copies.sync.append(-1)

    worker: Worker = await app.worker()
    working = asyncio.create_task(worker.run())
    try:
        for n in range(0, 200, 20):
            await asyncio.gather(
                events.append_many([NewEvent(i, str(i % 7)) for i in range(n, n + 20)]), copies.append(1000 + n), late.enqueue()
            )
        found: list[int] = []
        async with asyncio.timeout(60):
            async for event in copies.tail("earliest"):
                found.append(event.data)
                if len(found) == 220:
                    break
    finally:
        worker.stop()
        await working
        app.sync.close()
    assert sorted(found) == sorted([*range(200), *range(1000, 1200, 20), *[-1] * 10])


def test_appends_survive_the_end_of_a_loop(url: str) -> None:
    app = Penstock(url)
    events = app.stream("events", int)

    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def cut_short(n: int) -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        async with app:
            await events.append(n)
            # Left behind when the loop ends.
            asyncio.create_task(events.append(-1))  # noqa: RUF006
            await asyncio.sleep(0)

    for n in range(3):
        asyncio.run(asyncio.wait_for(cut_short(n), 30))
    assert {0, 1, 2} <= {event.data for at in range(events.partitions) for event in events.sync.read(at)}
    events.sync.append(3)
    gc.collect()
    assert [loop() for loop in loops] == [None] * 3, "loops that ended are remembered"
    app.sync.close()


def test_closing_ends_what_a_call_that_took_too_long_left_behind(url: str) -> None:
    app = Penstock(url)
    app.sync.counts()
    loop, thread = app.context.background.loop, app.context.background.thread
    assert loop is not None and thread is not None
    with psycopg.connect(url) as blocker:
        blocker.execute("lock table penstock.jobs in access exclusive mode")
        app.context.background.timeout = timedelta(seconds=0.2)
        with pytest.raises(DatabaseUnavailable, match="did not end in time"):
            app.sync.counts()
        app.context.background.timeout = timedelta(seconds=60)
        app.sync.close()
    assert not thread.is_alive()
    assert loop.is_closed()
    assert not asyncio.all_tasks(loop)
