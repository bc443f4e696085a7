"""Producers whose appends can be repeated: through restarts, cancelled calls, and names that two writers or two roles share."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from penstock import Conflict, InvalidInput, NewEvent, Penstock, Stream
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def contents(stream: Stream[Any]) -> list[Any]:
    return [event.data for event in await stream.read(0, 0, 1_000)]


async def test_a_producer_that_starts_again_under_its_name_loses_nothing(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    for run in range(3):
        producer = events.producer("importer")
        assert len(await producer.append_many([run * 10, run * 10 + 1])) == 2
        await producer.append(run * 10 + 2)
    assert await contents(events) == [0, 1, 2, 10, 11, 12, 20, 21, 22]


async def test_a_producer_that_begins_where_it_was_repeats_nothing(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    for run in range(3):
        producer = events.producer("importer", sequence=0)
        sizes = [len(await producer.append_many([n, n + 1])) for n in range(0, 2 * run + 2, 2)]
        assert sizes == [*[0] * max(0, run - 1), *[2] * min(2, run + 1)], "only of the last batch the places are known"
    assert await contents(events) == list(range(6))


async def test_a_second_writer_under_the_same_name_is_refused_and_its_events_are_not_lost(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    mine, other = events.producer("importer"), events.producer("importer")
    await mine.append(1)
    await other.append(2)
    with pytest.raises(Conflict, match="was another one"):
        await mine.append(3)
    await events.producer("importer").append(3)
    assert await contents(events) == [1, 2, 3]


async def test_after_a_cancelled_append_other_events_are_not_taken_for_it(app: Penstock, url: str, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    producer = events.producer("importer")
    await producer.append(1)
    blocker = await asyncpg.connect(url)
    async with blocker.transaction():
        await blocker.execute("select penstock.append('events', '0')")
        appending = asyncio.create_task(producer.append(2))
        waits = "select exists (select from pg_stat_activity where $1 = any (pg_blocking_pids(pid)))"
        await eventually(lambda: sql.fetchval(waits, blocker.get_server_pid()), "the append to wait")
        appending.cancel()
        await asyncio.gather(appending, return_exceptions=True)
    await blocker.close()
    with pytest.raises(Conflict, match="not known"):
        await producer.append(3)
    await producer.append(2)
    await producer.append(3)
    assert sorted(await contents(events)) == [0, 1, 2, 3]


async def test_a_refused_batch_leaves_its_number_to_the_next(app: Penstock) -> None:
    events = app.stream("events", str, partitions=1)
    producer = events.producer("importer")
    with pytest.raises(InvalidInput, match="larger"):
        await producer.append("x" * 2_000_000)
    await producer.append("y")
    assert await contents(events) == ["y"]


async def test_a_repeated_batch_is_known_also_after_the_stream_grew(app: Penstock) -> None:
    events = app.stream("events", int, partitions=2)
    batch = [NewEvent(n, str(n)) for n in range(50)]
    await events.producer("p", sequence=0).append_many(batch)
    await events.grow(7)
    await events.producer("p", sequence=0).append_many(batch)
    assert sum(bounds.next for bounds in (await events.bounds()).values()) == 50


@pytest.mark.parametrize(("key", "headers"), [("k" * 2_000_000, None), (None, {"h": "x" * 2_000_000})])
async def test_keys_and_headers_are_bounded_as_payloads_are(app: Penstock, key: Any, headers: Any) -> None:
    events = app.stream("events", int, partitions=1)
    with pytest.raises(InvalidInput, match="larger than"):
        await events.append(1, key=key, headers=headers)


@pytest.fixture
async def other_url(app: Penstock, url: str, sql: Sql) -> AsyncIterator[str]:
    """The database as another role sees it that may append."""
    role = f"producer_{secrets.token_hex(4)}"
    await sql.execute(f"create role {role} login")
    await sql.execute("select penstock.grant_access($1::name, 'producer')", role)
    yield urlunsplit(urlsplit(url)._replace(netloc=f"{role}@{urlsplit(url).netloc.rpartition('@')[2]}"))
    await sql.execute(f"drop owned by {role}; drop role {role}")


ROUTED = "select * from penstock.append_routed('events', 1, '{0}', '{1}', array[$1::json], p_producer => 'p', p_sequence => $2)"
MANY = "select * from penstock.append_many('events', array[$1::json], p_producer => 'p', p_sequence => $2)"


@pytest.mark.parametrize("append", [pytest.param(ROUTED, id="routed"), pytest.param(MANY, id="many")])
async def test_a_role_cannot_use_up_the_numbers_of_another(app: Penstock, sql: Sql, other_url: str, append: str) -> None:
    events = app.stream("events", int, partitions=1)
    await events.ready()
    hostile = await asyncpg.connect(other_url)
    try:
        assert len(await hostile.fetch(append, "0", 1_000_000)) == 1
        assert len(await sql.fetch(append, "1", 1)) == 1
        assert len(await sql.fetch(append, "2", 2)) == 1
        # Nor does the later one end the numbers of the earlier one; and each repeats its own batches alone.
        assert len(await hostile.fetch(append, "3", 1_000_001)) == 1
        assert [tuple(row) for row in await sql.fetch(append, "2", 2)] == [(0, 2, 1)]
        assert await sql.fetch(append, "1", 1) == []
        with pytest.raises(asyncpg.PostgresError, match="the last was 2"):
            await sql.fetch(append, "4", 1_000_002)
    finally:
        await hostile.close()
    assert await contents(events) == [0, 1, 2, 3]


async def test_two_roles_with_one_name_go_on_each_after_its_own_last_batch(app: Penstock, other_url: str) -> None:
    events = app.stream("events", int, partitions=1)
    async with Penstock(other_url) as others:
        same = others.stream("events", int, partitions=1)
        for run in range(3):
            await events.producer("importer").append(run)
            theirs = same.producer("importer")
            await theirs.append_many([run + 10, run + 20])
            await theirs.append(run + 30)
            assert theirs.sequence == 2 * run + 2
        # What was sent already is known to each by its own numbers.
        assert await events.producer("importer", sequence=2).append(2)
        assert await same.producer("importer", sequence=5).append(32)
    assert sorted(await contents(events)) == [0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32]


@pytest.mark.parametrize("number", [-(2**63), -1])
async def test_a_number_below_zero_is_refused(app: Penstock, sql: Sql, number: int) -> None:
    await app.stream("events", int, partitions=1).ready()
    with pytest.raises(asyncpg.PostgresError, match=f"invalid producer or sequence: p, {number}") as refused:
        await sql.fetch(MANY, "1", number)
    assert refused.value.sqlstate == "PS400"


async def test_the_highest_number_can_be_repeated(app: Penstock, sql: Sql) -> None:
    await app.stream("events", int, partitions=1).ready()
    for _ in range(2):
        assert [tuple(row) for row in await sql.fetch(MANY, "1", 2**63 - 1)] == [(0, 0, 1)]


async def test_writers_of_a_role_that_begin_together_append_a_batch_once(app: Penstock, url: str, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await events.ready()
    others = [await asyncpg.connect(url) for _ in range(4)]
    try:
        rows = await asyncio.gather(*(other.fetch(MANY, "41", 41) for other in others))
    finally:
        for other in others:
            await other.close()
    assert [[tuple(row) for row in found] for found in rows] == [[(0, 0, 1)]] * 4
    assert await contents(events) == [41]
