"""The benchmarks of workflows run, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-3000:]
    return done.stdout


@pytest.mark.soak
def test_groups_graphs_and_waiting_jobs_are_measured() -> None:
    shown = run("benchmarks", "--only", "workflows", "--jobs", "1000")
    for measure in ("drain of a group of 1,000", "to the claim of its then", "a graph of 100 jobs", "beside 10,000 waiting jobs"):
        assert measure in shown, shown


@pytest.mark.soak
def test_orders_of_three_steps_are_measured(tmp_path: Path) -> None:
    run("benchmarks.flows", "--systems", "penstock", "--share", "0.02", "--rounds", "1", "--results", str(tmp_path))
    measured = json.loads((tmp_path / "flows.json").read_text())["penstock"]
    assert measured["steps_per_s"] == pytest.approx(3 * measured["orders_per_s"])
    assert measured["orders_per_s"] > 0
