"""Durable steps, while workers kill themselves at each place of a handler, PostgreSQL crashes, and jobs are taken from workers.

Jobs are cancelled too, and two senders signal each job about when its wait times out. A worker from which a job is taken goes on.
The clock of one worker is an hour ahead of that of the other, and each half an hour off that of the database.

Each variant takes one guarantee out, which the checker has to see.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest

from penstock import Conflict, DatabaseUnavailable, Penstock
from penstock.jobs.models import NewJob, make_id
from tests.chaos.draining import until_jobs_are_over
from tests.chaos.sabotage import Edit, Sabotage
from tests.chaos.seeking import found_out
from tests.chaos.workflow_site import working_site
from tests.checker.steps import Noted, Sent, Written, check_steps

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

SECONDS = float(os.environ.get("CHAOS_SECONDS", "10"))
PLACES = ["in first", "behind first", "in second", "behind second", "behind the nap", "behind the wait", "behind the parts"]
FENCE = r"where job\.status = 'in-progress' and given\.lease in \(job\.lease, lease\.renews\)"
NOT_ENDED = r"P13: job \S+ has not ended"
# Under which lease a job is held when a step of it is written.
AUDIT = """
    create table public.held (job uuid, name text, lease bigint);
    create function public.note_held() returns trigger language plpgsql as $$
    begin
        insert into public.held select new.job, new.name, job.lease from penstock.queued_jobs as job where job.id = new.job;
        return null;
    end $$;
    create trigger note_held after insert on penstock.job_steps for each row execute function public.note_held();
"""
TAKEN_OUT = {
    "no fence on steps": Sabotage(
        r"P15: step \S+ of job \S+ was kept by a run",
        (Edit("write_steps", FENCE, "where true"), Edit("write_steps", r"given\.id = any \(locked\) as", "true as")),
    ),
    "a step that a further run does not find": Sabotage(
        r"P15: step \S+ of job \S+ ran again",
        (Edit("kept_steps", r"where step\.job = any \(p_ids\)", r"\g<0> and random() < 0.9"),),
    ),
    "a signal that is received twice": Sabotage(
        r"P16: ",
        (
            Edit(
                "signal",
                r"on conflict \(job, name\) do nothing",
                "on conflict (job, name) do update set value = excluded.value",
            ),
        ),
    ),
    "a timeout that wins over a signal": Sabotage(
        r"P16: ",
        (
            Edit("begin_waits", r"and \(select 1 from penstock\.job_signals as signal where[^)]*\) is null"),
            Edit("time_out_waits", r"do nothing", "do update set value = null"),
        ),
    ),
    "a job that is not resumed": Sabotage(
        NOT_ENDED, (Edit("resume_jobs", r"job\.id = any \(locked\) and", r"\g<0> random() < 0.8 and"),)
    ),
    "a signal that comes before the suspension": Sabotage(
        NOT_ENDED,
        (Edit("resume_time", r"when \(select 1 from penstock\.job_signals as signal where[^)]*\) is not null then p_moment"),),
    ),
    "an end of children that is not noted": Sabotage(
        NOT_ENDED, (Edit("resolve_workflows", r"where job_group\.gathered_by is not null", "where false"),)
    ),
}


class Orders:
    """Enqueues orders, signals each of them twice, and remembers what was acknowledged and told."""

    def __init__(self, app: Penstock, chance: random.Random) -> None:
        self._app = app
        self._chance = chance
        self._sending: set[asyncio.Task[None]] = set()
        self.ids: list[UUID] = []
        self.sent: list[Sent] = []

    async def step(self) -> None:
        """Enqueue some orders, again until they are acknowledged, and let the signals to them begin."""
        name, ids = self._chance.choice(["order", "order", "keyed"]), [make_id() for _ in range(self._chance.randint(1, 4))]
        new = []
        for id in ids:
            data = {
                "nap_ms": self._chance.choice([0, 20, 100]),
                "timeout_ms": self._chance.choice([None, 100, 300]),
                "parts": self._chance.choice([0, 0, 2]),
                "dies": self._chance.choice(PLACES) if self._chance.random() < 0.01 else "",
            }
            new.append(NewJob(data, id=id, key=f"k{self._chance.randrange(6)}" if name == "keyed" else None))
        while True:
            try:
                await self._app.enqueue_many(name, new)
                break
            except DatabaseUnavailable:
                await asyncio.sleep(0.05)
        self.ids += ids
        for id in ids:
            for sender in ("ada", "grace"):
                self._spawn(self.signal(id, sender, self._chance.uniform(0, 0.6)))
            if self._chance.random() < 0.02:
                self._spawn(self._cancel(id, self._chance.uniform(0, 0.6)))

    async def signal(self, id: UUID, sender: str, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        try:
            self.sent.append(Sent(str(id), f"{id} {sender}", await self._app.signal(id, "go", f"{id} {sender}")))
        except Conflict:
            pass  # It has ended.
        except DatabaseUnavailable:
            self.sent.append(Sent(str(id), f"{id} {sender}", None))

    async def _cancel(self, id: UUID, after_s: float) -> None:
        await asyncio.sleep(after_s)
        with suppress(DatabaseUnavailable):
            await self._app.cancel(id)

    def _spawn(self, sending: object) -> None:
        task = asyncio.ensure_future(sending)  # type: ignore[call-overload]
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def all_sent(self) -> None:
        while self._sending:
            await asyncio.gather(*self._sending)


@asynccontextmanager
async def taking_jobs_away(url: str, chance: random.Random) -> AsyncIterator[None]:
    """A client that releases jobs which workers run, without telling them: each runs again, with a new lease."""

    async def take() -> None:
        while True:
            with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                connection = await asyncpg.connect(url, timeout=5)
                try:
                    while True:
                        await connection.fetch(
                            "select penstock.settle(array[id], array[attempt], array[lease], array['released']) from ("
                            "  select * from penstock.queued_jobs where status = 'in-progress' and name <> 'part'"
                            "  order by random() limit 1"
                            ") as job"
                        )
                        await asyncio.sleep(chance.uniform(0.0, 0.05))
                finally:
                    connection.terminate()
            await asyncio.sleep(0.1)

    taking = asyncio.create_task(take())
    try:
        yield
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


async def left(app: Penstock) -> list[str] | None:
    """What has not ended; None: the database is away."""
    try:
        rows = await (await app.database()).fetch(
            "select 'job ' || id as what from penstock.queued_jobs"
            " union all select 'group ' || name from penstock.job_groups where finished_at is null"
        )
        return [row["what"] for row in rows]
    except DatabaseUnavailable:
        return None


async def run(folder: Path, seconds: float, sabotage: Sabotage | None = None, stands_s: float = 60) -> list[str]:
    """Run orders through the faults, and check them at the end."""
    async with working_site(folder, "steps_app", "order", "keyed", "part", sabotage=sabotage, sql=AUDIT) as site:
        app, chance = site.app, site.chance
        orders = Orders(app, chance)
        until, crash_at = time.monotonic() + seconds, time.monotonic() + seconds / 2
        async with taking_jobs_away(site.url, random.Random(chance.random())):
            while time.monotonic() < until:
                await orders.step()
                if sabotage is None and time.monotonic() > crash_at:
                    site.crash_server()
                    crash_at = float("inf")
                await asyncio.sleep(chance.uniform(0, 0.06))
            await orders.all_sent()
        number = 0

        async def over() -> bool:
            nonlocal number
            number += 1
            open = await left(app)
            # A signal whose answer was lost may not have come.
            for what in open or ():
                if what.startswith("job ") and UUID(what.split()[1]) in orders.ids:
                    await orders.signal(UUID(what.split()[1]), f"sweep {number}")
            return open == []

        await until_jobs_are_over(app, over, stands_s)
        assert sabotage is not None or site.fleet.deaths > 0, "no worker was killed"
        site.fleet.stop()
        database = await app.database()
        noted = [
            Noted(event["kind"], event["job"], event["run"], event.get("step", ""), event.get("value"))
            for event in site.fleet.events()
        ]
        written = [
            Written(str(row["job"]), row["name"], row["done_under"], row["held_under"])
            for row in await database.fetch(
                "select step.job, step.name, (step.result ->> 'lease')::bigint as done_under, held.lease as held_under"
                " from penstock.job_steps as step left join public.held as held on held.job = step.job and held.name = step.name"
                # A gather without children is kept as a step too, whose result names no run.
                " where step.kind = 'step' and step.result ? 'lease'"
            )
        ]
        ended = {
            str(row["id"]): row["status"] for row in await database.fetch("select id, status::text from penstock.archived_jobs")
        }
        print(f"{len(orders.ids)} orders, {len(noted)} notes, {len(orders.sent)} signals, {site.fleet.deaths} workers killed")
        return check_steps(noted, written, orders.sent, ended, await left(app) or [])


async def test_steps_are_done_once_and_waits_end_through_kills(tmp_path: Path) -> None:
    assert await run(tmp_path, SECONDS) == []


@pytest.mark.soak
async def test_steps_are_done_once_and_waits_end_through_a_minute_of_kills(tmp_path: Path) -> None:
    assert await run(tmp_path, 60) == []


@pytest.mark.soak
@pytest.mark.parametrize("sabotage", TAKEN_OUT.values(), ids=TAKEN_OUT)
async def test_steps_without_a_guarantee_are_found_out(tmp_path: Path, sabotage: Sabotage) -> None:
    await found_out(sabotage.expected, tmp_path, lambda folder: run(folder, 8, sabotage, stands_s=8))
