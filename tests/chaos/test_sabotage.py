"""Each guarantee is removed from the running system once: the checkers must name the broken promise under the ordinary workload.

Chance decides whether a run shows a sabotage, so each sabotage gets several runs. A run ends as soon as the checkers find it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.testing import TemporaryDatabases
from tests.chaos.pools_chaos import run_pools
from tests.chaos.queue_chaos import run_queue
from tests.chaos.sabotage import POOLS, QUEUE, STREAMS, Sabotage
from tests.chaos.seeking import UNFINISHED, found_out
from tests.chaos.streams_chaos import run_streams

SECONDS = float(os.environ.get("CHAOS_SECONDS", "40"))
CONTROLLED_S = 20.0
ANY = "P[0-9]"
QUICK = {"commit before handling"}


def table(sabotages: dict[str, Sabotage]) -> list[object]:
    """The parameters; most take longer than a test run has time for."""
    marks = [pytest.mark.chaos, pytest.mark.timeout(900)]
    return [
        pytest.param(sabotage, id=name, marks=marks if name in QUICK else [*marks, pytest.mark.soak])
        for name, sabotage in sabotages.items()
    ]


@pytest.mark.parametrize("sabotage", table(QUEUE))
async def test_a_queue_without_a_guarantee_is_found_out(tmp_path: Path, sabotage: Sabotage) -> None:
    async def run(folder: Path) -> Sequence[str]:
        result = await run_queue(
            folder, SECONDS, prepare=sabotage.prepare, sabotage=sabotage.worker, stands_s=10, sought=sabotage.expected,
            long=sabotage.long,
        )  # fmt: skip
        return result.violations

    await found_out(sabotage.expected, tmp_path, run)


@pytest.mark.parametrize("sabotage", table(POOLS))
async def test_a_pool_without_a_guarantee_is_found_out(databases: TemporaryDatabases, tmp_path: Path, sabotage: Sabotage) -> None:
    async def run(folder: Path) -> Sequence[str]:
        with databases.database() as url:
            result = await run_pools(
                url, folder, SECONDS, prepare=sabotage.prepare, sabotage=sabotage.worker, stands_s=10,
                sought=sabotage.expected, long=sabotage.long,
            )  # fmt: skip
            return result.violations

    await found_out(sabotage.expected, tmp_path, run)


@pytest.mark.parametrize("sabotage", table(STREAMS))
async def test_a_stream_without_a_guarantee_is_found_out(tmp_path: Path, sabotage: Sabotage) -> None:
    async def run(folder: Path) -> Sequence[str]:
        result = await run_streams(
            folder, SECONDS, prepare=sabotage.prepare, sabotage=sabotage.worker, stands_s=10, sought=sabotage.expected,
            long=sabotage.long,
        )  # fmt: skip
        return result.violations

    await found_out(sabotage.expected, tmp_path, run)


# With all guarantees in place the same runs have no violation at any moment.


@pytest.mark.chaos
@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_queue_with_all_its_guarantees_is_not_found_out(tmp_path: Path) -> None:
    violations = (await run_queue(tmp_path, CONTROLLED_S, sought=ANY, long=True)).violations
    assert violations == [], "\n".join(violations[:50])


@pytest.mark.chaos
@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_pool_with_all_its_guarantees_is_not_found_out(databases: TemporaryDatabases, tmp_path: Path) -> None:
    with databases.database() as url:
        violations = (await run_pools(url, tmp_path, CONTROLLED_S, sought=ANY, long=True)).violations
    assert violations == [], "\n".join(violations[:50])


@pytest.mark.chaos
@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_stream_with_all_its_guarantees_is_not_found_out(tmp_path: Path) -> None:
    violations = (await run_streams(tmp_path, CONTROLLED_S, sought=ANY, long=True)).violations
    # The long batches of this run take longer than the ordinary limit.
    violations = [each for each in violations if not UNFINISHED.search(each)]
    assert violations == [], "\n".join(violations[:50])
