"""One id that two transactions enqueue at the same time, with `after` and without: it is one job, that of the first commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from penstock import NewJob, Penstock
from penstock.jobs.models import make_id
from penstock.jobs.records import Status
from tests.waiting import eventually
from tests.workflows.statuses import status

Sql: TypeAlias = "asyncpg.Connection[Any]"


@pytest.fixture
async def two(url: str) -> AsyncIterator[tuple[Sql, Sql]]:
    """Two connections, for a transaction each."""
    connections = [await asyncpg.connect(url, server_settings={"lock_timeout": "60s"}) for _ in range(2)]
    await connections[0].execute("select penstock.create_job_type('step', '{\"max_attempts\": 1}')")
    await connections[0].execute("select penstock.create_job_type('gate')")
    await connections[0].execute("select penstock.create_job_type('end')")
    yield connections[0], connections[1]
    for connection in connections:
        await connection.close()


async def resolve(sql: Sql) -> None:
    while await sql.fetchval("select penstock.resolve_workflows()"):
        pass


async def claim(sql: Sql, name: str) -> list[Any]:
    return await sql.fetch("select id, attempt, lease from penstock.claim('psql', array[$1], 10)", name)


async def succeed(sql: Sql, jobs: list[Any]) -> None:
    for job in jobs:
        await sql.fetch("select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint])", *job)
    await resolve(sql)


async def waits_for_the_other(sql: Sql, connection: Sql, call: asyncio.Task[Any]) -> None:
    """Until a call waits for a transaction, or is over."""
    blocked = "select cardinality(pg_blocking_pids($1)) > 0"

    async def is_there() -> bool:
        return call.done() or bool(await sql.fetchval(blocked, connection.get_server_pid()))

    await eventually(is_there, "a call that waits for another transaction")


async def rows(sql: Sql, id: UUID) -> list[int]:
    """How often a job is among those that wait for others, and among those in the queue."""
    count = "select count(*) from penstock.{} where id = $1"
    return [await sql.fetchval(count.format(table), id) for table in ("waiting_jobs", "queued_jobs")]


async def by_json(app: Penstock, sql: Sql, id: UUID, after: UUID | None, group: UUID | None) -> None:
    await sql.execute("select penstock.enqueue('step', '1', $1, p_after => $2, p_group => $3)", id, after and [after], group)


async def by_batch(app: Penstock, sql: Sql, id: UUID, after: UUID | None, group: UUID | None) -> None:
    new = [NewJob(1, id=id, after=after, group=group), NewJob(2, group=None)]
    await app.enqueue_many("step", new, connection=sql)


async def by_unique_key(app: Penstock, sql: Sql, id: UUID, after: UUID | None, group: UUID | None) -> None:
    await app.enqueue("step", 1, id=id, after=after, group=group, unique=str(after), connection=sql)


async def later(app: Penstock, sql: Sql, id: UUID, after: UUID | None, group: UUID | None) -> None:
    statement = "select penstock.enqueue('step', '1', $1, p_after => $2, p_group => $3, p_run_after => now() + '1 hour')"
    await sql.execute(statement, id, after and [after], group)


Way: TypeAlias = Callable[[Penstock, Sql, UUID, "UUID | None", "UUID | None"], Awaitable[None]]


@pytest.mark.parametrize("rolls_back", [False, True])
@pytest.mark.parametrize("waits_first", [False, True])
@pytest.mark.parametrize("grouped", [None, "one", "two"])
@pytest.mark.parametrize("way", [by_json, by_batch, by_unique_key])
async def test_one_id_in_two_open_transactions_is_the_job_of_the_first_that_commits(
    app: Penstock, sql: Sql, two: tuple[Sql, Sql], way: Way, grouped: str | None, waits_first: bool, rolls_back: bool
) -> None:
    one = await app.job_group("one", then="end").open() if grouped else None
    other = await app.job_group("two", then="end").open() if grouped == "two" else one
    gate, id = await app.enqueue("gate", {}), make_id()
    first, second = (two[0].transaction(), two[1].transaction())
    await first.start()
    await way(app, two[0], id, gate.id if waits_first else None, one and one.id)
    await second.start()
    call = asyncio.ensure_future(way(app, two[1], id, None if waits_first else gate.id, other and other.id))
    await waits_for_the_other(sql, two[1], call)
    await (first.rollback() if rolls_back else first.commit())
    await call
    await second.commit()
    waits = waits_first is not rolls_back
    assert await status(app, id) == ("waiting" if waits else "queued")
    assert await rows(sql, id) == ([1, 0] if waits else [0, 1])
    # Before its gate it runs when the one without `after` was first.
    early = await claim(sql, "step")
    assert (id in [job["id"] for job in early]) is not waits
    await succeed(sql, early)
    await succeed(sql, await claim(sql, "gate"))
    await succeed(sql, await claim(sql, "step"))
    assert (await app.find(id)).status is Status.SUCCEEDED
    assert await sql.fetchval("select count(*) from penstock.archived_jobs where id = $1", id) == 1
    for group in {one, other} - {None}:
        assert group is not None
        await group.seal()
        await resolve(sql)
        found = await group.find()
        has_it = group is (other if rolls_back else one)
        assert (found.status, found.added, found.cancelled) == ("succeeded", int(has_it), 0)
        assert await status(app, found.then_job or id) == "queued"


@pytest.mark.parametrize("waits_first", [False, True])
async def test_a_deferred_twin_is_the_job_of_the_first_commit_too(
    app: Penstock, sql: Sql, two: tuple[Sql, Sql], waits_first: bool
) -> None:
    gate, id = await app.enqueue("gate", {}), make_id()
    first = two[0].transaction()
    await first.start()
    await later(app, two[0], id, gate.id if waits_first else None, None)
    call = asyncio.ensure_future(by_json(app, two[1], id, None if waits_first else gate.id, None))
    await waits_for_the_other(sql, two[1], call)
    await first.commit()
    await call
    assert await rows(sql, id) == ([1, 0] if waits_first else [0, 1])


async def test_a_twin_that_is_cancelled_meanwhile_is_archived_once(app: Penstock, sql: Sql, two: tuple[Sql, Sql]) -> None:
    gate, id = await app.enqueue("gate", {}), make_id()
    group = await app.job_group("one").open()
    first = two[0].transaction()
    await first.start()
    await by_json(app, two[0], id, None, group.id)
    call = asyncio.ensure_future(by_json(app, two[1], id, gate.id, group.id))
    await waits_for_the_other(sql, two[1], call)
    await first.commit()
    await app.cancel(id)
    await call
    await app.cancel(id)
    await succeed(sql, await claim(sql, "gate"))
    await group.seal()
    await resolve(sql)
    assert await sql.fetchval("select count(*) from penstock.archived_jobs where id = $1", id) == 1
    assert ((await group.find()).added, (await group.find()).cancelled) == (1, 1)


async def test_a_replay_and_a_dependent_of_one_id_are_one_job(app: Penstock, sql: Sql, two: tuple[Sql, Sql]) -> None:
    ended = await app.enqueue("step", 1)
    await app.cancel(ended.id)
    gate, id = await app.enqueue("gate", {}), make_id()
    first = two[0].transaction()
    await first.start()
    await by_json(app, two[0], id, gate.id, None)
    replay = asyncio.ensure_future(two[1].execute("select penstock.replay($1, $2)", ended.id, id))
    await waits_for_the_other(sql, two[1], replay)
    await first.commit()
    await asyncio.gather(replay, return_exceptions=True)
    assert await status(app, id) == "waiting"
    assert await sql.fetchval("select count(*) from penstock.queued_jobs where id = $1", id) == 0


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
@pytest.mark.parametrize("waits_first", [False, True])
async def test_a_twin_that_an_old_snapshot_does_not_show_is_refused(
    app: Penstock, sql: Sql, two: tuple[Sql, Sql], waits_first: bool, isolation: Any
) -> None:
    gate, id = await app.enqueue("gate", {}), make_id()
    old = two[1].transaction(isolation=isolation)
    await old.start()
    await two[1].execute("select count(*) from penstock.jobs")
    await by_json(app, two[0], id, gate.id if waits_first else None, None)
    with pytest.raises(asyncpg.SerializationError):
        await by_json(app, two[1], id, None if waits_first else gate.id, None)
    await old.rollback()
    assert await status(app, id) == ("waiting" if waits_first else "queued")


@pytest.mark.parametrize("waits_first", [False, True])
async def test_the_first_place_of_an_id_in_a_call_counts(
    app: Penstock, sql: Sql, two: tuple[Sql, Sql], waits_first: bool
) -> None:
    gate, id = await app.enqueue("gate", {}), make_id()
    group = await app.job_group("one").open()
    new = [NewJob(1, id=id, after=gate, group=group), NewJob(2, id=id, group=group)]
    receipts = await app.enqueue_many("step", new if waits_first else new[::-1])
    assert [receipt.outcome.value for receipt in receipts] == ["waiting" if waits_first else "queued", "duplicate"]
    assert await status(app, id) == ("waiting" if waits_first else "queued")
    assert (await group.find()).added == 1


async def test_a_child_that_was_counted_twice_is_counted_once_in_the_end(app: Penstock, sql: Sql, two: tuple[Sql, Sql]) -> None:
    """An old snapshot does not show what was archived since."""
    group, gate, id = await app.job_group("one").open(), await app.enqueue("gate", {}), make_id()
    old = two[1].transaction(isolation="repeatable_read")
    await old.start()
    await two[1].execute("select count(*) from penstock.jobs")
    await by_json(app, two[0], id, None, group.id)
    await succeed(sql, await claim(sql, "step"))
    await by_json(app, two[1], id, gate.id, group.id)
    await old.commit()
    await group.seal()
    await succeed(sql, await claim(sql, "gate"))
    await resolve(sql)
    found = await group.find()
    assert (found.status, found.added, found.succeeded, found.cancelled) == ("succeeded", 1, 1, 0)
