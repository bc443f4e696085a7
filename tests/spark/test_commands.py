"""The commands, as somebody types them: in this process, on the tests' session."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Ask = Callable[..., list[Any]]


@pytest.fixture
def penstock(spark: SparkSession, url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", url)

    def penstock(*arguments: str) -> str:
        done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    return penstock


def test_history_runs_reports_and_finds(penstock: Callable[..., str], ask: Ask, archive: Any, tmp_path: Path) -> None:
    archive(30, "mail", key="acme")
    archive(5, "mail", "failed")
    assert "35 jobs in 1 batches" in penstock("history", "run", "--lake", str(tmp_path / "lake"))
    # The lake is where it is: nobody has to say it again.
    assert "0 jobs in 0 batches" in penstock("history", "run")
    report = json.loads(penstock("history", "report", "--json"))
    (mail,) = report["types"]
    assert (mail["name"], mail["succeeded"], mail["failed"]) == ("mail", 30, 5)
    assert report["keys"] == [["acme", 30]]
    shown = penstock("history", "report", "--plots", str(tmp_path / "plots"))
    assert "Failed attempts by cause" in shown and "ValueError" in shown
    page = (tmp_path / "plots" / "report.html").read_text("utf-8")
    assert "Jobs finished in a minute" in page
    assert "no <n> in <path>" in penstock("history", "failures")
    assert "35" in penstock("history", "status")


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
