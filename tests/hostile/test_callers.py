"""Callers of SQL in transactions of another isolation level: their calls work, or fail in words, and nothing runs twice."""

from __future__ import annotations

from typing import Any, TypeAlias
from uuid import uuid4

import asyncpg
import pytest

Sql: TypeAlias = "asyncpg.Connection[Any]"
LEVELS = ("repeatable read", "serializable")


@pytest.fixture
async def other(url: str, sql: Sql) -> Any:
    """A second caller, whose transactions begin at a level that the test sets."""
    await sql.execute("select penstock.declare_job_type('ship')")
    connection = await asyncpg.connect(url)
    yield connection
    connection.terminate()


async def run_job(sql: Sql) -> None:
    (job,) = await sql.fetch("select * from penstock.claim('w', array['ship'], 1)")
    await sql.execute(
        "select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], array['succeeded'])",
        job["id"], job["attempt"], job["lease"],
    )  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
async def test_a_job_that_ended_meanwhile_does_not_run_again(sql: Sql, other: Sql, level: str) -> None:
    id = uuid4()
    await sql.execute("select penstock.enqueue('ship', '{}', $1)", id)
    await other.execute(f"begin isolation level {level}")
    await other.fetch("select from penstock.jobs")
    await run_job(sql)
    with pytest.raises(asyncpg.SerializationError, match="ended after this transaction had begun"):
        await other.execute("select penstock.enqueue('ship', '{}', $1)", id)
    await other.execute("rollback")
    assert await other.fetchval("select penstock.enqueue('ship', '{}', $1)", id) == id
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 0


@pytest.mark.parametrize("level", LEVELS)
async def test_a_unique_key_that_was_taken_meanwhile_is_found_after_a_retry(sql: Sql, other: Sql, level: str) -> None:
    await other.execute(f"begin isolation level {level}")
    await other.fetch("select from penstock.jobs")
    first = await sql.fetchval("select penstock.enqueue('ship', p_unique_key => 'a')")
    with pytest.raises(asyncpg.SerializationError):
        await other.execute("select penstock.enqueue('ship', p_unique_key => 'a')")
    await other.execute("rollback")
    assert await other.fetchval("select penstock.enqueue('ship', p_unique_key => 'a')") == first


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "call",
    [
        "penstock.claim('w', array['ship'], 1)",
        "penstock.claim_alone('w', array['ship'])",
        "penstock.resolve_workflows()",
    ],
)
async def test_a_call_that_needs_read_committed_says_so(other: Sql, level: str, call: str) -> None:
    await other.execute(f"begin isolation level {level}")
    with pytest.raises(asyncpg.PostgresError, match="needs the isolation level read committed") as refused:
        await other.fetch(f"select * from {call}")
    assert refused.value.sqlstate == "PS409"
    assert "default isolation level" in str(refused.value.hint)


@pytest.mark.parametrize("level", LEVELS)
async def test_what_one_transaction_writes_is_written(sql: Sql, other: Sql, level: str) -> None:
    await sql.execute("select penstock.create_stream('orders', p_partitions => 1)")
    await sql.execute("select penstock.declare_topic('delays')")
    await sql.execute("select penstock.subscribe('delays', 'bob')")
    async with other.transaction(isolation=level.replace(" ", "_")):
        await other.execute("select penstock.enqueue('ship', '{\"n\": 1}')")
        await other.execute("select penstock.append('orders', '{\"n\": 1}'::json)")
        await other.execute("select penstock.publish('delays', '{\"n\": 1}')")
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 2
