"""Jobs that wait for jobs, while workers kill themselves, PostgreSQL crashes, and clients hold jobs in long transactions.

Producers enqueue jobs behind those that they enqueued before, whatever becomes of these meanwhile. A client cancels waiting jobs
in transactions that it rolls back, so that what is to be released is locked. The checker says whether every waiting job ended as
it was to. Runs of graphs are retried, also from a step on, by two callers each. The clock of one worker is an hour ahead of that
of the other. Each variant takes one guarantee out, which the checker has to see.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar
from uuid import UUID

import asyncpg
import pytest

from penstock import DatabaseUnavailable, Penstock
from penstock.jobs.models import NewJob, make_id
from tests.chaos import workflow_occasions as occasions
from tests.chaos.draining import until_jobs_are_over
from tests.chaos.sabotage import Edit, Sabotage
from tests.chaos.seeking import found_out
from tests.chaos.workflow_site import working_site
from tests.checker.workflows import (
    Archived,
    Group,
    Planned,
    Retry,
    Run,
    Started,
    Step,
    check_groups,
    check_retries,
    check_runs,
    check_workflows,
)

T = TypeVar("T")
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

SECONDS = float(os.environ.get("CHAOS_SECONDS", "12"))
NOT_ENDED = r"P13: job group \S+ has not ended"
LEFT = "select id from penstock.queued_jobs union all select id from penstock.waiting_jobs"
STILL = r"P13: job \S+ still waits"
TAKEN_OUT = {
    "a tick that is lost": Sabotage(
        STILL, (Edit("note_ends", r"from unnest\(p_ended\) as ended\n", r"\g<0>    where random() < 0.5\n"),)
    ),
    "a running job that is not linked after the commit": Sabotage(
        STILL, (Edit("add_dependencies", r"after\.id::uuid = any \(held\)\n", "true\n"),)
    ),
    "an end that is not looked for in the archive": Sabotage(
        STILL, (Edit("link_dependencies", r"if cardinality\(gone\) > 0 then", "if false then"),)
    ),
    "what is locked is forgotten": Sabotage(
        STILL, (Edit("end_dependencies", r"if left_over\.jobs is not null then", "if false then"),)
    ),
    "released at the first end": Sabotage(
        r"P13: job \S+ ran (before|[0-9.]+ s before) job",
        (
            Edit(
                "end_dependencies",
                r"and \(select 1 from penstock\.job_dependencies as dependency where dependency\.job = job\.id limit 1\) is null",
            ),
        ),
    ),
    "any end counts as a success": Sabotage(
        r"P13: job \S+ ran although job",
        (Edit("end_dependencies", r"coalesce\(dependency\.status = 'succeeded', false\)", "true"),),
    ),
    "a cancellation that is not passed on": Sabotage(STILL, (Edit("end_waiting", r"if ends is not null then", "if false then"),)),
    "an id that is not looked for in the archive": Sabotage(
        r"P14: job \S+ ended [0-9]+ times|P14: attempt 1 of job \S+ started",
        (
            Edit("known_before", r"archived\.id = any \(p_ids\)", r"\g<0> and false"),
            Edit("enqueue_dependents", r"archived\.id = job\.id", r"\g<0> and false"),
        ),
    ),
    # The locks of the waiting jobs are a second line of defence behind that of the resolver.
    "two resolvers at the same time": Sabotage(
        STILL,
        (
            Edit("resolve_workflows", r"if not pg_try_advisory_xact_lock\([^;]*\) then", "if false then"),
            Edit("end_dependencies", r"job\.id = any \(found\.jobs\) for update skip locked", "job.id = any (found.jobs)"),
        ),
    ),
    "two jobs of one id": Sabotage(
        r"P14: job \S+ ended [0-9]+ times|P14: attempt 1 of job \S+ started|P13: job \S+ ran before job",
        (
            Edit("enqueue_dependents", r"(?s)with reserved as.*?from reserved;", "taken := made;"),
            Edit("release_of_type", r"penstock\.known_before\(p_ids\)", "'{}'"),
        ),
    ),
}

OF_GROUPS = {
    "an end without the seal": Sabotage(
        r"P14: (the then of job group \S+ ran before|job group \S+ counts)|P1: child",
        (
            Edit("end_groups", "and job_group\\.sealed_at is not null"),
            Edit("hold_group", "if found then", "if true then"),
        ),
    ),
    "an end beside a transaction that adds": Sabotage(
        r"P14: (the then of job group \S+ ran before|job group \S+ counts)|P1: child",
        (Edit("hold_group", "for key share;", ";"), Edit("hold_group", "if found then", "if true then")),
    ),
    "a tick of children that is lost": Sabotage(
        NOT_ENDED, (Edit("note_ends", r"from unnest\(p_ended\) as ended\n", r"\g<0>    where random() < 0.5\n"),)
    ),
    "a child that is not looked for in the archive": Sabotage(
        r"P14: (child \S+ of )?job group \S+ (ended|counts)|P14: child",
        (Edit("known_before", r"archived\.id = any \(p_ids\)", r"\g<0> and false"),),
    ),
    "ticks that are folded twice": Sabotage(
        rf"{NOT_ENDED}|P14: job group",
        (
            Edit(
                "resolve_workflows",
                r"delete from penstock\.workflow_ticks as tick where tick\.id = any \(ticks\);",
                r"delete from penstock.workflow_ticks as tick where tick.id = any (ticks) and random() < 0.5;",
            ),
        ),
    ),
}

OF_GRAPHS = {
    "steps that wait for nothing": Sabotage(
        r"P13: job \S+ ran ", (Edit("add_steps", r"when waits\[step\.place\] = '\[\]' then", "when true then"),)
    ),
    "a start that is not once": Sabotage(
        r"P14: run \S+ is there",
        (Edit("start_workflow", r"penstock\.new_id\(\), p_run,", "penstock.new_id(), p_run || '/' || random(),"),),
    ),
    "a retry that shares what was cancelled": Sabotage(
        r"P14: step \S+ of run \S+ did not succeed, and is not run again",
        (Edit("steps_to_retry", r"step\.status <> 'succeeded'", "step.status = 'failed'"),),
    ),
    "a retry from a step on without what is behind it": Sabotage(
        r"P14: step \S+ of run \S+ is behind the step from which it is retried, and is not run again",
        (Edit("steps_to_retry", r"behind\.place = any \(step\.after\)", "false"),),
    ),
    "a step without jobs that nothing ends": Sabotage(
        r"P13: run \S+ has not ended", (Edit("add_steps", r"step\.jobs = step\.carried and not step\.shared", "false"),)
    ),
}


class Producer:
    """Enqueues jobs behind those of before, and remembers what was acknowledged."""

    def __init__(self, app: Penstock, chance: random.Random) -> None:
        self._app = app
        self._chance = chance
        self.planned: list[Planned] = []

    async def step(self) -> None:
        """Enqueue some jobs, each behind up to three of the last hundred; again with the same ids until it is acknowledged."""
        name = self._chance.choice(["plain", "plain", "keyed"])
        known = [job.id for job in self.planned[-100:]]
        new, plan = [], []
        for _ in range(self._chance.randint(1, 5)):
            id = make_id()
            after = tuple(self._chance.sample(known, min(self._chance.randint(0, 3), len(known))))
            at_any_end = bool(after) and self._chance.random() < 0.3
            does = self._chance.choices(["work", "fail", "kill", "finish", "stumble"], [100, 6, 1, 6, 6])[0]
            # Some expire while they wait, for others or for a retry.
            expires_at = timedelta(seconds=self._chance.uniform(0.02, 1)) if self._chance.random() < 0.05 else None
            key = f"k{self._chance.randrange(6)}" if name == "keyed" else None
            when = "finished" if at_any_end else None
            new.append(NewJob({"does": does}, id=id, key=key, after=after or None, when=when, expires_at=expires_at))
            plan.append(Planned(str(id), after, at_any_end))
            known.append(str(id))
        while True:
            try:
                await self._app.enqueue_many(name, new)
                break
            except DatabaseUnavailable:
                await asyncio.sleep(0.05)
        self.planned += plan


@asynccontextmanager
async def holding_waiting_jobs(url: str, chance: random.Random) -> AsyncIterator[None]:
    """A client that cancels waiting jobs, and rolls that back a moment later."""

    async def hold() -> None:
        while True:
            with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                connection = await asyncpg.connect(url, timeout=5)
                try:
                    while True:
                        transaction = connection.transaction()
                        await transaction.start()
                        for row in await connection.fetch("select id from penstock.waiting_jobs order by random() limit 20"):
                            await connection.execute("select penstock.cancel($1)", row["id"])
                        # The time for which the transaction is open is what is tested.
                        await asyncio.sleep(chance.uniform(0.0, 0.2))
                        await transaction.rollback()
                        # A pause in which nothing is locked.
                        await asyncio.sleep(chance.uniform(0.0, 0.1))
                finally:
                    connection.terminate()
            await asyncio.sleep(0.1)

    holding = asyncio.create_task(hold())
    try:
        yield
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


async def drained(app: Penstock) -> bool:
    try:
        return not await (await app.database()).fetch(f"{LEFT} limit 1")
    except DatabaseUnavailable:
        return False


async def fill_groups(app: Penstock, url: str, chance: random.Random, until: float) -> dict[UUID, list[str]]:
    """Open job groups, and add children to each from several transactions, some of which are slow, and from children.

    Returns the ids of the children of each group that were acknowledged.
    """
    children: dict[UUID, list[str]] = {}

    async def add_slowly(group: UUID, ids: list[UUID]) -> None:
        """Add the last children in a transaction that commits after the seal."""
        connection = await asyncpg.connect(url)
        try:
            async with connection.transaction():
                await app.enqueue_many(
                    "plain", [NewJob({"does": "work"}, id=id, group=group) for id in ids], connection=connection
                )
                held.set()
                # The time for which the transaction is open is what is tested.
                await asyncio.sleep(chance.uniform(0, 0.3))
        finally:
            connection.terminate()

    number = 0
    while time.monotonic() < until:
        number += 1
        group = await app.job_group(f"group-{number}", then="plain", then_data={"does": "work"}, on_failure="continue").open()
        own: list[UUID] = []
        for _ in range(chance.randint(1, 4)):
            ids = [make_id() for _ in range(chance.randint(1, 60))]
            grown = [make_id() for _ in range(chance.randint(0, 3))]
            does = chance.choices(["work", "fail", "kill", "finish", "stumble"], [100, 4, 1, 4, 4], k=len(ids))
            new = [NewJob({"does": each}, id=id, group=group) for each, id in zip(does, ids, strict=True)]
            new[0] = NewJob({"does": "kill", "group": str(group.id), "children": list(map(str, grown))}, id=ids[0], group=group)
            if chance.random() < 0.9:
                new[0].data["does"] = "work"
            await app.enqueue_many("plain", new)
            own += ids + grown
        held = asyncio.Event()
        late = [make_id() for _ in range(3)]
        adding = asyncio.create_task(add_slowly(group.id, late))
        await asyncio.wait([adding, asyncio.create_task(held.wait())], return_when=asyncio.FIRST_COMPLETED)
        await group.seal()
        await adding
        children[group.id] = [*map(str, own), *map(str, late)]
    return children


async def run_groups(folder: Path, seconds: float, sabotage: Sabotage | None = None, stands_s: float = 60) -> list[str]:
    """Run job groups while workers kill themselves, and check them at the end."""
    async with working_site(folder, "workflow_app", "plain", "keyed", only=True, sabotage=sabotage) as site:
        app = site.app
        arranged, of_arranged = await occasions.job_group(app, site.url)
        children = await fill_groups(app, site.url, site.chance, time.monotonic() + seconds) | {arranged: of_arranged}

        async def over() -> bool:
            return not await app.job_groups(open=True, limit=1) and await drained(app)

        await until_jobs_are_over(app, over, stands_s)
        site.fleet.stop()
        groups = [
            Group(
                g.name,
                tuple(children[g.id]),
                str(g.then_job),
                g.finished_at is not None,
                g.added,
                g.ended,
                {status: getattr(g, status) for status in ("succeeded", "failed", "cancelled", "expired")},
                None if g.finished_at is None else g.status,
                None if g.finished_at is None else g.finished_at.timestamp(),
            )
            for g in await app.job_groups(limit=1_000)
            if g.id in children
        ]
        print(f"{len(groups)} groups, {sum(map(len, children.values()))} children, {site.fleet.deaths} workers killed")
        return check_groups(
            groups, await archive_of(app), [Started(event["id"], event["attempt"]) for event in site.fleet.events()]
        )


class Retries:
    """Retries runs that have ended: the steps that did not succeed, or from a step on; each by two callers at the same time."""

    def __init__(self, app: Penstock, chance: random.Random) -> None:
        self._app = app
        self._chance = chance
        self.done: list[Retry] = []
        self.differ: list[str] = []

    async def some(self, most: int) -> int:
        """Retry up to so many of the runs that have ended. Returns how many."""
        try:
            runs = await self._app.workflow_runs(limit=1_000)
        except DatabaseUnavailable:
            return 0
        retried = {retry.of for retry in self.done}
        ended = [run for run in runs if run.finished_at is not None and run.name not in retried]
        # The ones that failed first: they share some steps and run others again.
        ended.sort(key=lambda run: run.status == "succeeded")
        for run in ended[:most]:
            steps = [step.name for step in await self._again(lambda name=run.name: self._app.workflow_steps(name))]
            from_step = self._chance.choice(steps) if run.status == "succeeded" or self._chance.random() < 0.3 else None
            one, other = await asyncio.gather(*(self._retry(run.name, from_step) for _ in range(2)))
            if one != other:
                self.differ.append(f"P14: run {run.name} was retried twice, as {one} and {other}")
            self.done.append(Retry(one, run.name, from_step))
        return min(most, len(ended))

    async def _retry(self, name: str, from_step: str | None) -> str:
        return (await self._again(lambda: self._app.retry_workflow(name, from_step=from_step))).name

    async def _again(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call until it is acknowledged."""
        while True:
            try:
                return await call()
            except DatabaseUnavailable:
                await asyncio.sleep(0.05)


async def start_runs(
    app: Penstock, chance: random.Random, until: float, prefix: str, retries: Retries
) -> dict[str, tuple[int, dict[str, Step]]]:
    """Start runs of random graphs, each twice at the same time, and again until it is acknowledged; and retry some that ended.

    Returns how often the start of each was acknowledged, and its steps without their jobs.
    """
    runs: dict[str, tuple[int, dict[str, Step]]] = {}

    def document(number: int) -> dict[str, object]:
        does = chance.choices(["work", "fail", "kill", "finish"], [100, 4, 1, 4])[0]
        return {"data": {"does": does, "n": number}, "key": f"k{number % 6}"}

    async def start(name: str, steps: str) -> None:
        while True:
            try:
                await (await app.database()).fetch("select penstock.start_workflow('chaos', $1, $2::jsonb)", name, steps)
                return
            except DatabaseUnavailable:
                await asyncio.sleep(0.05)

    while time.monotonic() < until:
        name = f"{prefix}-{len(runs)}"
        steps: dict[str, Step] = {}
        documents = []
        for place in range(chance.randint(1, 12)):
            after = tuple(chance.sample(list(steps), min(chance.randint(0, 3), len(steps))))
            at_any_end = bool(after) and chance.random() < 0.3
            jobs = chance.choice([None, None, None, 0, 4])
            own = document(place) if jobs is None else {"jobs": [document(n) for n in range(jobs)]}
            steps[f"s{place}"] = Step(1 if jobs is None else jobs, (), after, at_any_end)
            when = {"when": "finished"} if at_any_end else {}
            documents.append({"name": f"s{place}", "type": chance.choice(["plain", "keyed"]), "after": after, **when, **own})
        await asyncio.gather(*(start(name, json.dumps(documents)) for _ in range(2)))
        runs[name] = 2, steps
        if chance.random() < 0.1:
            await retries.some(2)
        await asyncio.sleep(chance.uniform(0, 0.02))
    return runs


async def run_graphs(folder: Path, seconds: float, sabotage: Sabotage | None = None, stands_s: float = 60) -> list[str]:
    """Run graphs while workers kill themselves and PostgreSQL is killed, and check them at the end."""
    async with working_site(folder, "workflow_app", "plain", "keyed", only=True, sabotage=sabotage) as site:
        app, chance = site.app, site.chance
        retries = Retries(app, chance)
        runs = await start_runs(app, chance, time.monotonic() + seconds / 2, "before", retries)
        if sabotage is None:
            site.crash_server()
        runs |= await start_runs(app, chance, time.monotonic() + seconds / 2, "behind", retries)

        async def over() -> bool:
            return not await app.workflow_runs(open=True, limit=1) and await drained(app)

        with suppress(DatabaseUnavailable):
            await until_jobs_are_over(app, over, stands_s)
            await retries.some(20)
            await until_jobs_are_over(app, over, stands_s)
        assert sabotage is not None or any(retry.from_step for retry in retries.done), "no run was retried from a step on"
        site.fleet.stop()
        rows = await (await app.database()).fetch(
            "select run.name as run, run.finished_at is not null as finished, step.name, array(select job.id::text from"
            " penstock.archived_jobs as job where job.id = step.job or step.jobs is not null and job.workflow = step.job) as jobs"
            " from penstock.job_groups as run join penstock.graph_steps as step on step.run = run.id order by run.id, step.place"
        )
        found: dict[str, tuple[bool, dict[str, Step]]] = {}
        for row in rows:
            plan = runs[row["run"].partition("/")[0].partition("~")[0]][1][row["name"]]
            found.setdefault(row["run"], (row["finished"], {}))[1][row["name"]] = replace(plan, jobs=tuple(row["jobs"]))
        print(f"{len(found)} runs, {len(retries.done)} of them retries, {len(rows)} steps, {site.fleet.deaths} workers killed")
        archived, started = await archive_of(app), [Started(event["id"], event["attempt"]) for event in site.fleet.events()]
        ended = [Run(name, finished, steps) for name, (finished, steps) in found.items()]
        times = {name: times for name, (times, _) in runs.items()}
        first = [run for run in ended if "~" not in run.name]
        return (
            retries.differ + check_runs(times, first, archived, started) + check_retries(retries.done, ended, archived, started)
        )


async def archive_of(app: Penstock) -> list[Archived]:
    rows = await (await app.database()).fetch(
        "select id, status::text, reason, extract(epoch from started_at)::double precision as started_at,"
        " extract(epoch from finished_at)::double precision as finished_at,"
        " extract(epoch from expires_at)::double precision as expires_at,"
        " array(select extract(epoch from (error ->> 'started_at')::timestamptz)::double precision"
        " from jsonb_array_elements(errors) as error where error ? 'started_at') as earlier, attempt from penstock.archived_jobs"
    )
    return [
        Archived(str(id), status, reason, started_at, finished_at, expires_at, tuple(earlier), attempt)
        for id, status, reason, started_at, finished_at, expires_at, earlier, attempt in rows
    ]


async def run(folder: Path, seconds: float, sabotage: Sabotage | None = None, stands_s: float = 60) -> list[str]:
    """Run workflows through the faults, and check them at the end."""
    async with working_site(folder, "workflow_app", "plain", "keyed", only=True, sabotage=sabotage) as site:
        app, chance = site.app, site.chance
        producer = Producer(app, chance)
        producer.planned += await occasions.waiting_jobs(app, site.url, folder)
        until, crash_at = time.monotonic() + seconds, time.monotonic() + seconds / 2
        async with holding_waiting_jobs(site.url, random.Random(chance.random())):
            while time.monotonic() < until:
                await producer.step()
                if sabotage is None and time.monotonic() > crash_at:
                    site.crash_server()
                    crash_at = float("inf")
                # A pause of the load: there is nothing to wait for.
                await asyncio.sleep(chance.uniform(0, 0.02))
        await until_jobs_are_over(app, lambda: drained(app), stands_s)
        assert sabotage is not None or site.fleet.deaths > 0, "no worker was killed"
        site.fleet.stop()
        database = await app.database()
        archived = await archive_of(app)
        waiting = [str(row["id"]) for row in await database.fetch(LEFT)]
        started = [Started(event["id"], event["attempt"]) for event in site.fleet.events()]
        print(f"{len(producer.planned)} jobs, {len(started)} attempts, {site.fleet.deaths} workers killed")
        return check_workflows(producer.planned, archived, started, waiting)


async def test_waiting_jobs_end_as_they_are_to_through_kills(tmp_path: Path) -> None:
    assert await run(tmp_path, SECONDS) == []


@pytest.mark.soak
async def test_waiting_jobs_end_as_they_are_to_through_a_minute_of_kills(tmp_path: Path) -> None:
    assert await run(tmp_path, 60) == []


@pytest.mark.soak
@pytest.mark.parametrize("sabotage", TAKEN_OUT.values(), ids=TAKEN_OUT)
async def test_workflows_without_a_guarantee_are_found_out(tmp_path: Path, sabotage: Sabotage) -> None:
    await found_out(sabotage.expected, tmp_path, lambda folder: run(folder, 2, sabotage, stands_s=8))


async def test_job_groups_end_once_through_kills(tmp_path: Path) -> None:
    assert await run_groups(tmp_path, SECONDS) == []


@pytest.mark.soak
@pytest.mark.parametrize("sabotage", OF_GROUPS.values(), ids=OF_GROUPS)
async def test_job_groups_without_a_guarantee_are_found_out(tmp_path: Path, sabotage: Sabotage) -> None:
    await found_out(sabotage.expected, tmp_path, lambda folder: run_groups(folder, 2, sabotage, stands_s=8))


async def test_runs_of_graphs_end_once_through_kills(tmp_path: Path) -> None:
    assert await run_graphs(tmp_path, SECONDS / 2) == []


@pytest.mark.soak
@pytest.mark.parametrize("sabotage", OF_GRAPHS.values(), ids=OF_GRAPHS)
async def test_graphs_without_a_guarantee_are_found_out(tmp_path: Path, sabotage: Sabotage) -> None:
    await found_out(sabotage.expected, tmp_path, lambda folder: run_graphs(folder, 2, sabotage, stands_s=8))
