"""The commands, with their arguments as typed: in this process, on the session of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.errors import NotFound
from penstock.spark.history import read_lake
from tests.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Ask = Callable[..., list[Any]]


@pytest.fixture
def penstock(spark: SparkSession, url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", url)

    def penstock(*arguments: str) -> str:
        if arguments[:2] == ("history", "run"):
            # It gives way to the other processes of the machine. Here it runs in the process of the tests, which never gets back
            # what it gives, and whose later tests start Spark of their own.
            arguments += ("--nice", "0")
        done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    return penstock


async def test_a_history_run_gives_way_to_the_other_processes_of_the_machine(url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "history", "run", "--lake", str(tmp_path / "lake")]
    with subprocess.Popen(command, env={**os.environ, "PENSTOCK_DATABASE_URL": url}) as process:
        try:
            running = psutil.Process(process.pid)
            await eventually(lambda: running.nice() == 19, "the niceness")
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.soak
def test_history_runs_reports_and_finds(
    penstock: Callable[..., str], spark: SparkSession, url: str, archive: Any, tmp_path: Path
) -> None:
    archive(30, "mail", key="acme")
    archive(5, "mail", "failed")
    assert "35 jobs in 1 batches" in penstock("history", "run", "--delta", "--lake", str(tmp_path / "lake"))
    # The database knows the place and the format of the lake: a later run need not repeat them.
    assert "0 jobs in 0 batches" in penstock("history", "run")
    archive(2, "mail")
    assert "2 jobs in 1 batches" in penstock("history", "run")
    latest, before, *_ = json.loads(penstock("history", "versions", "--json"))
    assert (latest["batch"], latest["files"], before["batch"], before["files"]) == (1, 2, 0, 1)
    assert [read_lake(spark, url, version=v["version"]).count() for v in (latest, before)] == [37, 35]
    assert "0 files deleted" in penstock("history", "vacuum")
    report = json.loads(penstock("history", "report", "--json"))
    (mail,) = report["types"]
    assert (mail["name"], mail["succeeded"], mail["failed"]) == ("mail", 32, 5)
    assert report["keys"] == [["acme", 30]]
    shown = penstock("history", "report", "--plots", str(tmp_path / "plots"))
    assert "Failed attempts by cause" in shown and "ValueError" in shown
    page = (tmp_path / "plots" / "report.html").read_text("utf-8")
    assert "Jobs finished in a minute" in page
    assert "no <n> in <path>" in penstock("history", "failures")
    assert "37" in penstock("history", "status")


def test_bulk_work_from_files_and_back(penstock: Callable[..., str], ask: Ask, archive: Any, tmp_path: Path) -> None:
    archive(3, "t")
    (tmp_path / "in.json").write_text("\n".join(f'{{"n": {n}, "who": "acme"}}' for n in range(20)))
    source = ("bulk", "enqueue", "--type", "t", "--from", "json", "--key", "who", str(tmp_path / "in.json"))
    assert "20 jobs of type t" in penstock(*source, "--dry-run")
    assert ask("select count(*) from penstock.queued_jobs")[0]["count"] == 0
    for _ in range(2):
        penstock(*source, "--run", "march")
    assert ask("select count(*) from penstock.queued_jobs where key = 'acme'")[0]["count"] == 20
    penstock("bulk", "export", str(tmp_path / "out"), "--table", "archived_jobs", "--where", "name = 't'", "--format", "json")
    lines = [line for file in (tmp_path / "out").glob("*.json") for line in file.read_text().splitlines()]
    assert len(lines) == 3


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_bulk_work_for_a_type_that_is_not_there_is_refused_before_spark_starts(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", url)
    # There is no such file either, and no Spark is asked for it.
    command = ["bulk", "enqueue", "--type", "nope", "--from", "json", str(tmp_path / "nothing.json"), *more]
    refused = CliRunner().invoke(app, command).exception
    assert isinstance(refused, NotFound) and "no such job type: nope" in str(refused)
    assert "penstock types create nope" in str(refused.hint)


def test_workers_are_listed_and_only_those_of_a_fleet_are_drained(url: str, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", url)
    for worker in ("w1", "w2"):
        ask("select penstock.register_worker($1, '{t}', 'host-a', 7, 4)", worker)
    ask("select penstock.start_fleet('night', 'shop:app', 1)")
    ask("select penstock.serve_fleet('night', 'w2', 'host-a', '3.11')")

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["workers", *arguments])

    def listed() -> list[tuple[str, str | None, str]]:
        return [(one["id"], one["fleet"], one["state"]) for one in json.loads(run("--json").output)]

    assert listed() == [("w2", "night", "running"), ("w1", None, "running")]
    assert "host-a" in run().output
    assert json.loads(run("drain", "w2", "--json").output) == {"worker": "w2", "fleet": "night"}
    assert listed()[0] == ("w2", "night", "draining")
    assert ask("select penstock.serve_fleet('night', 'w2', 'host-a', '3.11') as stops")[0]["stops"] is True
    assert "SIGTERM" in str(run("drain", "w1").exception.hint)
    assert "no such worker" in str(run("drain", "w9").exception)
