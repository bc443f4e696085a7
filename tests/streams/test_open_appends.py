"""What goes on while an append to one partition stays in an open transaction, and what waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Event, NewEvent, Penstock
from penstock.streams.partitioner import partition_of
from penstock.testing import running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
PARTITIONS, HELD = 4, 3
KEYS = [next(str(n) for n in range(1_000) if partition_of(str(n), PARTITIONS) == place) for place in range(PARTITIONS)]


@pytest.fixture
async def held(url: str, sql: Sql) -> AsyncIterator[Sql]:
    """A stream with work for each kind of maintenance, and a connection with an open append to its last partition."""
    await sql.execute(
        "select penstock.create_stream('events', $1, $2)",
        PARTITIONS,
        '{"segment_events": 1, "keep_events": 1, "compact": true}',
    )
    for _ in range(2):
        await sql.execute("select penstock.append_many('events', '{0,1,2,3,4,5,6,7}', $1)", KEYS * 2)
        await sql.execute("select penstock.roll_segment('events')")
    await sql.execute("select penstock.append_many('events', '{0,1,2,3}', $1)", KEYS)
    await sql.execute("select penstock.declare_consumer_group('events', 'g')")
    holder = await asyncpg.connect(url)
    transaction = holder.transaction()
    await transaction.start()
    await holder.execute("select penstock.append('events', '99', $1)", KEYS[HELD])
    yield holder
    if not holder.is_closed():
        await holder.close()


@pytest.mark.parametrize(
    ("call", "done"),
    [
        *((f"select (penstock.append('events', '1', '{KEYS[place]}')).event_offset", 5) for place in range(HELD)),
        (f"select count(*) from penstock.append_many('events', '{{1,2}}', '{{{KEYS[0]},{KEYS[2]}}}')", 2),
        ("select rolled from penstock.maintain_stream('events')", True),
        ("select penstock.retire_segments('events')", 2),
        ("select penstock.drop_retired() from penstock.retire_segments('events')", 2),
        ("select penstock.compact_stream('events')", 2),
        ("select (penstock.change_stream('events', '{\"keep_events\": 100}')).keep_events", 100),
        ("select count(*) from penstock.stream_bounds('events')", PARTITIONS),
        ("select count(*) from penstock.read_events('events', 3)", 5),
        ("select count(*) from penstock.stream_segments('events')", 3),
        ("select count(*) from penstock.group_lag('events') where lag = 5", PARTITIONS),
    ],
)
async def test_what_goes_on_is_done(held: Sql, sql: Sql, call: str, done: Any) -> None:
    """Beside the open append, each call does all of its work: one that gives up when it meets the lock does less."""
    # Maintenance takes a second to look for a free partition.
    await sql.execute("set statement_timeout = '60s'")
    await sql.execute("set lock_timeout = '30s'")
    assert await sql.fetchval(call) == done
    assert held.is_in_transaction()


async def test_a_segment_begins_in_all_other_partitions(held: Sql, sql: Sql) -> None:
    before = dict(await sql.fetch("select partition, segment from penstock.stream_partitions"))
    assert await sql.fetchval("select rolled from penstock.maintain_stream('events')")
    after = dict(await sql.fetch("select partition, segment from penstock.stream_partitions"))
    assert {partition for partition in before if after[partition] > before[partition]} == set(range(HELD))


@pytest.mark.parametrize(
    "call",
    [
        "select penstock.grow_stream('events', 8)",
        "select penstock.drop_stream('events')",
        "select penstock.roll_segment('events')",
    ],
)
async def test_what_needs_all_partitions_gives_way(held: Sql, sql: Sql, call: str) -> None:
    await sql.execute("set lock_timeout = '200ms'")
    with pytest.raises(asyncpg.LockNotAvailableError):
        await sql.execute(call)
    # It has left no lock behind.
    for place in range(HELD):
        await sql.execute("select penstock.append('events', '1', $1)", KEYS[place])


async def test_an_append_to_several_partitions_holds_what_it_has_while_it_waits(held: Sql, sql: Sql, url: str) -> None:
    """As docs/sql.md says: PostgreSQL gives locks of rows back at the end of a transaction alone."""
    other = await asyncpg.connect(url)
    waiting = asyncio.create_task(other.execute("select penstock.append_many('events', '{1,2}', $1)", [KEYS[0], KEYS[HELD]]))
    blocked = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    await eventually(lambda: sql.fetchval(blocked), "the append to wait", 60)
    await sql.execute("set lock_timeout = '200ms'")
    with pytest.raises(asyncpg.LockNotAvailableError):
        await sql.execute("select penstock.append('events', '1', $1)", KEYS[0])
    await sql.execute("select penstock.append('events', '1', $1)", KEYS[1])
    await held.close()
    await waiting
    await other.close()
    assert await sql.fetchval("select count(*) from penstock.read_events('events', $1)", HELD) == 6


async def test_a_consumer_works_on_the_other_partitions(held: Sql, app: Penstock) -> None:
    seen: list[int] = []

    events = app.stream("events", int)

    @events.consumer(group="g", start="earliest")
    async def handle(event: Event[int]) -> None:
        seen.append(event.data)

    async with running_worker(app):
        await events.append_many([NewEvent(10 + place, KEYS[place]) for place in range(HELD)])
        await eventually(lambda: set(seen) >= {10, 11, 12}, "the events of the other partitions", 60)
    assert 99 not in seen
