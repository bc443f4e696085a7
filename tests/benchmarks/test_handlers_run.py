"""The comparison of handlers runs, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("part", "sampled"),
    [
        ("handlers", {}),
        ("observed", {"traces, 1 in 100 sampled": 3, "traces, all sampled": 300}),
        ("busy", {"traces, 1 in 100 sampled": 1, "traces, all sampled": 15}),
    ],
)
def test_each_variant_drains_its_jobs_and_exports_its_spans(tmp_path: Path, part: str, sampled: dict[str, int]) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.handlers",
        "--only",
        part,
        "--jobs",
        "300",
        "--rounds",
        "1",
        "--results",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    values = json.loads((tmp_path / "handlers.json").read_text())["values"][part]
    assert len(values) >= 5
    assert all(one["jobs_per_s"][0] > 0 and one["server_us"][0] >= 0 for one in values.values())
    assert {title: one["exported"][0] for title, one in values.items() if one["exported"][0]} == sampled
    assert (tmp_path / "handlers.md").read_text().count("\n|") >= len(values)
