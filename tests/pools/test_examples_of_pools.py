"""The examples of pools run, and print what they should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ("fibonacci", "fib(90)=2880067194370816120"),
        ("tenants", "four tenants, one worker"),
        ("routing", "ada says: uoy era erehw, by south"),
    ],
)
def test_example(url: str, example: str, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"examples.pools.{example}"],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert expected in done.stdout
