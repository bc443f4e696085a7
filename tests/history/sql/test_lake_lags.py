"""How far lakes are behind the archive."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

from tests.postgres.plans import explain, nodes

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def archive(sql: Sql, jobs: int, ago_s: int) -> None:
    """Archive rows of jobs that finished so long ago."""
    await sql.execute(
        "insert into penstock.archived_jobs (id, finished_at, created_at, run_after, status, attempt, max_attempts, priority,"
        " name, data) select gen_random_uuid(), now() - $2 * interval '1 second', now(), now(), 'succeeded', 1, 5, 0, 't', '{}'"
        " from generate_series(1, $1::integer)",
        jobs,
        ago_s,
    )


async def behind(sql: Sql) -> dict[str, float]:
    return {row["lake"]: row["behind_s"] for row in await sql.fetch("select * from penstock.lake_lags()")}


async def take_all(sql: Sql, lake: str, batch: int) -> None:
    await sql.execute(
        "select penstock.commit_lake_batch($1, $2, pg_current_snapshot()::text, 1, '[]', '[]', '[]', '[]')", lake, batch
    )


async def test_a_lake_is_behind_by_the_age_of_the_first_job_that_it_lacks(sql: Sql) -> None:
    await sql.execute("select penstock.open_lake('a', 'file:///a'), penstock.open_lake('b', 'file:///b')")
    assert await behind(sql) == {"a": 0, "b": 0}
    await archive(sql, 10, 100)
    await take_all(sql, "b", 0)
    await archive(sql, 10, 50)
    assert await behind(sql) == {"a": pytest.approx(100, abs=45), "b": pytest.approx(50, abs=45)}
    # What an idle system finished last is in the lake: however long ago that was, nothing is missing.
    await take_all(sql, "a", 0)
    assert (await behind(sql))["a"] == 0


@pytest.mark.parametrize("statistics", ["of an empty archive", "fresh"])
async def test_the_first_job_that_a_lake_lacks_is_found_by_the_index(sql: Sql, statistics: str) -> None:
    if statistics == "of an empty archive":
        await sql.execute("analyze penstock.archived_jobs")
    await sql.execute("select penstock.open_lake('a', 'file:///a')")
    await archive(sql, 2_000, 100)
    await take_all(sql, "a", 0)
    await archive(sql, 2_000, 100)
    if statistics == "fresh":
        await sql.execute("analyze penstock.archived_jobs")
    source = await sql.fetchval("select prosrc from pg_proc where proname = 'lake_lags'")
    plan = await explain(sql, "lake_lags", source.strip(), "order by lakes.name", {})
    read = [node for node in nodes(plan) if str(node.get("Relation Name", "")).startswith("archived_jobs")]
    assert {node["Node Type"] for node in read} == {"Index Scan"}, plan
    assert sum(node["Actual Rows"] for node in read) <= 1
