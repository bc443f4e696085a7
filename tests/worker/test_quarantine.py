"""One job that cannot be read stops only itself, however it came to be there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest
import structlog
from pydantic import BaseModel

from penstock import Conflict, InvalidInput, Job, Penstock
from penstock.testing import running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


class Order(BaseModel):
    """A payload that has to fit."""

    number: int


# What the owner of the schema writes past all checks, and the type of the job that has it.
EXPANDS = "('[' || repeat('1e131071,', 40) || '1]')::jsonb"
ROWS: dict[str, tuple[str, str]] = {
    "more than 1 GiB as text": ("('[' || repeat('1e131071,', 9000) || '1]')::jsonb", "plain"),
    "more than 4 MiB as text": (EXPANDS, "plain"),
    "digits that Python does not read": ("to_jsonb(repeat('9', 5000)::numeric)", "plain"),
    "a number beyond a double": ("to_jsonb((repeat('9', 400) || '.5')::numeric)", "plain"),
    "too deep": ("(repeat('[', 3000) || repeat(']', 3000))::jsonb", "plain"),
    "another type": ('\'{"number": "none"}\'', "typed"),
    "another type, in a thread": ('\'{"number": "none"}\'', "plain_thread"),
    "more than 4 MiB, in a pool": (EXPANDS, "pool"),
    "in a pool, digits": ("to_jsonb(repeat('9', 5000)::numeric)", "pool"),
}


async def write(sql: Sql, name: str, data: str, key: str | None = None, times: str = "now()", ready: bool = True) -> UUID:
    """A row that no entry admits, in front of all others."""
    slot = "0" if name == "pool" else "null"
    seq = "(select coalesce(min(seq), 1000) - 1 from penstock.queued_jobs)" if ready else "null"
    row = await sql.fetchrow(
        "insert into penstock.queued_jobs"
        " (id, name, seq, run_after, created_at, updated_at, attempt, max_attempts, key, slot, data)"
        f" values ($1, $2, {seq}, {times}, {times}, now(), 5, 5, $3,"
        f" {slot}, {data}) returning id",
        uuid4(), name, key,
    )  # fmt: skip
    return UUID(str(row["id"]))


@asynccontextmanager
async def working(app: Penstock, done: list[str]) -> AsyncIterator[None]:
    """A worker with handlers of every kind."""

    async def plain(job: Job[Any]) -> None:
        done.append(str(job.id))

    async def typed(job: Job[Order]) -> None:
        done.append(str(job.id))

    def threaded(job: Job[Order]) -> None:
        done.append(str(job.id))

    app.job("plain")(plain)
    app.job("typed")(typed)
    app.job("plain_thread")(threaded)
    app.pool("pool", slots=1).job(plain)
    async with running_worker(app, at_once=True):
        yield


async def quarantined(sql: Sql, id: UUID) -> Any:
    return await sql.fetchrow(
        "select status::text, reason, errors, key from penstock.archived_jobs where id = $1 and reason = 'quarantined'", id
    )


async def test_rows_that_no_entry_admits_stop_only_themselves(app: Penstock, sql: Sql) -> None:
    done: list[str] = []
    with structlog.testing.capture_logs() as logs:
        poison = await _worked_beside_poison(app, sql, done)
    listed = await app.find_many(status="failed", reason="quarantined")
    assert {job.id for job in listed} == set(poison.values())
    assert all(job.reason == "quarantined" for job in listed)
    assert sum(count.quarantined_last_hour for count in await app.counts()) == len(poison)
    # What a claim cannot return is logged by its number, the others by their ids.
    by_id = {entry["job_id"] for entry in logs if entry["event"] == "job_quarantined"}
    assert by_id <= set(map(str, poison.values()))
    assert len(by_id) + sum(entry["jobs"] for entry in logs if entry["event"] == "jobs_quarantined") == len(poison)


async def _worked_beside_poison(app: Penstock, sql: Sql, done: list[str]) -> dict[str, UUID]:
    """Run healthy jobs beside each row. Returns the ids of the rows, which are quarantined then."""
    async with working(app, done):
        await eventually(lambda: sql.fetchval("select count(*) = 4 from penstock.jobs"), "declared")
        for name in ("plain", "typed", "plain_thread", "pool"):
            await sql.execute("select penstock.pause($1)", name)
        poison = {case: await write(sql, name, data, "a") for case, (data, name) in ROWS.items()}
        healthy = []
        for name in ("plain", "typed", "plain_thread", "pool"):
            for key in ("a", "b"):
                for number in range(5):
                    query = "select penstock.enqueue($1, jsonb_build_object('number', $2::int), p_key => $3)"
                    healthy.append(str(await sql.fetchval(query, name, number, key)))
        for name in ("plain", "typed", "plain_thread", "pool"):
            await sql.execute("select penstock.resume($1)", name)
        for case, id in poison.items():
            row = await eventually(lambda id=id: quarantined(sql, id), f"{case}: quarantined", timeout=60)
            assert row["status"] == "failed"
            error = json.loads(row["errors"])[-1]
            assert error["type"] == "Quarantined" and error["message"], case
        await eventually(lambda: set(healthy) <= set(done), "all healthy jobs ran", timeout=60)
        assert sorted(done) == sorted(healthy)
        await eventually(lambda: sql.fetchval("select count(*) = 0 from penstock.queued_jobs"), "the last results are written")
    # A reader of the archive can read all rows.
    assert await sql.fetchval("select count(data::text) from penstock.archived_jobs") == len(poison) + len(healthy)
    return poison


async def test_odd_times_do_not_keep_a_job_from_running(app: Penstock, sql: Sql) -> None:
    done: list[str] = []
    async with working(app, done):
        await eventually(lambda: sql.fetchval("select count(*) = 4 from penstock.jobs"), "declared")
        ids = [
            await write(sql, name, "'{\"number\": 1}'", "k", time)
            for name in ("plain", "pool")
            for time in ("'-infinity'", "'4000-01-01 BC'")
        ]
        far = await write(sql, "plain", "'{}'", times="'20000-01-01'", ready=False)
        ids.append(await write(sql, "plain", "'{}'", times="'infinity'"))
        ids.append(await sql.fetchval("select penstock.enqueue('plain')"))
        await eventually(lambda: {str(id) for id in ids} <= set(done), "all ran")
        assert (await app.find(far)).run_after.year == 9999
        await eventually(lambda: sql.fetchval("select count(*) = 1 from penstock.queued_jobs"), "all others settled")
        assert [job.id for job in await app.find_many(status="queued")] == [far]
        assert await app.cancel(far) == "cancelled"
        assert (await app.find(far)).created_at.year == 9999


async def test_an_unreadable_job_can_be_seen_cancelled_and_replayed(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('plain')")
    first, second = [await write(sql, "plain", EXPANDS) for _ in range(2)]
    assert {job.id for job in await app.find_many()} == {first, second}
    assert (await app.find(first)).data is None
    assert await app.cancel(first) == "cancelled"
    assert await sql.fetchval("select penstock.quarantine(array[$1::uuid], 'somebody says so')", second) == 1
    for id in (first, second):
        with pytest.raises(Conflict, match="number"):
            await app.replay(id)
        with pytest.raises(InvalidInput):
            await sql_error(sql, "select penstock.replay($1, p_data => ('[' || repeat('1e131071,', 100) || '1]')::jsonb)", id)
        copy = await app.replay(id, data={"number": 1})
        assert (await app.find(copy.id)).data == {"number": 1}
        assert (await app.find(copy.id)).replay_of == id
        # The original payload is kept for inspection.
        assert await sql.fetchval("select pg_column_size(data) > 100 from penstock.quarantined_payloads where id = $1", id)


async def sql_error(sql: Sql, query: str, *args: Any) -> None:
    try:
        await sql.execute(query, *args)
    except asyncpg.PostgresError as error:
        raise InvalidInput(str(error)) from error


@pytest.mark.parametrize("end", ["expire", "recover"])
async def test_care_goes_on_past_an_unreadable_job(app: Penstock, sql: Sql, end: str) -> None:
    await sql.execute("select penstock.create_job_type('plain', '{\"max_attempts\": 1}')")
    id = await write(sql, "plain", EXPANDS)
    healthy = await sql.fetchval("select penstock.enqueue('plain')")
    if end == "expire":
        await sql.execute("update penstock.queued_jobs set expires_at = now() - interval '1 s'")
        await sql.execute("select penstock.expire()")
    else:
        # A client that does nothing about a payload that it did not get.
        rows = await sql.fetch("select id, data from penstock.claim('w', array['plain'], 10)")
        assert {row["id"]: row["data"] for row in rows} == {id: None, healthy: "{}"}
        await sql.execute("update penstock.queued_jobs set max_attempts = attempt")
        await sql.execute("update penstock.leases set expires_at = now() - interval '1 s'")
        await sql.execute("select penstock.recover()")
    status = "expired" if end == "expire" else "failed"
    rows = await sql.fetch("select status::text, data::text from penstock.archived_jobs order by id = $1", id)
    assert [tuple(row) for row in rows] == [(status, "{}"), (status, "null")]
