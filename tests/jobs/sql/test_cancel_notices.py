"""The worker that holds a job is notified of its cancellation, however long its id is."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Penstock
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


@pytest.mark.parametrize("worker", ["w", "w" * 51, "w" * 54, "ü" * 27])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_worker_is_notified_of_a_cancellation(app: Penstock, sql: Sql, worker: str, at_once: bool) -> None:
    heard: list[object] = []
    await sql.add_listener(f"penstock_{worker}", lambda *said: heard.append(said[-1]))
    await sql.execute("select penstock.create_job_type('ship'), penstock.enqueue('ship')")
    id = await sql.fetchval("select id from penstock.claim($1, '{ship}', 1)", worker)
    if at_once:
        await sql.execute("select penstock.cancel($1)", id)
    else:
        await sql.execute("select penstock.start_operation('cancel', '{\"name\": \"ship\"}')")
        await sql.execute("select penstock.advance_operation()")
    await eventually(lambda: heard == [f"cancel {id}"], "the notification")
