"""Dropping a stream: what is released, who is told, and who may do it."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Conflict, DatabaseUnavailable, Event, Job, NotFound, Penstock, Position
from penstock.streams import queries as streams
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
LEFT = [
    "streams", "stream_partitions", "segments", "segment_starts", "stream_growths", "stream_producers", "stream_groups",
    "group_offsets", "groups", "members", "slots", "listeners", "retired_segments",
]  # fmt: skip


async def what_is_left(sql: Sql) -> dict[str, int]:
    counts = {table: await sql.fetchval(f"select count(*) from penstock.{table}") for table in LEFT}
    counts["tables"] = await sql.fetchval(
        "select count(*) from pg_tables where schemaname = 'penstock' and tablename ~ '^events_'"
    )
    return {table: count for table, count in counts.items() if count}


async def test_nothing_is_left_of_a_dropped_stream(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=2)
    await events.producer("p").append_many(range(10))
    async with events.consume("g") as batches:
        await anext(batches)
    await sql.execute("select penstock.roll_segment('events')")
    await events.grow(4)
    await events.drop()
    assert await what_is_left(sql) == {}
    for call in (events.bounds(), events.read(0), events.lag(), app.find_stream("nothing"), events.drop()):
        with pytest.raises(NotFound, match="no such stream"):
            await call
    # It may be made again, and is another one.
    await events.append(1)
    assert [event.data for event in await events.read(0) + await events.read(1)] == [1]


async def test_dead_letters_outlive_their_stream(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append(1)
    async with events.consume("g") as batches:
        batch = await anext(batches)
        consumer: Any = batches.consumer
        await consumer.committer.dead_letter(consumer.partitions[0], batch.first_offset, batch.next_offset, "bad")
    await events.drop()
    dead = await app.find_stream("events.dead", int)
    assert [event.data for event in await dead.read(0)] == [1]
    with pytest.raises(NotFound):
        await events.replay_dead()
    await app.drop_stream("events.dead")
    assert await what_is_left(sql) == {}


async def test_a_stream_with_live_members_is_only_dropped_by_force(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append(1)
    async with events.consume("g") as batches:
        await anext(batches)
        with pytest.raises(Conflict, match="live members") as refused:
            await events.drop()
        assert "p_force" in str(refused.value)
        assert len(await events.read(0)) == 1
        await events.drop(force=True)
        with pytest.raises(NotFound, match="can no longer be consumed"):
            await anext(batches)
    assert await what_is_left(sql) == {}


async def test_members_that_died_do_not_keep_a_stream(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await events.declare()
    await sql.execute("select penstock.declare_consumer_group('events', 'g')")
    await sql.execute("select penstock.join_group('events/g', 'm', gen_random_uuid(), '1 second')")
    with pytest.raises(Conflict):
        await events.drop()
    await sql.execute("update penstock.members set dead_after = '-1 year'")
    await events.drop()
    assert await what_is_left(sql) == {}


async def test_a_worker_loses_the_consumer_and_nothing_else(app: Penstock, url: str) -> None:
    events = app.stream("events", int, partitions=2)
    seen: list[int] = []
    ran: list[int] = []

    @events.consumer(group="g")
    async def handle(event: Event[int]) -> None:
        seen.append(event.data)

    @app.job("echo")
    async def echo(job: Job[int]) -> None:
        ran.append(job.data)

    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    await events.append(1)
    await eventually(lambda: seen == [1], "the event to be handled")
    async with Penstock(url) as other:
        await other.drop_stream("events", force=True)
    await eventually(lambda: worker.ended, "the consumer to end")
    await echo.enqueue(1)
    await eventually(lambda: ran == [1], "the job to run")
    worker.stop()
    with pytest.raises(NotFound, match="events/g can no longer be consumed"):
        await running


async def test_a_stream_that_another_program_dropped_is_declared_again(app: Penstock, url: str) -> None:
    events = app.stream("events", int, partitions=2)
    await events.append(1)
    async with Penstock(url) as other:
        await other.drop_stream("events")
        with pytest.raises(NotFound, match="no such stream: events"):
            await events.append(2)
        assert (await events.declare()).partitions == 2
        assert (await events.append(3)).offset == 0
        await other.drop_stream("events")
    await app.declare()
    assert (await events.append(4)).offset == 0


async def test_readers_are_told(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append(1)
    async with events.tail("earliest") as tail:
        assert (await anext(tail)).data == 1
        waiting = asyncio.create_task(anext(tail))  # type: ignore[arg-type]
        await eventually(
            lambda: sql.fetchval("select count(*) from penstock.listeners where kind = 'events'"), "the reader to wait"
        )
        await events.drop()
        with pytest.raises(NotFound, match="no such stream"):
            await waiting


@pytest.mark.parametrize("events_since", [0, 3, 5, 9])
async def test_a_stream_that_is_created_again_is_not_read_on_from_the_middle(app: Penstock, sql: Sql, events_since: int) -> None:
    """Offsets of the old stream mean nothing in the new one, whether it has as many events already or not."""
    old = app.stream("events", int, partitions=1)
    await old.append_many(range(5))
    async with old.tail("earliest") as tail, old.tail("latest") as at_the_end, old.consume("g", start="earliest") as pull:
        assert [(await anext(tail)).data for _ in range(5)] == list(range(5))
        waiting = asyncio.create_task(anext(at_the_end))  # type: ignore[arg-type]
        assert [event.data for event in await anext(pull)] == list(range(5))
        await eventually(
            lambda: sql.fetchval("select count(*) from penstock.listeners where kind = 'events'"), "the readers to wait"
        )
        async with sql.transaction():
            await sql.execute("select penstock.drop_stream('events', true)")
            await sql.execute("select penstock.create_stream('events', 1)")
            for n in range(events_since):
                await sql.execute("select penstock.append('events', $1::text::json)", str(100 + n))
        for reading in (anext(tail), waiting):
            with pytest.raises(NotFound, match="dropped and created again"):
                await asyncio.wait_for(reading, 60)  # type: ignore[arg-type]
        with pytest.raises(NotFound, match="events/g can no longer be consumed"):
            await asyncio.wait_for(anext(pull), 60)
    # Who starts again reads the new one, also under the name of the group.
    async with old.tail("earliest") as tail:
        assert [(await anext(tail)).data for _ in range(events_since)] == [100 + n for n in range(events_since)]
    if events_since:
        async with old.consume("g", start="earliest") as pull:
            assert [event.data for event in await anext(pull)] == [100 + n for n in range(events_since)]


async def test_a_producer_goes_on_in_a_stream_that_is_created_again(app: Penstock, sql: Sql) -> None:
    """Its numbers are of the old stream, and none of its events is taken for a repeated one."""
    events = app.stream("events", int, partitions=1)
    producer = events.producer("p")
    for n in range(3):
        await producer.append(n)
    async with sql.transaction():
        await sql.execute("select penstock.drop_stream('events')")
        await sql.execute("select penstock.create_stream('events', 1)")
    # In turn, the one that was there before, and one that asks for its number.
    for n, writer in enumerate([producer, events.producer("p")]):
        assert await writer.append(10 + n) == Position(0, n)
    assert [event.data for event in await events.read(0, 0, 10)] == [10, 11]


async def test_a_reader_that_is_in_a_segment_is_not_stopped(app: Penstock, sql: Sql, url: str) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append_many(range(3))
    reader = await asyncpg.connect(url)
    async with reader.transaction(isolation="repeatable_read"):
        assert len(await reader.fetch("select * from penstock.read_events('events', 0)")) == 3
        await events.drop()
        assert len(await reader.fetch("select * from penstock.read_events('events', 0)")) == 3
        assert await what_is_left(sql) == {"retired_segments": 1, "tables": 1}
    await reader.close()
    await streams.drop_retired(await app.database())
    assert await what_is_left(sql) == {}


async def test_an_append_that_waits_for_the_drop_finds_no_stream(app: Penstock, url: str, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append(1)
    dropping = await asyncpg.connect(url)
    transaction = dropping.transaction()
    await transaction.start()
    await dropping.execute("select penstock.drop_stream('events')")
    calls = [
        asyncio.create_task(events.append(2)),
        asyncio.create_task(events.grow(2)),
        asyncio.create_task(events.change(keep_events=5)),
        asyncio.create_task(events.consume("g").open()),
    ]

    async def waits() -> bool:
        query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        return int(await sql.fetchval(query)) == len(calls)

    await eventually(waits, "all calls to wait for the drop")
    await transaction.commit()
    await dropping.close()
    for call in calls:
        with pytest.raises(NotFound, match="no such stream: events"):
            await call
    assert set(await what_is_left(sql)) == {"retired_segments", "tables"}


async def test_a_drop_gives_way_to_an_append_that_stays_open(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await events.declare()
    async with sql.transaction():
        await sql.execute("select penstock.append('events', '1')")
        with pytest.raises(DatabaseUnavailable, match="lock timeout"):
            await events.drop()
    assert [event.data for event in await events.read(0)] == [1]


def test_without_a_loop(url: str) -> None:
    app = Penstock(url)
    events = app.stream("events", int, partitions=1)
    events.sync.append(1)
    events.sync.drop()
    with pytest.raises(NotFound):
        app.sync.drop_stream("events")
    app.sync.close()


async def test_only_an_administrator_drops(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await events.declare()
    for access in ("worker", "admin"):
        await sql.execute(f"do $$ begin create role drops_{access}; exception when duplicate_object then null; end $$")
        await sql.execute("select penstock.grant_access($1::name, $2)", f"drops_{access}", access)
    await sql.execute("set session authorization drops_worker")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await sql.execute("select penstock.drop_stream('events')")
    await sql.execute("reset session authorization")
    await sql.execute("set session authorization drops_admin")
    await sql.execute("select penstock.drop_stream('events')")
    await sql.execute("reset session authorization")
    assert set(await what_is_left(sql)) == {"retired_segments", "tables"}


async def test_who_drops_or_grows_in_a_transaction_keeps_its_own_lock_timeout(app: Penstock, sql: Sql) -> None:
    await app.stream("events", int, partitions=1).declare()
    async with sql.transaction():
        await sql.execute("set local lock_timeout = '7s'")
        for change in ("select penstock.grow_stream('events', 2)", "select penstock.drop_stream('events')"):
            await sql.execute(change)
            assert await sql.fetchval("show lock_timeout") == "7s"
