"""The main job as `make run` starts it, with few flights: jobs, stream, lake and report, on an embedded server of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNT = 2_000


@pytest.mark.soak
def test_the_flights_run_from_the_first_job_to_the_drawn_report(tmp_path: Path) -> None:
    program = f"import uvloop; from examples.flights.__main__ import main; uvloop.run(main({COUNT}))"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PG", "DATABASE_"))}
    given = {**kept, "PENSTOCK_DATA_DIR": str(tmp_path / "data"), "COLUMNS": "160", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=given, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    said = done.stdout
    assert done.returncode == 0, f"{said}\n{done.stderr}"[-5000:]
    assert f"{COUNT:,} departures enqueued" in said
    failed = number(r"([\d,]+) departures failed for good", said)
    assert 0 < failed < COUNT / 5, "flights that were cancelled fail, and no others"
    assert "legs, each once" in said
    assert "penstock dashboard" in said and "make demo" in said, "it ends by saying where to look"
    summaries = number(r"coalesced into ([\d,]+) runs", said)
    assert number(r"([\d,]+) finished jobs into the lake", said) >= COUNT + summaries
    carriers = said[said.index("Carriers") :]
    counted = [row.split() for row in carriers.splitlines() if re.match(r"[A-Z0-9]{2} +[\d,]+ ", row)]
    assert sum(int(row[1].replace(",", "")) for row in counted) == COUNT
    assert sum(int(row[2].replace(",", "")) for row in counted) == failed
    drawn = re.search(r"drawn: (.+)", said)
    assert drawn is not None
    assert [path for path in drawn[1].split(", ") if not Path(path).stat().st_size] == []


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, (pattern, text)
    return int(found[1].replace(",", ""))
