"""The contents of the tables at the end of a run, on the clock of the recorded events."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from penstock import Penstock
from penstock.postgres.database import Database
from tests.checker.jobs import Final


def text(value: Any) -> str:
    """A payload as text, the same for every order of its names."""
    return json.dumps(value, sort_keys=True)


def pid_of(id: str) -> str:
    """The process of a worker, host.pid.random, or of a member of a pool (with .p1) or a consumer group (.c1); "": neither.

    A worker that was declared dead goes on with a number at its end. A host may contain dots.
    """
    found = re.search(r"\.(\d+)\.[0-9a-f]{6}(\.[pc]?\d+)*$", id)
    return found[1] if found else ""


async def clock_difference(database: Database) -> float:
    """The difference between `time.monotonic` and the database's seconds since 1970, from the fastest of ten queries."""
    quickest, difference = float("inf"), 0.0
    for _ in range(10):
        before = time.monotonic()
        there = await database.fetchval("select extract(epoch from clock_timestamp())::float8")
        after = time.monotonic()
        if after - before < quickest:
            quickest, difference = after - before, (before + after) / 2 - there
    return difference


async def finals(app: Penstock) -> list[Final]:
    """All rows of queued_jobs and archived_jobs."""
    database = await app.database()
    difference = await clock_difference(database)
    found = await database.fetch(
        "select id, name, status::text, attempt, false as finished,"
        " 0.0::float8 as at, null as worker, null as reason, data"
        " from penstock.queued_jobs union all"
        " select id, name, status::text, attempt, true, extract(epoch from finished_at)::float8, worker, reason, data"
        " from penstock.archived_jobs"
    )
    rows = []
    for row in found:
        data = row["data"] if not isinstance(row["data"], str) else json.loads(row["data"])
        worker = pid_of(row["worker"] or "")
        at = row["at"] + difference
        status, reason = row["status"], row["reason"] or ""
        final = Final(str(row["id"]), row["name"], status, row["attempt"], row["finished"], at, worker, reason, text(data))
        rows.append(final)
    return rows
