"""Operations on the jobs whose last error has a signature: the same ones in Python, SQL, over HTTP and on the command line."""

from __future__ import annotations

import json
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from penstock import InvalidInput, JobFilter, Penstock
from penstock.client import Client
from penstock.core.signatures import signature_of
from penstock.operations import queries
from penstock.operations.models import OperationPreview, OperationRecord
from tests.command_line import penstock
from tests.http.http_server import TOKEN, serving

Sql: TypeAlias = "asyncpg.Connection[Any]"
LATE = signature_of("ValueError", "no order 1")


async def failed(app: Penstock, sql: Sql, name: str, *messages: str) -> list[UUID]:
    """Jobs that failed for good, each with a message, as a worker settles them."""
    await app.create_job_type(name, max_attempts=1)
    ids = [job.id for job in await app.enqueue_many(name, range(len(messages)))]
    rows = await sql.fetch("select id, lease from penstock.claim('w', array[$1], 100)", name)
    leases = {row["id"]: row["lease"] for row in rows}
    errors = [
        json.dumps({"type": "ValueError", "message": message, "signature": signature_of("ValueError", message)})
        for message in messages
    ]
    await sql.fetch(
        "select penstock.settle($1, $2::smallint[], $3, $4, $5::jsonb[])",
        ids, [1] * len(ids), [leases[id] for id in ids], ["failed"] * len(ids), errors,
    )  # fmt: skip
    return ids


@pytest.fixture
async def wanted(app: Penstock, sql: Sql) -> set[UUID]:
    """Jobs of a type that failed of one cause, beside others."""
    ids = await failed(app, sql, "mail", "no order 1", "no order 2", "no price", "no order 3")
    await failed(app, sql, "bill", "no order 4")
    return {ids[0], ids[1], ids[3]}


async def replayed(sql: Sql) -> set[UUID]:
    return {row["replay_of"] for row in await sql.fetch("select replay_of from penstock.queued_jobs")}


async def advanced(app: Penstock, id: UUID) -> OperationRecord:
    """Do an operation to its end, as maintenance does."""
    database = await app.database()
    while await queries.advance(database) is not None:
        pass
    return await app.operations.find(id)


async def test_in_python(app: Penstock, sql: Sql, wanted: set[UUID]) -> None:
    filter = JobFilter(name="mail", signature=LATE)
    preview = await app.operations.preview("replay", filter)
    assert (preview.jobs, set(preview.sample)) == (3, wanted)
    started = await app.operations.start("replay", filter)
    assert started.filter == {"name": "mail", "status": "failed", "signature": LATE}
    assert (await advanced(app, started.id)).done == 3
    assert await replayed(sql) == wanted
    # Of all types.
    assert (await app.operations.preview("replay", JobFilter(signature=LATE))).jobs == 4
    assert (await app.operations.preview("replay", JobFilter(signature="0" * 16))).jobs == 0


async def test_in_sql(app: Penstock, sql: Sql, wanted: set[UUID]) -> None:
    given = json.dumps({"name": "mail", "signature": LATE})
    row = await sql.fetchrow("select * from penstock.preview_operation('replay', $1)", given)
    assert row is not None and (row["jobs"], row["whole"], set(row["sample"])) == (3, True, wanted)
    id = await sql.fetchval("select id from penstock.start_operation('replay', $1)", given)
    assert (await advanced(app, id)).done == 3
    assert await replayed(sql) == wanted


@pytest.mark.parametrize("kind", ["cancel", "purge", "set-priority", "run-now"])
async def test_only_finished_jobs_have_one(app: Penstock, kind: Any, wanted: set[UUID]) -> None:
    priority = 1 if kind == "set-priority" else None
    with pytest.raises(InvalidInput, match=f"invalid condition of a filter for {kind}: signature"):
        await app.operations.start(kind, JobFilter(name="mail", signature=LATE), priority=priority)


async def test_on_the_command_line(app: Penstock, url: str, sql: Sql, wanted: set[UUID]) -> None:
    words = ("jobs", "replay", "--all-matching", "--type", "mail", "--signature", LATE)
    preview = penstock(url, *words, "--dry-run")
    assert preview.returncode == 0, preview.stderr
    assert "replay would apply to 3 jobs" in preview.stdout
    assert {UUID(line.strip().removeprefix("job_")) for line in preview.stdout.splitlines()[1:]} == wanted
    started = json.loads(penstock(url, *words, "--json").stdout)
    assert started["filter"] == {"name": "mail", "status": "failed", "signature": LATE}
    assert (await advanced(app, UUID(started["id"]))).done == 3
    assert await replayed(sql) == wanted


async def test_over_http(app: Penstock, url: str, sql: Sql, wanted: set[UUID]) -> None:
    with serving(url) as served, served.client() as client, Client(served.base_url, "admin", TOKEN) as calls:
        body = {"kind": "replay", "filter": {"name": "mail", "signature": LATE}}
        assert client.post("/v1/operations/preview", json=body).json()["jobs"] == 3
        assert client.post("/v1/operations", json={**body, "kind": "cancel"}).status_code == 400
        filter = JobFilter(name="mail", signature=LATE)
        preview = calls.operations.preview("replay", filter)
        assert isinstance(preview, OperationPreview) and set(preview.sample) == wanted
        # The maintenance of the server does it.
        ended = calls.operations.wait(calls.operations.start("replay", filter).id)
        assert (ended.state, ended.done) == ("finished", 3)
        through = penstock(
            url, "jobs", "replay", "--all-matching", "--signature", LATE, "--dry-run", PENSTOCK_SERVER_URL=served.base_url,
            PENSTOCK_SERVER_TOKEN=f"admin.{TOKEN}",
        )  # fmt: skip
        assert "replay would apply to 4 jobs" in through.stdout, through.stderr
    assert await replayed(sql) == wanted
