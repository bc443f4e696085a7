"""settle_attempts and its neighbours through plain SQL."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest

Sql: TypeAlias = "asyncpg.Connection[Any]"


@pytest.fixture(autouse=True)
async def ship(sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('ship', '{\"max_attempts\": 3, \"concurrency\": 10}')")
    await sql.execute("select penstock.create_job_type('mail', '{\"delivery_strategy\": \"at_most_once\"}')")


async def settle(sql: Sql, *callbacks: tuple[str, UUID, int, str]) -> list[str]:
    names, ids, left, outcomes = (list(column) for column in zip(*callbacks, strict=True))
    rows = await sql.fetch(
        "select outcome from penstock.settle_attempts($1, $2, $3::smallint[], $4) order by ordinal",
        names, ids, left, outcomes,
    )  # fmt: skip
    return [row["outcome"] for row in rows]


async def enqueue(sql: Sql, name: str = "ship", **options: Any) -> UUID:
    id: UUID = await sql.fetchval("select penstock.enqueue($1, p_unique_key => $2)", name, options.get("unique"))
    return id


async def status(sql: Sql, id: UUID) -> tuple[str, int]:
    row = await sql.fetchrow("select status, attempt from penstock.find_jobs(array[$1::uuid])", id)
    assert row is not None
    return row["status"], row["attempt"]


async def test_a_batch_with_every_outcome(sql: Sql) -> None:
    jobs = [await enqueue(sql) for _ in range(6)] + [await enqueue(sql, "mail")]
    await sql.fetch("select * from penstock.claim('w1', '{ship}', 4)")
    outcomes = await settle(
        sql,
        ("ship", jobs[0], 3, "succeeded"),
        ("ship", jobs[1], 3, "failed"),
        ("ship", jobs[2], 3, "failed-for-good"),
        ("ship", jobs[3], 2, "succeeded"),
        ("ship", jobs[4], 3, "failed"),
        ("mail", jobs[5], 3, "succeeded"),
        ("mail", jobs[6], 1, "failed"),
        ("ship", uuid4(), 3, "succeeded"),
    )
    assert outcomes == ["succeeded", "retried", "failed", "stale", "retried", "unknown", "failed", "unknown"]
    assert [await status(sql, job) for job in jobs] == [
        ("succeeded", 1),
        ("queued", 2),
        ("failed", 1),
        ("in-progress", 1),
        ("queued", 2),
        ("queued", 1),
        ("failed", 1),
    ]
    assert await sql.fetchval("select sum(open_jobs) from penstock.leases") == 1


async def test_each_that_was_claimed_is_settled_with_its_times(sql: Sql) -> None:
    claimed = await enqueue(sql)
    await sql.execute(
        "update penstock.queued_jobs set created_at = now() - interval '1 hour', run_after = now() - interval '100 s'"
    )
    await sql.fetch("select * from penstock.claim('w1', '{ship}', 1)")
    await sql.execute("update penstock.leases set started_at = now() - interval '40 s'")
    waiting = await enqueue(sql)
    rows = await sql.fetch(
        "select wait_s, run_s from penstock.settle_attempts('{ship,ship,ship}', $1, '{3,3,3}', '{succeeded,failed,failed}') "
        "order by ordinal",
        [waiting, claimed, uuid4()],
    )
    assert [rows[0]["wait_s"], rows[0]["run_s"], rows[2]["wait_s"]] == [None] * 3
    assert (rows[1]["wait_s"], rows[1]["run_s"]) == (pytest.approx(60, abs=5), pytest.approx(40, abs=5))


async def test_the_holder_is_told_once_for_a_batch(sql: Sql) -> None:
    heard: list[str] = []
    await sql.add_listener("penstock_w1", lambda *message: heard.append(str(message[3])))
    jobs = [await enqueue(sql) for _ in range(3)]
    await sql.fetch("select * from penstock.claim('w1', '{ship}', 2)")
    await settle(sql, *(("ship", job, 3, "succeeded") for job in jobs))
    await sql.fetchval("select 1")
    (payload,) = heard
    word, *told = payload.split()
    assert (word, sorted(told)) == ("settled", sorted(f"{job}:1" for job in jobs[:2]))


async def test_a_queued_job_with_a_unique_key_coalesces_again_after_a_failure(sql: Sql) -> None:
    job = await enqueue(sql, unique="acme")
    assert await settle(sql, ("ship", job, 3, "failed")) == ["retried"]
    assert await enqueue(sql, unique="acme") == job


async def test_a_callback_and_a_settle_at_the_same_time_end_the_job_once(sql: Sql, url: str) -> None:
    other = await asyncpg.connect(url)
    try:
        for _ in range(20):
            job = await enqueue(sql)
            (claimed,) = await sql.fetch("select * from penstock.claim('w1', '{ship}', 1)")
            direct = other.fetch(
                "select * from penstock.settle(array[$1::uuid], array[1::smallint], array[$2::bigint])", job, claimed["lease"]
            )
            (outcome,), rows = await asyncio.gather(settle(sql, ("ship", job, 3, "succeeded")), direct)
            assert (outcome, [row["outcome"] for row in rows]) in [("succeeded", ["stale"]), ("unknown", [])]
            assert await sql.fetchval("select count(*) from penstock.archived_jobs where id = $1", job) == 1
        assert await sql.fetchval("select count(*) from penstock.leases") == 0
    finally:
        await other.close()


async def test_an_unknown_outcome_is_refused(sql: Sql) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await settle(sql, ("ship", uuid4(), 3, "done"))
    assert refused.value.sqlstate == "PS400"


async def test_jobs_that_are_left_to_their_callbacks_survive_their_worker(sql: Sql) -> None:
    jobs = [await enqueue(sql) for _ in range(3)]
    await sql.execute("select penstock.register_worker('w1', '{ship}')")
    claimed = await sql.fetch("select id, attempt, lease from penstock.claim('w1', '{ship}', 3)")
    held = [job for job in claimed if job["id"] != jobs[2]]
    left = await sql.fetchval(
        "select penstock.leave_to_callback($1, $2::smallint[], $3::bigint[])",
        [job["id"] for job in held], [job["attempt"] for job in held], [job["lease"] for job in held],
    )  # fmt: skip
    assert left == 2
    await sql.execute("select penstock.unregister_worker('w1')")
    assert [await status(sql, job) for job in jobs] == [("in-progress", 1), ("in-progress", 1), ("queued", 2)]
    assert await settle(sql, ("ship", jobs[0], 3, "succeeded")) == ["succeeded"]
    await sql.execute("update penstock.leases set expires_at = now() - interval '1 s'")
    await sql.execute("select penstock.recover()")
    assert await status(sql, jobs[1]) == ("queued", 2)


async def test_a_put_returns_the_jobs_as_they_are_stored(sql: Sql) -> None:
    first, second = uuid4(), uuid4()
    await sql.execute("select penstock.enqueue('ship', '{\"n\": 0}', $1)", first)
    rows = await sql.fetch(
        "select outcome, id, name, attempt, status, data from penstock.put_jobs('ship', $1::jsonb[], $2)",
        ['{"n": 1}', '{"n": 2}', '{"n": 3}'],
        [first, second, second],
    )
    assert [tuple(row) for row in rows] == [
        ("duplicate", first, "ship", 1, "queued", '{"n": 0}'),
        ("queued", second, "ship", 1, "queued", None),
        ("duplicate", second, "ship", 1, "queued", '{"n": 2}'),
    ]
