"""Runs of workflows in commit order: what lies between two positions, and what prune keeps until a lake has it."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

Sql: TypeAlias = "asyncpg.Connection[Any]"


@pytest.fixture
async def typed(sql: Sql) -> Sql:
    await sql.execute("select penstock.create_job_type('step')")
    return sql


async def start(sql: Sql, run: str) -> None:
    await sql.execute("""select penstock.start_workflow('nightly', $1, '[{"name": "a", "type": "step"}]')""", run)


async def cancel(sql: Sql) -> None:
    await sql.execute(
        "select penstock.cancel(step.job) from penstock.graph_steps as step join penstock.queued_jobs as job on job.id = step.job"
    )


async def resolve(sql: Sql) -> None:
    while await sql.fetchval("select penstock.resolve_workflows()"):
        pass


async def end(sql: Sql, *runs: str) -> None:
    """Start runs, and end each in a transaction of its own."""
    for run in runs:
        await start(sql, run)
        await cancel(sql)
        await resolve(sql)


async def now(sql: Sql) -> str:
    return str(await sql.fetchval("select pg_current_snapshot()::text"))


async def between(sql: Sql, seen: str, until: str) -> list[str]:
    rows = await sql.fetch("select name from penstock.ended_runs($1, $2::text::pg_snapshot)", seen, until)
    return [row["name"] for row in rows]


async def counted(sql: Sql, seen: str, until: str) -> int:
    """How many jobs a reader that goes on from one position to another is told to expect."""
    return int(
        await sql.fetchval(
            "select coalesce(sum(jobs), 0) from penstock.archive_counts("
            "'{}', pg_snapshot_xmax($1::text::pg_snapshot), pg_snapshot_xmax($2::text::pg_snapshot), '{}', null, null, 100)",
            seen,
            until,
        )
    )


async def test_a_run_lies_between_the_positions_around_its_end(typed: Sql) -> None:
    begin = await now(typed)
    await end(typed, "one", "two")
    middle = await now(typed)
    await end(typed, "three")
    await start(typed, "open")
    last = await now(typed)
    assert await between(typed, "", last) == ["one", "two", "three"]
    assert await between(typed, begin, middle) == ["one", "two"]
    assert await between(typed, middle, last) == ["three"]
    assert await between(typed, last, last) == []


async def test_a_run_whose_end_commits_late_is_in_the_next_batch(typed: Sql, url: str) -> None:
    await start(typed, "late")
    await cancel(typed)
    other = await asyncpg.connect(url)
    try:
        ending = other.transaction()
        await ending.start()
        while await other.fetchval("select penstock.resolve_workflows()"):
            pass
        await typed.execute("select penstock.create_job_type('another')")
        seen = await now(typed)
        assert await between(typed, "", seen) == []
        await ending.commit()
    finally:
        await other.close()
    assert await between(typed, seen, await now(typed)) == ["late"]


async def test_a_transaction_that_only_ends_runs_counts_as_one_job(typed: Sql) -> None:
    await start(typed, "one")
    await start(typed, "two")
    await cancel(typed)
    before = await now(typed)
    await resolve(typed)
    assert await typed.fetchval("select count(distinct ended_xid) from penstock.job_groups") == 1
    assert await counted(typed, before, await now(typed)) == 1
    assert await typed.fetchval("select count(*) from penstock.job_groups where ended_xid is null") == 0


async def test_prune_keeps_a_run_until_the_lakes_that_guard_have_it(typed: Sql) -> None:
    await end(typed, "kept")
    await typed.execute("select penstock.open_lake('main', 'file:///main')")
    forget = "select penstock.forget_groups(now() + interval '1 minute')"
    await typed.execute(forget)
    assert await typed.fetchval("select count(*) from penstock.job_groups") == 1, "the lake is to have it"
    commit = "select penstock.commit_lake_batch('main', 0, pg_current_snapshot()::text, 1, '[]', '[]', '[]', '[]')"
    await typed.execute(commit)
    await end(typed, "later")
    await typed.execute(forget)
    assert await typed.fetchval("select array_agg(name) from penstock.job_groups") == ["later"]
    await typed.execute("update penstock.lakes set guards = false")
    await typed.execute(forget)
    assert await typed.fetchval("select count(*) from penstock.job_groups") == 0
