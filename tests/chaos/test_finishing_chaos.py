"""Jobs that end in the transactions of their handlers, through kills and lost leases: exactly once with their effects."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import NewJob, Penstock
from penstock.testing import TemporaryDatabases
from tests.chaos.restarted import Fleet
from tests.chaos.sabotage import Edit, Sabotage
from tests.chaos.seeking import found_out
from tests.checker.finishing import Effect, Ended, check_finishing
from tests.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

PLACES = ("start", "before", "between", "after")
PLAIN = [{"does": "fail", "at": place} for place in PLACES]
HARD = [
    {"does": does, "at": place} for does, places in (("kill", PLACES), ("overrun", ("before", "between"))) for place in places
]
# The first attempt is late until the second has begun, which waits until the first has tried to finish.
LATE = [{"does": "late", "at": "before"}] * 4
_UNFENCED = r"and job\.attempt = given\.attempt|and job\.lease = given\.lease"
FENCES = {
    "finish without its error": Sabotage(
        r"P4: job \S+, which succeeded, has [2-9] effects",
        (Edit("finish", r"else\s+raise exception 'job % no longer", "elsif false then raise exception 'job % no longer"),),
    ),
    "finish without its fence": Sabotage(r"P4: job \S+ was finished by attempt 1 while", (Edit("archive_succeeded", _UNFENCED),)),
}


async def run(url: str, folder: Path, faults: list[dict[str, str]], sabotage: Sabotage | None = None) -> list[str]:
    """Run jobs of all kinds with these faults, and check them at the end."""
    fleet = Fleet(url, folder / "history.jsonl", "finishing_app")
    async with Penstock(url) as app:
        if sabotage is not None:
            await sabotage.prepare(app)
        database = await app.database()
        await database.fetch("create table effects (job uuid not null, attempt integer not null)")
        fleet.start(2, "plain", "keyed", "batch")
        try:

            async def declared() -> bool:
                return {"plain", "keyed", "batch"} <= {record.name for record in await app.job_types()}

            await eventually(declared, "the declarations", timeout=120)
            payloads = [*faults, *[{}] * 20]
            ids = []
            for name in ("plain", "batch", "keyed"):
                new = [NewJob(data, key=f"k{number % 4}" if name == "keyed" else None) for number, data in enumerate(payloads)]
                ids += [str(receipt.id) for receipt in await app.enqueue_many(name, new)]

            async def over() -> bool:
                return not await database.fetchval("select count(*) from penstock.queued_jobs")

            await eventually(over, "the end of all jobs", timeout=300)
            # A thread of an attempt that overran its lease may still be about to finish.
            busy = "select count(*) from pg_stat_activity where datname = current_database() and state = 'idle in transaction'"

            async def quiet() -> bool:
                return not await database.fetchval(busy)

            await eventually(quiet, "the end of all transactions", timeout=120)
            ended = [
                Ended(str(row["id"]), row["status"], row["attempt"])
                for row in await database.fetch("select id, status::text, attempt from penstock.archived_jobs")
            ]
            effects = [Effect(str(row["job"]), row["attempt"]) for row in await database.fetch("select * from effects")]
            violations = check_finishing(ids, ended, effects)

            left = "select (select count(*) from penstock.finished_jobs) + (select count(*) from penstock.leases)"

            async def counted() -> bool:
                return not await database.fetchval(left)

            await eventually(counted, "the end of all leases", timeout=60)
            return violations
        finally:
            fleet.stop()


async def test_effects_and_archive_agree_through_failures(url: str, tmp_path: Path) -> None:
    assert await run(url, tmp_path, PLAIN) == []


@pytest.mark.soak
async def test_effects_and_archive_agree_through_kills_and_lost_leases(url: str, tmp_path: Path) -> None:
    assert await run(url, tmp_path, HARD) == []


@pytest.mark.soak
@pytest.mark.parametrize("sabotage", FENCES.values(), ids=FENCES)
async def test_a_finish_without_its_fence_is_found_out(databases: TemporaryDatabases, tmp_path: Path, sabotage: Sabotage) -> None:
    async def one(folder: Path) -> list[str]:
        with databases.database() as url:
            return await run(url, folder, LATE, sabotage)

    await found_out(sabotage.expected, tmp_path, one)
