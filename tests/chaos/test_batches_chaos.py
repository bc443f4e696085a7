"""Batch handlers whose processes are killed in the midst of a batch: each of its jobs ends once, with an outcome of its own."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from penstock import Penstock
from penstock.testing import TemporaryDatabases
from tests.chaos.restarted import Fleet
from tests.chaos.sabotage import Edit, Sabotage
from tests.chaos.seeking import found_out
from tests.checker.batches import Begun, Settled, check_batches
from tests.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

FAULTS = [*["kill"] * 8, *["fail"] * 60, *["final"] * 10]
JOBS = 300
TAKEN_OUT = {
    "lost attempts that are used up": Sabotage(
        r"P2: job \S+ which is to have succeeded, failed with .*WorkerLost",
        (Edit("end_attempts", r"max_attempts = job\.max_attempts \+ next\.lost,"),),
    ),
    "outcomes of other jobs": Sabotage(
        r"P2: job \S+ number \d+, attempt \d+, has the result",
        (Edit("settle", r"perform penstock\.ensure_archive\(moment\);", r"\g<0> p_details := p_details[2:] || p_details[1];"),),
    ),
    "success that is not archived": Sabotage(
        r"P2: job \S+ is archived 0 times",
        (
            Edit(
                "archive_succeeded",
                r"left join held as lease on lease\.id = settled\.lease",
                r"\g<0> where random() < 0.9",
            ),
        ),
    ),
}


async def run(url: str, folder: Path, name: str, sabotage: Sabotage | None = None) -> list[str]:
    """Run jobs of which some kill their process, and check them at the end."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    does: list[str | None] = [*FAULTS, *[None] * (JOBS - len(FAULTS))]
    random.Random(seed).shuffle(does)
    fleet = Fleet(url, folder / "history.jsonl", "batch_app")
    async with Penstock(url) as app:
        if sabotage is not None:
            await sabotage.prepare(app)
        database = await app.database()
        fleet.start(2, name)
        try:

            async def declared() -> bool:
                return name in {record.name for record in await app.job_types()}

            await eventually(declared, "the declaration", timeout=120)
            payloads = [{"n": number, "does": what} for number, what in enumerate(does)]
            receipts = await app.enqueue_many(name, payloads)

            async def over() -> bool:
                return not await database.fetchval("select count(*) from penstock.queued_jobs")

            await eventually(over, "the end of all jobs", timeout=300)
            assert fleet.deaths > 0, "no process was killed"
        finally:
            fleet.stop()
        rows = await database.fetch("select id, status::text, attempt, result, errors from penstock.archived_jobs")
    settled = [
        Settled(
            str(row["id"]),
            row["status"],
            row["attempt"],
            json.loads(row["result"] or "null"),
            tuple(
                (error["attempt"], error.get("type", ""), error.get("message", "")) for error in json.loads(row["errors"] or "[]")
            ),
        )
        for row in rows
    ]
    begun = [Begun(event["id"], event["attempt"]) for event in fleet.events() if event["kind"] == "started"]
    enqueued = {str(receipt.id): payload for receipt, payload in zip(receipts, payloads, strict=True)}
    print(f"{fleet.deaths} deaths, {len(begun)} attempts of {JOBS} jobs")
    return check_batches(enqueued, begun, settled)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["plain", "loop"])
async def test_each_job_of_a_killed_batch_ends_once(url: str, tmp_path: Path, name: str) -> None:
    assert await run(url, tmp_path, name) == []


@pytest.mark.soak
@pytest.mark.parametrize("sabotage", TAKEN_OUT.values(), ids=TAKEN_OUT)
async def test_a_batch_without_a_guarantee_is_found_out(
    databases: TemporaryDatabases, tmp_path: Path, sabotage: Sabotage
) -> None:
    async def one(folder: Path) -> list[str]:
        with databases.database() as url:
            return await run(url, folder, "plain", sabotage)

    await found_out(sabotage.expected, tmp_path, one)
