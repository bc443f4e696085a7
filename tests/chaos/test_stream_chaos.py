"""Streams keep their promises while consumers are killed, frozen and cut off, and the server crashes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.streams_chaos import run_streams

SECONDS = float(os.environ.get("CHAOS_SECONDS", "20"))


@pytest.mark.chaos
@pytest.mark.timeout(400)
async def test_promises_of_streams_hold(tmp_path: Path) -> None:
    result = await run_streams(tmp_path, SECONDS)
    print(result)
    assert result.violations == [], "\n".join(result.violations[:20])
    assert result.killed + result.frozen + result.cut >= 5
    assert result.cut > 0
