"""The nightly pipeline of examples/nightly, and the history pipeline as a schedule: Spark jobs from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[2]
# Both start a JVM for each run.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(500)]


def test_the_nightly_pipeline_of_a_day_ends_with_its_report(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.nightly", "2013-01-02"], env={**os.environ, "PENSTOCK_DATABASE_URL": url}, cwd=ROOT,
        capture_output=True, text=True, timeout=450, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-3000:]
    assert "nightly-2013-01-02: succeeded" in done.stdout
    assert "2013-01-02: 943 flights of 14 carriers" in done.stdout
    assert "minutes late on average" in done.stdout


def test_a_schedule_brings_finished_jobs_into_the_lake(
    url: str, ask: Callable[..., list[Any]], archive: Callable[..., None], tmp_path: Path
) -> None:
    archive(40)
    command = [
        sys.executable,
        "-m",
        "penstock",
        "history",
        "schedule",
        "* * * * * *",
        "--lake",
        str(tmp_path / "lake"),
        "--master",
        "local[1]",
    ]
    running = subprocess.Popen(command, env={**os.environ, "PENSTOCK_DATABASE_URL": url}, start_new_session=True)
    try:
        kept = "select coalesce(sum(rows), 0)::integer as jobs from penstock.lake_files where kind = 'jobs'"
        until(lambda: ask(kept)[0]["jobs"] >= 40, "the jobs in the lake", timeout=300)
        until(
            lambda: ask("select 1 from penstock.archived_jobs where name = 'history-main' and status = 'succeeded' limit 1"),
            "the end of a run", timeout=120,
        )  # fmt: skip
    finally:
        running.terminate()
        running.wait(60)
