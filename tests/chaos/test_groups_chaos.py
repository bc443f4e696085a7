"""Job groups in job groups, while workers kill themselves and PostgreSQL crashes: filled and cancelled while their
children end, by workers whose clocks differ from each other by two hours.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from uuid import UUID

import pytest

from penstock import Conflict, DatabaseUnavailable, Penstock
from penstock.jobs.models import NewJob, make_id
from penstock.postgres.embedded import EmbeddedServer
from tests.chaos.draining import until_jobs_are_over
from tests.chaos.restarted import Fleet
from tests.checker.workflows import Archived, NestedGroup, Started, check_nested
from tests.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

SECONDS = float(os.environ.get("CHAOS_SECONDS", "12"))
HOUR_S = 3600.0
# Groups that are open at the same time, about.
_MOST_OPEN = 60
T = TypeVar("T")


@dataclass
class Made:
    """A group that was opened: what was acknowledged of it."""

    id: UUID
    on_failure: str
    parent: Made | None = None
    children: list[str] = field(default_factory=list)
    maybe: list[str] = field(default_factory=list)


class Filler:
    """Opens groups, fills, seals and cancels them; again and again until it is acknowledged."""

    def __init__(self, app: Penstock, chance: random.Random, name: str) -> None:
        self._app = app
        self._chance = chance
        self._name = name
        self.made: list[Made] = []

    async def acknowledged(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except DatabaseUnavailable:
                # The database crashed; it is back in a moment.
                await asyncio.sleep(0.05)

    async def open(self, parent: Made | None = None) -> Made | None:
        """Open a group with a then; None: the group around it takes no more children."""
        on_failure = self._chance.choice(["cancel", "continue", "continue"])
        name = f"{self._name}-{len(self.made)}-{secrets.token_hex(4)}"
        group = self._app.job_group(
            name, then="plain", then_data={"does": "work"}, on_failure="cancel" if on_failure == "cancel" else "continue",
            parent=parent and parent.id,
        )  # fmt: skip
        try:
            await self.acknowledged(group.open)
        except Conflict:
            return None
        made = Made(group.id, on_failure, parent)
        self.made.append(made)
        return made

    async def fill(self, group: Made) -> None:
        """Add some children, which begin while more are added."""
        ids = [make_id() for _ in range(self._chance.randint(1, 40))]
        does = self._chance.choices(["work", "fail", "kill", "finish"], [1000, 4, 1, 30], k=len(ids))
        new = [NewJob({"does": each}, id=id, group=group.id) for each, id in zip(does, ids, strict=True)]
        try:
            await self.acknowledged(lambda: self._app.enqueue_many("plain", new))
        except Conflict:
            # It failed, or was cancelled. An answer before may have been lost.
            group.maybe += map(str, ids)
        else:
            group.children += map(str, ids)

    async def tree(self) -> None:
        """A group with up to two groups in it, some of which are cancelled."""
        outer = await self.open()
        assert outer is not None
        groups = [outer]
        for _ in range(self._chance.randint(0, 2)):
            if (inner := await self.open(self._chance.choice(groups))) is not None:
                groups.append(inner)
        for group in self._chance.choices(groups, k=6):
            await self.fill(group)
        self._chance.shuffle(groups)
        for group in groups:
            await self.acknowledged(lambda g=group: self._seal(g))
            if self._chance.random() < 0.15:
                # While its last children end.
                await asyncio.sleep(self._chance.uniform(0, 0.15))
                await self.acknowledged(lambda g=group: self._app.cancel_group(g.id))

    async def _seal(self, group: Made) -> None:
        await (await self._app.database()).fetch("select penstock.seal_group($1)", group.id)


async def run(folder: Path, seconds: float) -> list[str]:
    """Run trees of groups through the faults, and check them at the end."""
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", secrets.randbits(32)))
    print(f"PENSTOCK_TEST_SEED={seed}")
    server = EmbeddedServer(folder / "server")
    url = await asyncio.to_thread(server.start)
    fleets = [Fleet(url, folder / f"{ahead_s}.jsonl", "workflow_app", ahead_s) for ahead_s in (-HOUR_S, HOUR_S)]
    app = Penstock(url)
    try:
        await app.migrate()
        for fleet in fleets:
            fleet.start(1, "plain", "keyed")

        async def declared() -> bool:
            return {"plain", "keyed"} <= {record.name for record in await app.job_types()}

        await eventually(declared, "the declarations", timeout=120)
        fillers = [Filler(app, random.Random(seed + number), f"f{number}") for number in range(3)]
        until = time.monotonic() + seconds

        async def work(filler: Filler) -> None:
            while time.monotonic() < until:
                await filler.tree()
                # What the workers do not keep up with would only have to be worked off at the end.
                while time.monotonic() < until and await filler.acknowledged(crowded):
                    await asyncio.sleep(0.05)

        async def crowded() -> bool:
            return len(await app.job_groups(open=True, limit=_MOST_OPEN)) == _MOST_OPEN

        working = [asyncio.create_task(work(filler)) for filler in fillers]
        # The crash comes in the midst of the load.
        await asyncio.sleep(seconds / 2)
        os.kill(int((folder / "server/postgres/postmaster.pid").read_text().split()[0]), signal.SIGKILL)
        await asyncio.gather(*working)

        async def over() -> bool:
            try:
                database = await app.database()
                left = "select from penstock.queued_jobs union all select from penstock.waiting_jobs limit 1"
                return not await app.job_groups(open=True, limit=1) and not await database.fetch(left)
            except DatabaseUnavailable:
                return False

        await until_jobs_are_over(app, over, 60)
        deaths = sum(fleet.deaths for fleet in fleets)
        for fleet in fleets:
            fleet.stop()
        made = {group.id: group for filler in fillers for group in filler.made}
        print(f"{len(made)} groups, {sum(len(group.children) for group in made.values())} children, {deaths} workers killed")
        assert deaths > 0, "no worker was killed"
        rows = await (await app.database()).fetch(
            "select id, status::text, reason, extract(epoch from started_at)::double precision as started_at,"
            " extract(epoch from finished_at)::double precision as finished_at from penstock.archived_jobs"
        )
        archived = [Archived(str(row["id"]), *tuple(row)[1:]) for row in rows]
        started = [Started(event["id"], event["attempt"]) for fleet in fleets for event in fleet.events()]
        return check_nested(await groups_of(app, made), archived, started)
    finally:
        for fleet in fleets:
            fleet.stop()
        await app.close()
        await asyncio.to_thread(server.stop)


async def groups_of(app: Penstock, made: dict[UUID, Made]) -> list[NestedGroup]:
    """The groups as they are at the end."""
    found = []
    for id, group in made.items():
        record = await app.find_group(id)
        found.append(
            NestedGroup(
                str(id),
                tuple(group.children),
                tuple(str(other.id) for other in made.values() if other.parent is group),
                str(record.then_job),
                group.on_failure,
                None if record.finished_at is None else record.status,
                0.0 if record.finished_at is None else record.finished_at.timestamp(),
                record.added,
                {status: getattr(record, status) for status in ("succeeded", "failed", "cancelled", "expired")},
                tuple(group.maybe),
                record.cancelled_at is not None,
            )
        )
    return found


async def test_groups_in_groups_end_once_through_crashes(tmp_path: Path) -> None:
    assert await run(tmp_path, SECONDS) == []


@pytest.mark.soak
async def test_groups_in_groups_end_once_through_a_minute_of_crashes(tmp_path: Path) -> None:
    assert await run(tmp_path, 60) == []
