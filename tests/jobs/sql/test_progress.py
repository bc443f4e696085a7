"""Progress goes by the lease: who lost a job says nothing about it any more."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from penstock import Penstock

Sql = Any
REPORT = "select penstock.report_progress(array[$1::uuid], array[$2::bigint], array[to_jsonb($3::text)])"


async def _claim(sql: Sql) -> Any:
    return await sql.fetchrow("select id, attempt, lease from penstock.claim('w', array['work'], 1)")


@pytest.fixture
async def work(url: str, sql: Sql) -> None:
    async with Penstock(url) as app:
        await app.migrate()
    await sql.execute("select penstock.create_job_type('work')")
    await sql.execute("select penstock.enqueue('work')")


async def _progress(sql: Sql) -> Any:
    return await sql.fetchval("select progress #>> '{}' from penstock.queued_jobs")


async def test_the_progress_of_a_worker_that_lost_the_job_is_not_noted(work: None, sql: Sql) -> None:
    """The job was handed back, so that its attempt has the same number again."""
    lost = await _claim(sql)
    await sql.execute(
        "select penstock.settle(array[$1::uuid], array[$3::smallint], array[$2::bigint], array['released'])",
        lost["id"],
        lost["lease"],
        lost["attempt"],
    )
    held = await _claim(sql)
    await sql.execute(REPORT, held["id"], held["lease"], "half")
    await sql.execute(REPORT, lost["id"], lost["lease"], "late")
    assert await _progress(sql) == "half"


async def test_progress_counts_while_the_answer_to_an_extend_is_under_way(work: None, sql: Sql) -> None:
    held = await _claim(sql)
    extend = "select lease from penstock.extend(array[$1::uuid], array[$3::smallint], array[$2::bigint])"
    extended = await sql.fetchval(extend, held["id"], held["lease"], held["attempt"])
    assert extended != held["lease"]
    await sql.execute(REPORT, held["id"], held["lease"], "half")
    assert await _progress(sql) == "half"
    await sql.execute(REPORT, held["id"], extended, "all")
    assert await _progress(sql) == "all"


async def test_progress_without_a_lease_is_refused(work: None, sql: Sql) -> None:
    held = await _claim(sql)
    with pytest.raises(asyncpg.PostgresError, match="without its lease") as refused:
        await sql.execute(REPORT, held["id"], None, "half")
    assert refused.value.sqlstate == "PS400"
