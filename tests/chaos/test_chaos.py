"""A queue keeps its promises while workers are killed and suspended and the server crashes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.queue_chaos import WORKERS, run_queue
from tests.checker.jobs import healing

SECONDS = float(os.environ.get("CHAOS_SECONDS", "25"))


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("held", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["server_crash", "open_transaction"])
async def test_promises_hold_while_workers_and_the_server_are_killed(tmp_path: Path, held: bool) -> None:
    """With a transaction that stays open the server does not crash, and vacuum removes nothing that died during the run."""
    result = await run_queue(tmp_path, SECONDS, held=held)
    assert result.violations == [], "\n".join([*result.violations[:20], *map(str, result.history.gone)])
    assert result.codes == [0] * WORKERS
    statuses = {row.status for row in result.final}
    assert {"succeeded", "failed", "expired", "cancelled"} <= statuses, f"too few kinds of outcomes: {statuses}"
    assert result.killed >= 3
    assert result.stopped >= 1, "no worker was stopped for long"
    assert result.leases == 0
    assert result.overtaken >= 1, "no job of a transaction that committed late had been overtaken"
    healed = sorted(healing(result.history).values())
    assert healed, "no worker was killed while it ran jobs"
    print(f"{len(result.final)} jobs, {result.killed} workers killed, {result.stopped} stopped; {len(healed)} jobs were healed")
    print(f"within {healed[len(healed) // 2]:.1f} s in the middle, {healed[-1]:.1f} s at most")
