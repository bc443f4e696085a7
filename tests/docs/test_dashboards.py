"""The SQL dashboard: every query runs, with the rights of a reader."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

Sql: TypeAlias = "asyncpg.Connection[Any]"
DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / "penstock-sql.json").read_text())


def queries() -> dict[str, str]:
    return {panel["title"]: target["rawSql"] for panel in DASHBOARD["panels"] for target in panel["targets"]}


def as_sent(query: str) -> str:
    """The query as Grafana sends it, with its macros replaced."""
    for column in ("minute", "finished_at"):
        query = query.replace(f"$__timeFilter({column})", f"{column} between now() - interval '3 hours' and now()")
    assert "$" not in query, query
    return query


def test_the_dashboard_has_a_panel_for_each_query() -> None:
    assert len(queries()) == len(DASHBOARD["panels"]) >= 10


async def test_every_query_runs_as_a_reader(sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('mail'), penstock.enqueue('mail', '1', p_key => 'acme')")
    await sql.execute("select penstock.open_lake('lake', 'file:///nowhere'), penstock.create_stream('orders')")
    await sql.execute("select penstock.declare_consumer_group('orders', 'billing'), penstock.open_group('import')")
    await sql.execute(
        "insert into penstock.rollups (lake, name, minute, succeeded, failed, expired, cancelled, retries, delay_s, run_s,"
        " delay_p99, run_p99) values ('lake', 'mail', now(), 9, 1, 0, 0, 0, 1, 1, 0.5, 0.25)"
    )
    await sql.execute(
        "insert into penstock.archived_jobs (id, finished_at, created_at, run_after, status, attempt, max_attempts, priority,"
        " name, data, errors)"
        " values (gen_random_uuid(), now(), now(), now(), 'failed', 1, 1, 0, 'mail', '1', '[{\"type\": \"ValueError\"}]')"
    )
    role = f"grafana_{secrets.token_hex(4)}"
    await sql.execute(f"create role {role}")
    try:
        await sql.fetch("select penstock.grant_access($1, 'reader')", role)
        await sql.execute(f"set role {role}")
        found = {title: await sql.fetch(as_sent(query)) for title, query in queries().items()}
    finally:
        await sql.execute("reset role")
        await sql.fetch("select penstock.revoke_access($1)", role)
        await sql.execute(f"drop role {role}")
    # Nothing works and nothing is scheduled here; every other panel shows something.
    assert {title for title, rows in found.items() if not rows} == {"Workers", "Schedules"}
    assert [tuple(row)[1:] for row in found["Failed jobs by type (from the lake)"]] == [("mail", 1.0)]
    assert found["Jobs that failed last"][0]["error"] == "ValueError"


@pytest.mark.parametrize("name", ["penstock.json", "penstock-sql.json"])
def test_panels_lie_beside_each_other(name: str) -> None:
    panels = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / name).read_text())["panels"]
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"])
        for panel in panels
        for x in range(panel["gridPos"]["w"])
    ]  # fmt: skip
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
