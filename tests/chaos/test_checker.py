"""The checker finds what is wrong: on made-up histories, and on real ones with a guarantee broken on purpose."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import asyncpg
import pytest
from history import Event, Final, Rules, check

Sql: TypeAlias = "asyncpg.Connection[Any]"
RULES = {"plain": Rules(), "once": Rules(at_most_once=True), "limited": Rules(concurrency=1)}
OK = [
    Event("enqueued", "a", "plain", 0.0),
    Event("started", "a", "plain", 1.0, 3, "w1"),
    Event("ended", "a", "plain", 2.0, 3, "w1", "succeeded"),
]
LOST = [
    Event("started", "a", "plain", 1.0, 3, "dead"),
    Event("started", "a", "plain", 8.0, 2, "w"),
    Event("ended", "a", "plain", 9.0, 2, "w", "succeeded"),
]
TWO_AT_ONCE = [Event("started", id, "limited", 1.0, 3, "w") for id in "ab"]
TWO_AT_ONCE += [Event("ended", id, "limited", 2.0, 3, "w", "failed") for id in "ab"]


def test_a_good_history_passes() -> None:
    assert check(OK, [Final("a", "plain", "succeeded", 3, True)], RULES, {}) == []


@pytest.mark.parametrize(
    ("promise", "events", "final"),
    [
        ("P1", OK, []),
        ("P2", OK, [Final("a", "plain", "in-progress", 3, False)]),
        ("P3", [Event("started", "a", "once", t, 1, "w") for t in (1.0, 2.0)], [Final("a", "once", "failed", 0, True)]),
        ("P4", OK, [Final("a", "plain", "succeeded", 2, True)]),
        ("P4", [*OK, Event("started", "a", "plain", 3.0, 3, "w2")], [Final("a", "plain", "succeeded", 3, True)]),
        ("P5", TWO_AT_ONCE, [Final(id, "limited", "failed", 0, True) for id in "ab"]),
        ("P9", LOST, [Final("a", "plain", "succeeded", 2, True, 9.0)]),
        ("P10", OK, [Final("a", "plain", "succeeded", 3, True)] * 2),
    ],
)  # fmt: skip
def test_each_promise_that_is_broken_is_found(promise: str, events: list[Event], final: list[Final]) -> None:
    assert any(violation.startswith(promise) for violation in check(events, final, RULES, {"dead": 2.0}, healed_within=5.0))


async def sabotage(sql: Sql, function: str, good: str, bad: str) -> None:
    """Replace a part of a function in this database."""
    source = await sql.fetchval(
        "select pg_get_functiondef(oid) from pg_proc where proname = $1 and pronamespace = 'penstock'::regnamespace", function
    )
    assert good in source
    await sql.execute(source.replace(good, bad))


async def history_of_two_workers(sql: Sql) -> list[str]:
    """Two workers: the first loses its lease and settles late all the same; then both claim what is there."""
    clock = itertools.count(1)
    events: list[Event] = []
    await sql.execute("select penstock.create_job_type('plain', '{\"attempts\": 3}')")

    async def claim(worker: str) -> list[Any]:
        jobs = await sql.fetch("select id, attempts, lease from penstock.claim($1, '{plain}', 10)", worker)
        events.extend(Event("started", str(job["id"]), "plain", next(clock), job["attempts"], worker) for job in jobs)
        return list(jobs)

    async def settle(worker: str, job: Any) -> None:
        events.append(Event("ended", str(job["id"]), "plain", next(clock), job["attempts"], worker, "succeeded"))
        await sql.execute(
            "select penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint])",
            job["id"],
            job["attempts"],
            job["lease"],
        )

    id = await sql.fetchval("select penstock.enqueue('plain')")
    events.append(Event("enqueued", str(id), "plain", next(clock)))
    (first,) = await claim("w1")
    for job in await claim("w2"):  # finds nothing, unless the claim is broken
        await settle("w2", job)
    await sql.execute("update penstock.leases set expires_at = now() - interval '1 s'")
    await sql.execute("select penstock.recover()")
    second = await claim("w2")
    events.append(Event("ended", str(id), "plain", next(clock), first["attempts"], "w1", "failed"))
    await sql.execute(
        "select penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint])", id, first["attempts"], first["lease"]
    )
    for job in second:
        events.append(Event("ended", str(id), "plain", next(clock), job["attempts"], "w2", "failed"))
        await sql.execute(
            "select penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], '{failed-for-good}')",
            id, job["attempts"], job["lease"],
        )  # fmt: skip
    rows = await sql.fetch("select id, name, status, attempts, finished_at from penstock.find_jobs(array[$1::uuid])", id)
    final = [Final(str(r["id"]), r["name"], r["status"], r["attempts"], r["finished_at"] is not None) for r in rows]
    return check(events, final, RULES, {})


async def test_the_real_protocol_passes(sql: Sql) -> None:
    assert await history_of_two_workers(sql) == []


async def test_a_claim_that_takes_running_jobs_is_found(sql: Sql) -> None:
    await sabotage(sql, "claim", "and ready.status = 'queued'", "")
    assert any(violation.startswith("P4") for violation in await history_of_two_workers(sql))


async def test_a_settle_without_its_fence_is_found(sql: Sql) -> None:
    await sabotage(sql, "settle", "and job.attempts = given.attempts", "")
    await sabotage(sql, "settle", "and (given.lease is null or job.lease = given.lease)", "")
    assert any(violation.startswith("P4") for violation in await history_of_two_workers(sql))
