"""Runs of workflows on the command line: a list, a tree with times, and a retry."""

from __future__ import annotations

import json
from typing import Any

import asyncpg

from penstock import Fail, Job, Penstock
from penstock.testing import run_due_jobs
from tests.command_line import penstock


async def test_a_run_is_shown_as_a_tree_and_retried(app: Penstock, url: str, sql: asyncpg.Connection[Any]) -> None:
    failing = {"transform"}

    @app.job("step", max_attempts=1)
    async def step(job: Job[str]) -> None:
        if job.data in failing:
            raise Fail("no rows")

    graph = app.workflow("nightly")
    extract = graph.add(step, "extract", step="extract")
    transform = graph.add(step, "transform", after=extract, step="transform")
    images = graph.add_many(step, ["1", "2", "3"], after=extract, step="images")
    graph.add(step, "publish", after=[transform, images], step="publish")
    await graph.start(id="nightly-1")
    await run_due_jobs(app)
    lines = penstock(url, "workflows", "show", "nightly-1").stdout.splitlines()
    assert lines[0].startswith("nightly-1  nightly  failed, started ")
    assert [line.lstrip("│├└─ ").split("  ")[:2] for line in lines[1:]] == [
        ["extract", "succeeded"],
        ["transform", "failed"],
        ["images", "succeeded"],
        ["publish", "cancelled (dependency)"],
    ]
    assert "no rows" in lines[2] and "3 of 3 jobs" in lines[3] and "also after transform" in lines[4]
    assert "nightly-1" in penstock(url, "workflows", "runs", "nightly").stdout
    failing.clear()
    assert "started: nightly-1~2, which shares 2 of 4 steps" in penstock(url, "workflows", "retry", "nightly-1").stdout
    assert ", retried by nightly-1~2" in penstock(url, "workflows", "show", "nightly-1").stdout
    await run_due_jobs(app)
    shown = json.loads(penstock(url, "workflows", "show", "nightly-1~2", "--json").stdout)
    assert (shown["status"], [one["status"] for one in shown["steps"]]) == ("succeeded", ["succeeded"] * 4)
    retried = penstock(url, "workflows", "retry", "nightly-1~2", "--from", "absent")
    assert (retried.returncode, "no step absent" in retried.stderr) == (1, True)


def test_a_schedule_of_the_history_with_a_wrong_expression_is_refused(url: str) -> None:
    refused = penstock(url, "history", "schedule", "every morning")
    assert refused.returncode != 0 and "every morning" in refused.stderr
