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


async def test_a_job_that_another_transaction_has_locked_is_returned_and_the_others_are_noted(
    work: None, sql: Sql, url: str
) -> None:
    await sql.execute("select penstock.enqueue('work')")
    jobs = await sql.fetch("select id, lease from penstock.claim('w', array['work'], 2)")
    ids, leases = [job["id"] for job in jobs], [job["lease"] for job in jobs]
    report = "select * from penstock.report_progress($1, $2::bigint[], array['1', '2']::jsonb[], $3)"
    holder = await asyncpg.connect(url)
    try:
        async with holder.transaction():
            await holder.execute("select from penstock.queued_jobs where id = $1 for update", ids[0])
            assert [row[0] for row in await sql.fetch(report, ids, leases, False)] == [ids[0]]
            # What is held under another lease is another worker's: it is not to be told of again.
            assert await sql.fetch(report, ids, [lease + 100 for lease in leases], False) == []
        noted = "select id, progress #>> '{}' as progress from penstock.queued_jobs"
        assert {row["id"]: row["progress"] for row in await sql.fetch(noted)} == {ids[0]: None, ids[1]: "2"}
        assert await sql.fetch(report, ids, leases, True) == []
        assert {row["id"]: row["progress"] for row in await sql.fetch(noted)} == {ids[0]: "1", ids[1]: "2"}
    finally:
        await holder.close()


async def test_the_last_of_several_reports_of_one_job_counts(work: None, sql: Sql) -> None:
    held = await _claim(sql)
    await sql.execute(
        "select penstock.report_progress(array[$1::uuid, $1, $1], array[$2::bigint, $2, $2], array['1', '3', '2']::jsonb[])",
        held["id"],
        held["lease"],
    )
    assert await _progress(sql) == "2"


async def test_the_progress_of_many_jobs_looks_at_each_once(work: None, sql: Sql) -> None:
    await sql.execute("select count(*) from penstock.enqueue_many('work', array_fill('{}'::jsonb, array[999]))")
    jobs = await sql.fetch("select id, lease from penstock.claim('w', array['work'], 1000)")
    await sql.execute("set track_functions = 'all'")
    await sql.execute(
        "select count(*) from penstock.report_progress($1, $2::bigint[], array_fill('1'::jsonb, array[1000]))",
        [job["id"] for job in jobs],
        [job["lease"] for job in jobs],
    )
    assert await sql.fetchval("select count(*) from penstock.queued_jobs where progress = '1'") == 1000
    await sql.execute("select pg_stat_force_next_flush()")
    calls = await sql.fetchval("select calls from pg_stat_user_functions where funcname = 'lock_held_jobs'")
    assert calls == 1
