"""The import with a report of examples/imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("lines", [3_000, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(400)])])
def test_an_import_ends_with_one_report(url: str, lines: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.imports", str(lines), "orders-7"],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url}, cwd=ROOT, capture_output=True, text=True, timeout=350, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-3000:]
    assert f"orders-7: {lines - lines // 1_000:,} lines imported" in done.stdout
    assert f"{lines // 1_000:,} refused" in done.stdout
    assert "has the amount 'much'" in done.stdout
