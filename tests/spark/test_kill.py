"""The driver of a query is killed with SIGKILL, again and again, at each step; every job counts once in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.lake import Lake

Ask = Callable[..., list[Any]]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def drive(kind: str, url: str, folder: Path, step: str) -> int:
    """Run a driver to its end, and end the JVM that a killed one leaves behind."""
    log = folder / f"{kind} {step}.log"
    with log.open("wb") as said:
        # Into a file: the JVM of a killed driver would hold a pipe open.
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("driver.py")), kind, url, str(folder), step],
            stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
    try:
        process.wait(timeout=240)
    finally:
        # Its session is its own: what is left of it are its JVM and that one's Python workers.
        left = [p for p in psutil.process_iter() if _session(p.pid) == process.pid]
        for orphan in left:
            with suppress(psutil.NoSuchProcess):
                orphan.kill()
        psutil.wait_procs(left, timeout=30)
    expected = 0 if step == "none" else -signal.SIGKILL
    assert process.returncode == expected, log.read_text()[-3000:]
    return process.returncode


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return -1


def test_a_sink_whose_driver_is_killed_enqueues_every_row_once(url: str, ask: Ask, tmp_path: Path) -> None:
    ask("select penstock.create_job_type('t')")
    (tmp_path / "source").mkdir()
    for batch in range(3):
        (tmp_path / "source" / f"{batch}.json").write_text("\n".join(f'{{"n": {batch * 20 + n}}}' for n in range(20)))
    for step in ("before the commit", "after the commit", "in a task"):
        try:
            drive("sink", url, tmp_path, step)
        except AssertionError:
            # The step lies behind a kill: a driver that never came to it ran to its end.
            if step != "in a task":
                raise
    drive("sink", url, tmp_path, "none")
    found = sorted(row["n"] for row in ask("select (data ->> 'n')::integer as n from penstock.queued_jobs"))
    assert found == list(range(60))


def test_a_pipeline_whose_driver_is_killed_at_every_step_has_every_job_once(
    url: str, ask: Ask, archive: Any, tmp_path: Path
) -> None:
    for jobs in (30, 30, 25, 30, 20):
        archive(jobs)
    for step in ("jobs written", "rollups written", "files moved", "committed"):
        drive("history", url, tmp_path, step)
    drive("history", url, tmp_path, "none")
    lake = Lake("main", str(tmp_path / "lake"))
    paths = [row["path"] for row in ask("select path from penstock.lake_files where kind = 'jobs'")]
    ids = lake.table(paths, columns=["id"])["id"].to_pylist()
    assert sorted(ids) == sorted(str(row["id"]) for row in ask("select id from penstock.archived_jobs"))
    assert ask("select sum(succeeded)::integer as jobs from penstock.rollups")[0]["jobs"] == 135
