"""Keys keep their order, on one worker at a time, through faults of workers, while a long transaction stays open."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.late import held_snapshot
from tests.chaos.pools_chaos import run_pools

SECONDS = 40.0


@pytest.mark.chaos
async def test_keys_keep_their_order_whatever_happens_to_workers(url: str, tmp_path: Path) -> None:
    # Open from before the first job until after the last one.
    async with held_snapshot(url):
        result = await run_pools(url, tmp_path, SECONDS)
    assert len(result.final) > 0
    assert result.violations == [], "\n".join([*result.violations[:20], *map(str, result.gone)])
    assert result.codes == [0] * 4
    assert result.left == 0, "leases or members are left"
    failed = sum(row.status == "failed" for row in result.final)
    print(f"{len(result.final)} jobs of {result.keys} keys, {result.what_happened}, failed {failed}")
