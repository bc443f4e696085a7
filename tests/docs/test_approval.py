"""The order with approval of examples/approval."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            [],
            [
                "grace@example.com approves\n",
                "alan@example.com approves, and is not the first",
                "attempt 2: approved by grace@example.com: label of front, label of back",
                "gather labels: ['label of front'",
            ],
        ),
        (["--too-late"], ["attempt 2: no approval came in time: 4200 cents go back", "wait   approved: timed out", "too late"]),
    ],
)
def test_an_order_is_paid_once_and_waits_for_its_approval(url: str, options: list[str], said: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.approval", *options], env={**os.environ, "PENSTOCK_DATABASE_URL": url}, cwd=ROOT,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-3000:]
    for line in [*said, "  1 payment"]:
        assert line in done.stdout
