"""Streams keep their promises while consumers are killed, frozen and cut off, and the server crashes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.streams_chaos import run_streams

SECONDS = float(os.environ.get("CHAOS_SECONDS", "20"))


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("held", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["server_crash", "open_transaction"])
async def test_promises_of_streams_hold(tmp_path: Path, held: bool) -> None:
    """With a transaction that stays open the server does not crash, and vacuum removes nothing that died during the run."""
    result = await run_streams(tmp_path, SECONDS, held=held)
    print(result)
    assert result.violations == [], "\n".join(result.violations[:20])
    assert result.killed + result.frozen + result.cut >= 5
    assert result.cut > 0
    assert result.late > 0, "no transaction of a caller was committed"
    assert result.withdrawn > 0, "no transaction of a caller was rolled back"
