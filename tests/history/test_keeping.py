"""What comes back from lakes into the database is kept for as long as the setting keep_history says."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Penstock, Settings
from penstock.testing import running_worker
from penstock.worker import maintenance
from tests.history.keeping import TABLES, counts, fill
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
DAY = timedelta(days=1)


async def test_what_is_older_is_deleted_in_bounded_portions_and_the_rest_stays(sql: Sql) -> None:
    await fill(sql, 1, 29, 32, 33, 34)
    assert await counts(sql) == dict.fromkeys(TABLES, 10)
    prune = "select penstock.prune_history(interval '31 days', 2)"
    assert await sql.fetchval(prune) == 16, "two rows of each of four tables and of each of two lakes"
    assert await sql.fetchval(prune) == 8
    assert await sql.fetchval(prune) == 0
    assert await counts(sql) == dict.fromkeys(TABLES, 4)
    names = await sql.fetch("select distinct name from penstock.run_history order by name")
    assert [row["name"] for row in names] == ["run-1", "run-29"]


@pytest.mark.parametrize("call", ["null", "'-1 day'", "'2000 years'", "'1 day', 0", "'1 day', 100001"])
async def test_a_span_or_a_portion_that_makes_no_sense_is_refused(sql: Sql, call: str) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.fetchval(f"select penstock.prune_history({call})")
    assert refused.value.sqlstate == "PS400"


async def test_a_worker_deletes_what_is_older_than_the_setting(url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "PRUNE_EVERY_S", 0.0)
    await fill(sql, 1, 3)
    async with Penstock(url, settings=Settings(keep_history=2 * DAY, maintenance_interval=timedelta(milliseconds=50))) as app:

        @app.job
        async def nothing() -> None: ...

        async with running_worker(app):
            await eventually(lambda: sql.fetchval("select count(*) = 2 from penstock.run_history"))
    assert await counts(sql) == dict.fromkeys(TABLES, 2)


async def test_prune_deletes_what_is_older_than_the_setting_and_nothing_when_there_is_none(url: str, sql: Sql) -> None:
    await fill(sql, 1, 400)
    async with Penstock(url, settings=Settings(keep_history=None)) as app:
        await app.prune()
    assert await counts(sql) == dict.fromkeys(TABLES, 4)
    async with Penstock(url) as app:
        await app.prune()
    assert await counts(sql) == dict.fromkeys(TABLES, 2)
