"""Pools of real processes that are killed, suspended and cut off from the database under load; the checkers judge the history."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg

from penstock import NewJob, Penstock, PenstockError, Settings
from penstock.groups.assignors import slot_of
from tests.chaos.budget import Budget
from tests.chaos.draining import until_jobs_are_over
from tests.chaos.proxy import Proxy
from tests.chaos.queue_chaos import new_id, seeded, until_taken, was_taken
from tests.chaos.seeking import end_if_cancelled, until_found
from tests.checker.history import Event, Gone, read
from tests.checker.jobs import Final, History, Rules, check_jobs
from tests.checker.keys import Ended, Placed, check_keys, check_standing
from tests.checker.owners import NOTE_OWNERS, Begun, check_begun, check_owners, owners
from tests.checker.tables import clock_difference, finals, pid_of, text
from tests.waiting import eventually

KEYS = 24
SLOTS = 16
# Jobs of a key run one after another, and some of the time no worker runs them.
WORK_OF_A_KEY_PER_S = 0.5
WORK_OF_A_KEY_AHEAD_S = 20.0
# Until a failed job runs again, which its key waits for: the longest backoff, and the looks of those who end it.
RETRIED_WITHIN_S = 0.5
PRODUCERS = 3
ENVIRONMENT = {
    "PENSTOCK_HEARTBEAT_INTERVAL": "0.7",
    "PENSTOCK_DEAD_AFTER": "3",
    "PENSTOCK_MAINTENANCE_INTERVAL": "0.3",
    "PENSTOCK_COMMAND_TIMEOUT": "3",
    "PENSTOCK_CONNECT_TIMEOUT": "2",
    "PENSTOCK_HANDOVER_GRACE": "1",
}
SAFE_SILENCE_S = 1.0
# Before a standing job is quarantined: two make a suspect, and two are its own.
LEAST_CRASHES = 4


class Fleet:
    """Worker processes; one of them is behind a proxy."""

    def __init__(self, url: str, proxied: str, history: Path, sabotage: str = "", long: bool = False) -> None:
        self.gone: list[Gone] = []
        self.cut: list[Gone] = []
        self.what_happened: dict[str, int] = {}
        self.frozen: dict[str, float] = {}
        self.cut_now: dict[str, float] = {}
        self._urls = [proxied, url, url, url]
        self._environment = {**os.environ, **ENVIRONMENT, "CHAOS_HISTORY": str(history), "CHAOS_SABOTAGE": sabotage}
        self._environment["CHAOS_LONG"] = "1" if long else ""
        self._log = history.with_suffix(".log").open("ab")
        self.workers = [self._start(place) for place in range(len(self._urls))]

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", "worker", "tests.chaos.pool_workload:app", "--concurrency", "8"],
            env={**self._environment, "PENSTOCK_DATABASE_URL": self._urls[place]},
            cwd=Path(__file__).parents[2],
            stdout=self._log,
            stderr=self._log,
        )

    def note(self, what: str) -> None:
        self.what_happened[what] = self.what_happened.get(what, 0) + 1

    def kill(self, place: int) -> None:
        self.note("killed")
        victim = self.workers[place]
        victim.kill()
        victim.wait()
        self.gone.append(Gone(str(victim.pid), time.monotonic()))
        self.workers[place] = self._start(place)

    def replace(self, place: int) -> None:
        """Stop one worker gracefully, and start another."""
        self.note("replaced")
        leaver, self.workers[place] = self.workers[place], self._start(place)
        leaver.send_signal(signal.SIGTERM)
        # A process that has just started has not installed its signal handlers yet.
        assert leaver.wait(40) in (0, -signal.SIGTERM)

    async def freeze(self, place: int, seconds: float, taken: Callable[[str], Awaitable[bool]] | None = None) -> None:
        self.note("frozen")
        worker = self.workers[place]
        worker.send_signal(signal.SIGSTOP)
        # The process may continue for a moment after the signal; from here on it does not run.
        await asyncio.to_thread(os.waitid, os.P_PID, worker.pid, os.WSTOPPED)
        at = self.frozen[str(worker.pid)] = time.monotonic()
        try:
            if taken is not None:
                await until_taken(taken, worker.pid)
            # The length of the suspension is what is tested; no condition can take the place of the sleep.
            await asyncio.sleep(seconds)
        finally:
            # Also when the task is cancelled during the suspension.
            del self.frozen[str(worker.pid)]
            self.gone.append(Gone(str(worker.pid), at, time.monotonic()))
            worker.send_signal(signal.SIGCONT)

    def stop(self) -> list[int]:
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)
        codes = [worker.wait(60) for worker in self.workers]
        self._log.close()
        return codes


@dataclass
class Producers:
    """Tasks that enqueue for the same keys in overlapping transactions, and record when each began and was committed."""

    app: Penstock
    url: str
    seed: int
    longest_s: float = 2.5
    counts: dict[str, int] = field(default_factory=dict)
    placed: dict[str, Placed] = field(default_factory=dict)
    budgets: defaultdict[str, Budget] = field(
        default_factory=lambda: defaultdict(lambda: Budget(WORK_OF_A_KEY_PER_S, WORK_OF_A_KEY_AHEAD_S))
    )
    events: list[Event] = field(default_factory=list)
    transactions: int = 0

    async def produce(self, number: int, until: float) -> None:
        """Enqueue until the given time; each transaction is repeated, with the same ids, until its commit is acknowledged."""
        chance = random.Random(self.seed + number)
        while time.monotonic() < until:
            calls = [self.jobs(chance) for _ in range(chance.choice([1, 1, 2, 3]))]
            pauses = [chance.choice([0, 0, 0.01, 0.05]) for _ in calls]
            self.transactions += 1
            transaction, begun = self.transactions, time.monotonic()
            while True:
                try:
                    await self.enqueue(calls, pauses)
                    break
                except (PenstockError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                    end_if_cancelled()
                    await asyncio.sleep(0.05)
            committed = time.monotonic()
            for place, job in enumerate(job for call in calls for job in call):
                name = f"{job.key}/{job.data['n']}"
                self.placed[name] = Placed(transaction, place, begun, committed)
                self.events.append(Event("enqueued", str(job.id), "keyed", committed, value=text(job.data)))
            # A pause of the load: there is nothing to wait for.
            await asyncio.sleep(chance.uniform(0, 0.3))

    def jobs(self, chance: random.Random) -> list[NewJob]:
        """Some jobs, most of them for a few keys. A job beyond the budget of its key does nothing."""
        batch = []
        for _ in range(chance.randrange(1, 12)):
            key = f"k{min(int(chance.expovariate(0.15)), KEYS - 1)}"
            n = self.counts.get(key, 0)
            self.counts[key] = n + 1
            sleep_s = self.longest_s if chance.random() < 0.02 else chance.choice([0, 0.001, 0.01, 0.05])
            failures = chance.choice([0] * 12 + [1, 2])
            if not self.budgets[key].admits(sleep_s * (failures + 1) + failures * RETRIED_WITHIN_S):
                sleep_s = failures = 0
            batch.append(NewJob({"n": n, "sleep_s": sleep_s, "failures": failures}, id=new_id(chance), key=key))
        return batch

    async def enqueue(self, calls: list[list[NewJob]], pauses: list[float]) -> None:
        """Enqueue in one transaction, with a pause before each call."""
        connection: asyncpg.Connection[Any] = await asyncpg.connect(self.url)
        try:
            async with connection.transaction():
                for call, pause in zip(calls, pauses, strict=True):
                    # The time for which the transaction is open is what is tested.
                    await asyncio.sleep(pause)
                    await self.app.enqueue_many("keyed", call, connection=connection)
        finally:
            await connection.close()


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    violations: list[str]
    final: list[Final]
    codes: list[int]
    gone: list[Gone]
    what_happened: dict[str, int]
    left: int
    keys: int


async def run_pools(
    url: str,
    folder: Path,
    seconds: float,
    *,
    prepare: Callable[[Penstock], Awaitable[None]] | None = None,
    sabotage: str = "",
    stands_s: float = 60.0,
    sought: str = "",
    long: bool = False,
) -> Result:
    """Run the workload with its faults and check the history. Arguments as for `run_queue`.

    Args:
        long: Jobs, and the times for which workers are suspended or cut off, last until other workers have taken over.
    """
    chance = seeded()
    history = folder / "history.jsonl"
    history.touch()
    async with Proxy(url) as proxy, Penstock(url, settings=Settings()) as app:
        connection = await (await app.database()).connect()
        await connection.execute(NOTE_OWNERS)
        await connection.close()
        if prepare is not None:
            await prepare(app)
        fleet = Fleet(url, proxy.url, history, sabotage, long)
        troubles: list[asyncio.Task[Any]] = []
        condemned: list[str] = []
        operators: list[asyncio.Task[None]] = []
        producers = Producers(app, url, chance.getrandbits(32), longest_s=8.0 if long else 2.5)
        wanted = {f"s{n}" for n in range(12)}

        taken = partial(was_taken, app) if long else None

        async def whole() -> Result:
            await eventually(lambda: present(app, fleet), "the workers", timeout=60)

            async def cut() -> None:
                fleet.note("cut off")
                proxy.cut()
                at = fleet.cut_now[str(fleet.workers[0].pid)] = time.monotonic()
                if taken is not None:
                    await until_taken(taken, fleet.workers[0].pid)
                # The length of the interruption is what is tested.
                await asyncio.sleep(chance.uniform(1, 2) if long else chance.uniform(2, 7))
                proxy.mend()
                fleet.cut_now.clear()
                fleet.cut.append(Gone(str(fleet.workers[0].pid), at, time.monotonic()))

            async def trouble() -> None:
                while True:
                    # Faults come at any moment.
                    await asyncio.sleep(chance.uniform(0.5, 3))
                    kind = chance.choice(["kill", "freeze", "cut", "replace"])
                    if kind == "kill":
                        fleet.kill(chance.randrange(1, 4))
                    elif kind == "freeze":
                        await fleet.freeze(chance.randrange(1, 4), 1.5 if long else chance.choice([0.5, 2.0, 6.0]), taken)
                    elif kind == "replace":
                        await asyncio.to_thread(fleet.replace, chance.randrange(1, 4))
                    else:
                        await cut()

            standing = app.pool("standing", slots=16)
            await standing.reconcile(dict.fromkeys(wanted, 1))

            async def operate() -> None:
                """Start quarantined standing jobs again: the kills may hit one twice while it is on trial alone."""
                while True:
                    with suppress(PenstockError):
                        for job in await standing.standing_jobs():
                            if job.quarantined_at is not None:
                                fleet.note("quarantined")
                                if job.crashes < LEAST_CRASHES:
                                    condemned.append(f"P9: {job.key} was quarantined after {job.crashes} crashes")
                                await standing.start(job.key, 1)
                    # An operator looks now and then; nothing tells him.
                    await asyncio.sleep(0.3)

            operators.append(asyncio.create_task(operate()))
            troubles.append(asyncio.create_task(trouble()))
            until = time.monotonic() + seconds
            await asyncio.gather(*(producers.produce(number, until) for number in range(PRODUCERS)))
            if troubles[0].done():
                troubles[0].result()
            troubles[0].cancel()
            await asyncio.gather(*troubles, return_exceptions=True)
            proxy.mend()
            for worker in fleet.workers:
                worker.send_signal(signal.SIGCONT)

            async def drained() -> bool:
                with suppress(PenstockError):
                    return all(c.ready + c.deferred + c.in_progress == 0 for c in await app.counts())
                return False

            await until_jobs_are_over(app, drained, stands_s)
            if not sabotage and prepare is None:
                await eventually(lambda: present(app, fleet), "the return of all workers", timeout=60)
                await eventually(lambda: all_stand(app, wanted), "the standing jobs", timeout=60)
            until = time.monotonic()
            codes = await asyncio.to_thread(fleet.stop)
            final, violations = await check(app, fleet, producers, history, wanted, until)
            violations += condemned
            left = await (await app.database()).fetchval(
                "select (select count(*) from penstock.leases) + (select count(*) from penstock.members)"
            )
            return Result(violations, final, codes, fleet.gone, fleet.what_happened, left, len(producers.counts))

        async def look() -> list[str]:
            return (await check(app, fleet, producers, history, wanted, time.monotonic()))[1]

        def found(violations: list[str]) -> Result:
            return Result(violations, [], [], fleet.gone, fleet.what_happened, 0, 0)

        try:
            return await until_found(whole(), sought, look, found)
        finally:
            for task in [*troubles, *operators]:
                task.cancel()
            await asyncio.gather(*troubles, *operators, return_exceptions=True)
            for worker in fleet.workers:
                worker.kill()
                worker.wait()


async def check(
    app: Penstock, fleet: Fleet, producers: Producers, path: Path, wanted: set[str], until: float
) -> tuple[list[Final], list[str]]:
    """The rows so far, and the violations."""
    said, placed = list(producers.events), dict(producers.placed)
    # The rows are read first: the events of a job that has ended in them are all recorded.
    final = await finals(app)
    found = await (await app.database()).fetch("select id, key || '/' || (data ->> 'n') as name from penstock.archived_jobs")
    names = {str(row["id"]): row["name"] for row in found}
    recorded = read(path)
    # Read after the runs, whose owners are therefore all there.
    owned = await owners(await app.database(), await clock_difference(await app.database()))
    gone = [*fleet.gone, *[Gone(worker, at) for worker, at in fleet.frozen.items()]]
    cut = [*fleet.cut, *[Gone(worker, at) for worker, at in fleet.cut_now.items()]]
    ended = {names[row.id]: Ended(row.status, row.attempt, row.at) for row in final if row.finished}
    keyed = [event for event in recorded if event.kind in ("started", "ended")]
    there = {row.id for row in final}
    jobs = [*said, *[replace(event, name="keyed") for event in keyed if event.id in there]]

    def checked() -> list[str]:
        rules = {"keyed": Rules(max_attempts=8)}
        violations = check_jobs(History(jobs, final, rules, gone, cut=cut, safe_silence_s=SAFE_SILENCE_S))
        violations += check_keys(keyed, placed, ended, gone, cut=cut, within_s=15, safe_silence_s=SAFE_SILENCE_S)
        violations += check_owners(owned)
        begun = [
            Begun(e.name, "keyed", slot_of(e.name.rpartition("/")[0], SLOTS), e.worker, e.at)
            for e in keyed
            if e.kind == "started"
        ]
        stalled = [Gone(e.worker, e.at - float(e.value), e.at) for e in recorded if e.kind == "stalled"]
        violations += check_begun(begun, owned, [*gone, *cut, *stalled])
        return violations + check_standing(recorded, gone, wanted, until, within_s=15)

    return final, await asyncio.to_thread(checked)


async def all_stand(app: Penstock, wanted: set[str]) -> bool:
    database = await app.database()
    running = await database.fetch("select key from penstock.standing_jobs where running_by is not null")
    return {row["key"] for row in running} == wanted


async def present(app: Penstock, fleet: Fleet) -> bool:
    """Whether the workers of the fleet are the members, and no other process is."""
    database = await app.database()
    members = await database.fetch("select group_name, id from penstock.members")
    here = {(row["group_name"], pid_of(row["id"])) for row in members}
    return here == {(group, str(worker.pid)) for worker in fleet.workers for group in ("keyed", "standing")}
