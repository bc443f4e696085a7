"""Schedules over HTTP: their last runs, and dropping those that left the code."""

from __future__ import annotations

from typing import Any

import asyncpg
import httpx
import pytest

from penstock.client import Client
from penstock.errors import Conflict, NotFound
from tests.http.http_server import TOKEN, Served

ADD = (
    "insert into penstock.schedules"
    " (name, kind, spec, runs_as, next_at, last_at, last_outcome, last_error, updated_at, declared_at)"
    " values ($1, 'cron', '0 4 * * * UTC', 'job', now(), now(), 'failed', 'ValueError: no takings', now(), $2)"
)


async def test_schedules_are_shown_and_dropped(served: Served, client: httpx.Client) -> None:
    connection: asyncpg.Connection[Any] = await asyncpg.connect(served.database_url)
    await connection.execute(ADD, "report", None)
    now = await connection.fetchval("select now()")
    await connection.execute(ADD, "sweep", now)
    await connection.close()
    listed = {one["name"]: one for one in client.get("/v1/schedules").json()}
    assert {name: one["declared"] for name, one in listed.items()} == {"report": False, "sweep": True}
    one = client.get("/v1/schedules/report").json()
    assert one == listed["report"]
    assert (one["last_outcome"], one["last_error"], one["job_id"]) == ("failed", "ValueError: no takings", None)
    assert client.get("/v1/schedules/none").status_code == 404
    with Client(served.base_url, "admin", TOKEN) as penstock:
        assert [record.name for record in penstock.list_schedules()] == ["report", "sweep"]
        with pytest.raises(Conflict, match="sweep is declared by a running worker"):
            penstock.drop_schedule("sweep")
        assert [run.id for run in penstock.schedule_runs("report")] == []
        penstock.create_job_type("report")
        id = penstock.run_schedule("report")
        assert [(run.id, run.status) for run in penstock.schedule_runs("report", status="queued")] == [(id, "queued")]
        with pytest.raises(Conflict, match="has not ended"):
            penstock.run_schedule("report")
        penstock.cancel(id)
        keyed = penstock.run_schedule("report", key="2026-01")
        assert keyed is not None and penstock.find(keyed).key == "2026-01"
        assert client.post("/v1/schedules/sweep/run", json={"key": ""}).status_code == 400
        assert client.post("/v1/schedules/sweep/run", json={"kee": "x"}).status_code == 400
        for missing in (penstock.run_schedule, penstock.schedule_runs):
            with pytest.raises(NotFound):
                missing("none")
        penstock.drop_schedule("report")
        with pytest.raises(NotFound):
            penstock.drop_schedule("report")
    assert client.delete("/v1/schedules/report").status_code == 404
    assert client.delete("/v1/schedules/sweep").status_code == 409
