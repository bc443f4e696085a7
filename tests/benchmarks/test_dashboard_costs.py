"""The measurement of an open page of the dashboard runs, in small."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
def test_each_page_is_opened_and_measured() -> None:
    options = ["--archived", "2000", "--queued", "200", "--seconds", "2", "--pages", ",failures"]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.dashboard", *options], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    assert "2,000 finished and 200 waiting jobs" in ran.stdout
    assert len(re.findall(r"^(overview|failures) .* of a core: database .* bytes/s$", ran.stdout, re.MULTILINE)) == 2
