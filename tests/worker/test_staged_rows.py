"""Rows that were staged and never committed do not stay for ever."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Job, Penstock
from penstock.testing import running_worker
from penstock.worker import maintenance
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def test_any_worker_drops_what_writers_left_a_day_ago(app: Penstock, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "PRUNE_EVERY_S", 0.0)

    @app.job("mail")
    async def mail(job: Job[Any]) -> None: ...

    await sql.execute(
        """
        insert into penstock.staged_jobs (writer, part, place, name, data, staged_at)
        select 'left', 'part', n, 'mail', '{}', now() - interval '25 hours' from generate_series(1, 150000) as n;
        insert into penstock.staged_jobs (writer, part, place, name, data) values ('busy', 'part', 1, 'mail', '{}')
        """
    )
    async with running_worker(app):
        await eventually(lambda: sql.fetchval("select count(*) = 1 from penstock.staged_jobs"), "the old rows to be dropped")
        assert await sql.fetchval("select writer from penstock.staged_jobs") == "busy"
