"""The archive in commit order, on a real server: writers that overlap, run for long, or roll back, and readers among them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import Penstock, Settings
from penstock.errors import InvalidInput
from penstock.history import queries as history
from penstock.postgres.database import Database
from penstock.spark.jobs.archive import EARLIEST, Archive
from penstock.spark.jobs.offsets import Position
from penstock.testing import TemporaryDatabases
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    database = Database(url, Settings())
    await database.open()
    yield database
    await database.close()


async def finish(sql: Sql, jobs: int) -> None:
    """Archive some new jobs, in the connection's transaction if it has one."""
    await sql.execute("select count(*) from penstock.enqueue_many('t', array_fill('{}'::jsonb, array[$1::integer]))", jobs)
    rows = await sql.fetch("select id, attempt, lease from penstock.claim('w', '{t}', $1)", jobs)
    await sql.execute(
        "select penstock.settle($1, $2::smallint[], $3::bigint[])",
        [row["id"] for row in rows], [row["attempt"] for row in rows], [row["lease"] for row in rows],
    )  # fmt: skip


async def archive_some(sql: Sql, jobs: int) -> None:
    """Archive rows directly: a row is a row, and this may roll back without leaving claims."""
    await sql.execute(
        "insert into penstock.archived_jobs (id, finished_at, created_at, run_after, status, attempt, max_attempts, priority,"
        " name, data) select gen_random_uuid(), clock_timestamp(), now(), now(), 'succeeded', 1, 5, 0, 't', '{}'"
        " from generate_series(1, $1)",
        jobs,
    )


async def rows_of(database: Database, archive: Archive, start: Position, end: Position, size: int) -> list[Any]:
    """The ids of the batch between two positions, as the tasks would read them."""
    found: list[Any] = []
    for part in await archive.slices(start, end, size):
        query = await history.scan(database, "archived_jobs", ["id"], [], part.as_range())
        assert query is not None
        found += [UUID(row["id"]) for row in await database.fetch(query)]
    return found


async def test_batches_are_bounded_and_hold_everything_once(database: Database, sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('t')")
    for jobs in (3, 1, 40, 2, 2):
        await finish(sql, jobs)
    archive, position, read, sizes = Archive(database), EARLIEST, [], []
    while await archive.waiting(position):
        end = await archive.next(position, 10)
        batch = await rows_of(database, archive, position, end, 4)
        assert sorted(await rows_of(database, archive, position, end, 100)) == sorted(batch)
        sizes.append(len(batch))
        read += batch
        position = Position.from_json(end.as_json())
    assert max(sizes) == 10
    assert sorted(read) == sorted(row["id"] for row in await sql.fetch("select id from penstock.archived_jobs"))
    assert len(read) == 48


async def test_a_transaction_that_runs_for_long_stalls_nothing_and_is_read_when_it_ends(
    database: Database, url: str, sql: Sql
) -> None:
    archive, slow = Archive(database), await asyncpg.connect(url)
    transaction = slow.transaction()
    await transaction.start()
    await archive_some(slow, 5)
    position = EARLIEST
    for _ in range(3):
        await archive_some(sql, 2)
        end = await archive.next(position)
        assert len(await rows_of(database, archive, position, end, 100)) == 2
        position = end
    await transaction.commit()
    end = await archive.next(position)
    assert len(await rows_of(database, archive, position, end, 100)) == 5
    assert not await archive.waiting(end)
    slow.terminate()


async def test_a_savepoint_that_is_rolled_back_takes_its_jobs_with_it(database: Database, sql: Sql) -> None:
    archive = Archive(database)
    async with sql.transaction():
        await archive_some(sql, 3)
        inner = sql.transaction()
        await inner.start()
        await archive_some(sql, 4)
        await inner.rollback()
        async with sql.transaction():
            await archive_some(sql, 1)
    assert len(await rows_of(database, archive, EARLIEST, await archive.next(EARLIEST), 100)) == 4


@settings(
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32))
def test_no_interleaving_of_writers_loses_or_repeats_a_job(databases: TemporaryDatabases, seed: int) -> None:
    async def run(url: str) -> None:
        chance = Random(seed)
        database = Database(url, Settings())
        await database.open()
        archive, position = Archive(database), EARLIEST
        writers = [await asyncpg.connect(url) for _ in range(4)]
        open_transactions: dict[int, list[Any]] = {}
        limit = chance.choice([None, 1, 3, 7])
        read: list[Any] = []
        for step in range(60):
            place = chance.randrange(len(writers))
            stack = open_transactions.setdefault(place, [])
            action = chance.random()
            if action < 0.25 and len(stack) < 3:
                stack.append(writers[place].transaction())
                await stack[-1].start()
            elif action < 0.6:
                await archive_some(writers[place], chance.randint(1, 5))
            elif action < 0.8 and stack:
                last = stack.pop()
                await (last.rollback() if chance.random() < 0.4 else last.commit())
            if chance.random() < 0.4 or step == 59:
                if step == 59:
                    for left in open_transactions.values():
                        while left:
                            await left.pop().commit()
                while await archive.waiting(position):
                    end = await archive.next(position, limit)
                    batch = await rows_of(database, archive, position, end, chance.choice([2, 100]))
                    assert limit is None or len(batch) <= limit
                    read += batch
                    position = end
                    if step < 59 and chance.random() < 0.5:
                        break
        expected = [row["id"] for row in await writers[0].fetch("select id from penstock.archived_jobs")]
        for writer in writers:
            writer.terminate()
        await database.close()
        assert sorted(read) == sorted(expected)

    with databases.database() as url:
        asyncio.run(run(url))


async def test_a_reader_by_the_highest_time_would_lose_jobs(database: Database, url: str, sql: Sql) -> None:
    """The naive reader that the two snapshots replace: shown to fail, so that the tests above are known to test something."""
    slow = await asyncpg.connect(url)
    transaction = slow.transaction()
    await transaction.start()
    await archive_some(slow, 1)
    await archive_some(sql, 1)
    seen = await sql.fetch("select id, finished_at from penstock.archived_jobs order by finished_at")
    await transaction.commit()
    later = await sql.fetch("select id from penstock.archived_jobs where finished_at > $1", seen[-1]["finished_at"])
    assert len(seen) + len(later) < await sql.fetchval("select count(*) from penstock.archived_jobs")
    slow.terminate()


async def test_days_that_were_pruned_unread_are_reported(database: Database, sql: Sql) -> None:
    archive = Archive(database)
    await archive_some(sql, 1)
    before = await archive.now()
    await sql.execute("set penstock.clock = '2024-05-05T12:00:00Z'")
    await sql.execute("select penstock.ensure_archive(penstock.clock())")
    await sql.execute(
        "insert into penstock.archived_jobs (id, finished_at, created_at, run_after, status, attempt, max_attempts, priority,"
        " name, data) values (gen_random_uuid(), penstock.clock(), now(), now(), 'failed', 1, 1, 0, 't', '{}')"
    )
    await sql.execute("reset penstock.clock")
    await sql.execute("select * from penstock.prune('30 days')")
    assert await archive.check_complete(before, fail=False) == ["2024-05-05 (1 jobs)"]
    with pytest.raises(InvalidInput, match="lost days"):
        await archive.check_complete(before, fail=True)
    assert await archive.check_complete(await archive.now(), fail=True) == []


async def test_an_idle_reader_is_notified_and_a_busy_one_costs_no_notification(app: Penstock, url: str, sql: Sql) -> None:
    database = await app.database()
    heard: list[str] = []
    listener = await asyncpg.connect(url)
    await listener.add_listener(history.CHANNEL, lambda *_: heard.append("job"))
    await archive_some(sql, 1)
    await history.wait(database, "reader", True)
    await archive_some(sql, 1)
    await eventually(lambda: heard, "the notification")
    await history.wait(database, "reader", False)
    await archive_some(sql, 1)
    await listener.fetch("select 1")
    assert heard == ["job"]
    listener.terminate()


@pytest.mark.parametrize(
    ("filter", "found"),
    [
        ({"column": "name", "op": "=", "value": "it's"}, 1),
        ({"column": "name", "op": "in", "value": ["it's", 'a"b', "{x}"]}, 2),
        ({"column": "name", "op": "starts with", "value": "it"}, 1),
        ({"column": "name", "op": "ends with", "value": "s"}, 1),
        ({"column": "name", "op": "contains", "value": '"'}, 1),
        ({"column": "name", "op": "<", "value": "b"}, 1),
        ({"column": "key", "op": "is null", "value": None}, 2),
        ({"column": "status", "op": ">=", "value": "s"}, 2),
        ({"column": "max_attempts", "op": "<", "value": "70000"}, 2),
        ({"column": "xid", "op": ">", "value": "1"}, 2),
        ({"column": "name", "op": "not", "value": {"column": "name", "op": "=", "value": "it's"}}, 1),
    ],
)
async def test_filters_mean_what_they_say(database: Database, sql: Sql, filter: dict[str, Any], found: int) -> None:
    for name in ("it's", 'a"b'):
        await archive_some(sql, 1)
        await sql.execute("update penstock.archived_jobs set name = $1 where name = 't'", name)
    query = await history.scan(database, "archived_jobs", ["id"], [filter], {})
    assert query is not None
    assert len(await database.fetch(query)) == found


@pytest.mark.parametrize("relation", ["workers", "archived_jobs; drop table x", "archived_jobs_p1", "pg_class"])
async def test_only_jobs_are_scanned(database: Database, relation: str) -> None:
    with pytest.raises(InvalidInput, match="cannot scan"):
        await history.scan(database, relation, ["id"], [], {})


async def test_a_column_that_is_not_there_is_refused(database: Database) -> None:
    with pytest.raises(InvalidInput, match="no such column"):
        await history.scan(database, "archived_jobs", ["id; drop table penstock.jobs"], [], {})
