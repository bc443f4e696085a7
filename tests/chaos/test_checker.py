"""The checker of jobs finds the violations in histories of the real protocol without one of its guarantees."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import asyncpg

from tests.checker.history import Event, Gone
from tests.checker.jobs import Final, History, Planned, Rules, check_jobs

Sql: TypeAlias = "asyncpg.Connection[Any]"
RULES = {"plain": Rules(max_attempts=3)}


async def sabotage(sql: Sql, function: str, good: str, bad: str) -> None:
    """Replace a part of a function in this database."""
    source = await sql.fetchval(
        "select pg_get_functiondef(oid) from pg_proc where proname = $1 and pronamespace = 'penstock'::regnamespace", function
    )
    assert good in source
    await sql.execute(source.replace(good, bad))


async def history_of_two_workers(sql: Sql) -> list[str]:
    """Two workers: the first loses its lease and nevertheless settles late; then both claim the ready jobs."""
    clock = itertools.count(1)
    events: list[Event] = []
    await sql.execute("select penstock.create_job_type('plain', '{\"max_attempts\": 3}')")

    async def claim(worker: str) -> list[Any]:
        jobs = await sql.fetch("select id, attempt, lease from penstock.claim($1, '{plain}', 10)", worker)
        events.extend(Event("started", str(job["id"]), "plain", next(clock), job["attempt"], worker) for job in jobs)
        return list(jobs)

    async def settle(worker: str, job: Any) -> None:
        events.append(Event("ended", str(job["id"]), "plain", next(clock), job["attempt"], worker, "succeeded"))
        await sql.execute(
            "select penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint])",
            job["id"],
            job["attempt"],
            job["lease"],
        )

    id = await sql.fetchval("select penstock.enqueue('plain')")
    events.append(Event("enqueued", str(id), "plain", next(clock)))
    (first,) = await claim("w1")
    for job in await claim("w2"):  # finds no job, unless the claim is broken
        await settle("w2", job)
    gone_at = float(next(clock))
    await sql.execute("update penstock.leases set expires_at = now() - interval '1 s'")
    await sql.execute("select penstock.recover()")
    second = await claim("w2")
    gone = Gone("w1", gone_at, float(next(clock)))
    events.append(Event("ended", str(id), "plain", next(clock), first["attempt"], "w1", "failed"))
    await sql.execute(
        "select penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint])", id, first["attempt"], first["lease"]
    )
    for job in second:
        events.append(Event("ended", str(id), "plain", next(clock), job["attempt"], "w2", "failed"))
        await sql.execute(
            "select penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], '{failed-for-good}')",
            id, job["attempt"], job["lease"],
        )  # fmt: skip
    rows = await sql.fetch("select id, name, status, attempt, finished_at from penstock.find_jobs(array[$1::uuid])", id)
    # The clock of this history counts its events; rows that are archived now come after them.
    at = float(next(clock))
    final = [Final(str(r["id"]), r["name"], r["status"], r["attempt"], r["finished_at"] is not None, at) for r in rows]
    return check_jobs(History(events, final, RULES, [gone], planned={str(id): Planned(may_fail_for_good=True)}))


async def test_the_real_protocol_passes(sql: Sql) -> None:
    assert await history_of_two_workers(sql) == []


async def test_a_claim_that_takes_running_jobs_is_found(sql: Sql) -> None:
    await sabotage(sql, "claim", "and ready.status = 'queued'", "")
    assert any(violation.startswith("P4") for violation in await history_of_two_workers(sql))


async def test_a_settle_without_its_fence_is_found(sql: Sql) -> None:
    await sabotage(sql, "archive_succeeded", "and job.attempt = given.attempt", "")
    await sabotage(sql, "archive_succeeded", "and job.lease = given.lease", "")
    assert any(violation.startswith("P4") for violation in await history_of_two_workers(sql))
