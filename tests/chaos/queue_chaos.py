"""Worker processes on a real server, killed and suspended at random under a random workload; the checkers judge the history."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from penstock import EnqueueOutcome, NewJob, Penstock, PenstockError
from penstock.postgres.embedded import EmbeddedServer
from penstock.settings import Settings
from tests.chaos.budget import Budget
from tests.chaos.draining import until_jobs_are_over
from tests.chaos.late import held_snapshot, late_transaction
from tests.chaos.seeking import end_if_cancelled, until_found
from tests.checker.history import SLACK_S, Event, Gone, read, runs_of
from tests.checker.jobs import Final, History, Planned, Rules, check_jobs
from tests.checker.noted import NOTE, TICK_S, notes
from tests.checker.tables import clock_difference, finals, text
from tests.checker.uniques import Asked, check_uniques
from tests.waiting import eventually

RULES = {
    "plain": Rules(max_attempts=6),
    "once": Rules(at_most_once=True),
    "limited": Rules(concurrency=3, max_attempts=6),
    "brief": Rules(max_attempts=3),
    "unhurried": Rules(),
}
WORKERS = 4
LATE_PRODUCERS = 2
PLACES = 10
# Seconds of work in a second: half of the capacity of the places, since some are away and some repeat lost jobs.
WORK_PER_S = {"plain": 10.0, "once": 6.0, "brief": 4.0, "limited": 1.5}
# Dead after 2 s of silence, with a check every 0.3 s, on a machine that starts Python processes all the time.
HEALED_WITHIN = 15.0
# Half of the time after which a worker counts as dead, since the heartbeat of a busy machine may be late.
SAFE_SILENCE_S = 1.0
# The time that workers need to find the database again.
RETURNING_S = 3.0


def seeded() -> random.Random:
    """A random generator whose seed is printed, or comes from the environment."""
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", secrets.randbits(32)))
    print(f"PENSTOCK_TEST_SEED={seed}")
    return random.Random(seed)


class Fleet:
    """Worker processes, started as an operator starts them."""

    def __init__(self, url: str, history: Path, sabotage: str = "") -> None:
        self.gone: list[Gone] = []
        self._environment = {
            **os.environ,
            "PENSTOCK_DATABASE_URL": url,
            "CHAOS_HISTORY": str(history),
            "CHAOS_SABOTAGE": sabotage,
            "PENSTOCK_HEARTBEAT_INTERVAL": "0.5",
            "PENSTOCK_DEAD_AFTER": "2",
            "PENSTOCK_MAINTENANCE_INTERVAL": "0.3",
        }
        self._log = history.with_suffix(".log").open("ab")
        self._stopped: set[int] = set()
        self.frozen: dict[str, float] = {}
        self.workers = [self._start() for _ in range(WORKERS)]

    @property
    def killed(self) -> int:
        """The number of workers that were killed."""
        return sum(gone.back == float("inf") for gone in self.gone)

    @property
    def stopped(self) -> int:
        """How often a worker was suspended for longer than it may be silent."""
        return sum(2.5 < gone.back - gone.at < float("inf") for gone in self.gone)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "penstock", "worker", "tests.chaos.workload:app", "--concurrency", str(PLACES)]
        return subprocess.Popen(command, env=self._environment, cwd=Path(__file__).parents[2], stdout=self._log, stderr=self._log)

    def kill_one(self, chance: random.Random) -> None:
        """Kill a worker that is not suspended at this moment, and start another in its place."""
        place = chance.choice([place for place in range(WORKERS) if place not in self._stopped])
        victim = self.workers[place]
        victim.kill()
        victim.wait()
        self.gone.append(Gone(str(victim.pid), time.monotonic()))
        self.workers[place] = self._start()

    async def freeze_one(
        self, chance: random.Random, seconds: float, taken: Callable[[str], Awaitable[bool]] | None = None
    ) -> None:
        """Suspend a worker and resume it after so many seconds, or that long after the database ended its leases."""
        place = chance.choice([place for place in range(WORKERS) if place not in self._stopped])
        worker = self.workers[place]
        self._stopped.add(place)
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
            self._stopped.discard(place)

    def stop(self) -> list[int]:
        """Stop all workers gracefully. Returns their exit codes."""
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)
        codes = [worker.wait(60) for worker in self.workers]
        self._log.close()
        return codes

    def close(self) -> None:
        """Kill the processes that are left."""
        for worker in self.workers:
            worker.kill()
            worker.wait()


@dataclass
class Workload:
    """The calls of the workload and their answers."""

    app: Penstock
    chance: random.Random
    long: bool = False
    events: list[Event] = field(default_factory=list)
    planned: dict[str, Planned] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    known: list[uuid.UUID] = field(default_factory=list)
    names: dict[uuid.UUID, str] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    withdrawn: set[str] = field(default_factory=set)
    budgets: dict[str, Budget] = field(
        default_factory=lambda: {name: Budget(per_s, ahead_s=2 * per_s) for name, per_s in WORK_PER_S.items()}
    )

    def payload(self, name: str) -> dict[str, Any]:
        """A payload: how long the job sleeps, how often it fails, and how long it blocks the event loop of its worker.

        A job beyond the budget of its type does not sleep.
        """
        longest_s, share = (6.0, 0.1) if self.long and RULES[name].concurrency is None else (2.5, 0.02)
        sleep_s = longest_s if self.chance.random() < share else self.chance.choice([0, 0, 0, 0.01, 0.05, 0.3])
        failures = self.chance.choice([0, 0, 0, 1, 2, 7]) if self.chance.random() < 0.5 else 0
        extends = self.chance.random() < 0.5
        runs = 1 if RULES[name].at_most_once else min(failures + 1, RULES[name].max_attempts)
        return {
            "sleep_s": sleep_s if self.budgets[name].admits(sleep_s * runs) else 0,
            "failures": failures,
            "extends": extends,
            # Longer than the silence after which a worker counts as dead.
            "blocks_s": 3.5 if self.chance.random() < 0.002 else 0,
        }

    async def step(self) -> None:
        """Make one random call of those that users make."""
        await self.enqueue()
        if self.chance.random() < 0.3:
            await self.enqueue_unique()
        if self.chance.random() < 0.2:
            await self.cancel(self.chance.choice(self.known))
        if self.chance.random() < 0.1:
            await self.replay(self.chance.choice(self.known))

    async def enqueue(self) -> None:
        """Enqueue a batch until it is acknowledged; sometimes twice, sometimes with ids of earlier jobs."""
        chance = self.chance
        name = chance.choices(list(RULES), weights=[5, 3, 2, 3, 0])[0]
        batch = [
            NewJob(
                self.payload(name),
                id=chance.choice(self.known) if self.known and chance.random() < 0.1 else new_id(chance),
                priority=chance.choice([0, 0, -5, 5]),
                run_after=chance.choice([None, None, timedelta(seconds=0.5)]),
                expires_at=timedelta(seconds=chance.choice([0.2, 5])) if name == "brief" else None,
            )
            for _ in range(chance.randrange(1, 40))
        ]
        for job in batch:
            if job.id not in self.names:
                # The time runs from before the first try, since its answer may have been lost.
                assert isinstance(job.id, uuid.UUID)
                self.names[job.id] = name
                if isinstance(job.expires_at, timedelta):
                    self.planned[str(job.id)] = Planned(time.monotonic() + job.expires_at.total_seconds())
        new = {job.id: text(job.data) for job in reversed(batch) if job.id not in self.known}
        for _ in range(chance.choice([1, 1, 2])):
            for receipt in await self.until_answered(lambda: self.app.enqueue_many(name, batch)):
                if receipt.id in new:
                    self.known.append(receipt.id)
                    value = new.pop(receipt.id)
                    self.events.append(Event("enqueued", str(receipt.id), name, time.monotonic(), value=value))

    async def enqueue_late(self, url: str, chance: random.Random, goes_on: Callable[[], bool]) -> None:
        """Enqueue in transactions of its own, which others overlap and overtake; some of them are rolled back."""
        while goes_on():
            name = chance.choice(["plain", "plain", "once", "limited"])
            batches = [
                [NewJob(self.payload(name), id=new_id(chance)) for _ in range(chance.randrange(1, 8))]
                for _ in range(chance.choice([1, 1, 2]))
            ]
            jobs = [job for batch in batches for job in batch]
            self.names.update((job.id, name) for job in jobs if isinstance(job.id, uuid.UUID))
            commits = chance.random() < 0.75
            calls = [partial(self._enqueue_in, name, batch) for batch in batches]
            while await late_transaction(url, calls, chance, commits=commits) is not commits:
                # Repeated with the same ids until the commit is acknowledged.
                await asyncio.sleep(0.05)
            if not commits:
                self.withdrawn.update(str(job.id) for job in jobs)
                continue
            self.late.update(str(job.id) for job in jobs)
            for job in jobs:
                assert isinstance(job.id, uuid.UUID)
                self.known.append(job.id)
                self.events.append(Event("enqueued", str(job.id), name, time.monotonic(), value=text(job.data)))

    async def _enqueue_in(self, name: str, batch: list[NewJob], connection: Any) -> None:
        await self.app.enqueue_many(name, batch, connection=connection)

    async def enqueue_unique(self) -> None:
        """Enqueue a job with a unique key, once: a lost answer leaves the outcome unknown."""
        key, begun = f"u{self.chance.randrange(4)}", time.monotonic()
        delay = self.chance.choice([None, timedelta(seconds=self.chance.uniform(0, 4))])
        with suppress(PenstockError):
            payload = {"sleep_s": 0, "failures": 0}
            receipt = await self.app.enqueue("plain", payload, id=new_id(self.chance), unique=key, run_after=delay)
            new = receipt.outcome is EnqueueOutcome.QUEUED
            self.asked.append(Asked(key, str(receipt.id), new, begun, time.monotonic()))
            if new:
                self.known.append(receipt.id)
                self.names[receipt.id] = "plain"

    async def cancel(self, id: uuid.UUID) -> None:
        """Cancel a job. It may be cancelled from the call on, and is from the answer on."""
        self.events.append(Event("cancelling", str(id), self.names[id], time.monotonic()))
        with suppress(PenstockError):
            if await self.app.cancel(id) == "cancelled":
                self.events.append(Event("cancelled", str(id), self.names[id], time.monotonic()))

    async def replay(self, id: uuid.UUID) -> None:
        """Replay a finished job."""
        copy = new_id(self.chance)
        self.names[copy] = self.names[id]
        self.planned[str(copy)] = self.planned.get(str(id), Planned())
        with suppress(PenstockError):
            await self.app.replay(id, new_id=copy)
            self.known.append(copy)
            self.events.append(Event("enqueued", str(copy), self.names[copy], time.monotonic()))

    async def until_answered(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Repeat a call until it is acknowledged."""
        while True:
            try:
                return await call()
            except PenstockError:
                end_if_cancelled()
                await asyncio.sleep(0.05)


def new_id(chance: random.Random) -> uuid.UUID:
    """A random id, the same for the same seed."""
    return uuid.UUID(int=chance.getrandbits(128), version=4)


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    violations: list[str]
    history: History
    codes: list[int]
    killed: int
    stopped: int
    leases: int
    overtaken: int

    @property
    def final(self) -> list[Final]:
        """The rows at the end."""
        return list(self.history.final)


async def run_queue(
    folder: Path,
    seconds: float,
    *,
    prepare: Callable[[Penstock], Awaitable[None]] | None = None,
    sabotage: str = "",
    stands_s: float = 60.0,
    sought: str = "",
    long: bool = False,
    held: bool = False,
) -> Result:
    """Run the workload with its faults and check the history.

    Args:
        folder: Folder for the server's files and the history.
        seconds: Seconds of enqueueing.
        prepare: Called with the migrated database before the workers start.
        sabotage: Name of the sabotage of the workers, see `broken_worker`.
        stands_s: Seconds in which no job ends, after which those that are left count as stuck.
        sought: A regular expression for a violation; the run ends as soon as one matches.
        long: Jobs, and the times for which workers are suspended, last until other workers have taken over their jobs.
        held: A transaction stays open from before the first job until after the last one; so the server does not crash.
    """
    chance = seeded()
    history = folder / "history.jsonl"
    history.touch()
    server = EmbeddedServer(folder / "server")
    url = await asyncio.to_thread(server.start)
    app = Penstock(url, settings=Settings(command_timeout=timedelta(seconds=5)))
    await app.migrate()
    await _execute(app, NOTE)
    if prepare is not None:
        await prepare(app)
    fleet = Fleet(url, history, sabotage)
    workload = Workload(app, chance, long)
    freezing: list[asyncio.Task[None]] = []
    probe = Probe(app)
    probing = asyncio.create_task(probe.run())
    returning: list[asyncio.Task[tuple[float, float]]] = []
    late: list[asyncio.Task[None]] = []

    async def whole() -> Result:
        async with held_snapshot(url) if held else nullcontext():
            return await faults_and_end()

    async def faults_and_end() -> Result:
        await eventually(lambda: _declared(app), "the declaration of the types", timeout=60)
        until, over = time.monotonic() + seconds, asyncio.Event()
        for _ in range(LATE_PRODUCERS):
            own = random.Random(chance.getrandbits(32))
            late.append(asyncio.create_task(workload.enqueue_late(url, own, lambda: not over.is_set())))
        next_blow = time.monotonic() + 2
        server_kill_at = float("inf") if long or held else time.monotonic() + seconds / 2
        # The run lasts until each kind of fault has happened, which chance and a busy machine may delay.
        while time.monotonic() < until or (not long and (fleet.killed < 3 or fleet.stopped < 1)):
            await workload.step()
            if time.monotonic() > next_blow:
                due = fleet.stopped == 0 and time.monotonic() > until - seconds / 3
                if (due or chance.random() < (0.8 if long else 0.4)) and all(task.done() for task in freezing):
                    stopped_s = 1.5 if long else 3.0 if due else chance.choice([0.5, 3.0, 5.0])
                    taken = partial(was_taken, app) if long else None
                    freezing.append(asyncio.create_task(fleet.freeze_one(chance, stopped_s, taken)))
                elif not long:
                    fleet.kill_one(chance)
                next_blow = time.monotonic() + chance.uniform(1, 3)
            if time.monotonic() > server_kill_at:
                os.kill(int((folder / "server/postgres/postmaster.pid").read_text().split()[0]), signal.SIGKILL)
                server_kill_at = float("inf")
                returning.append(asyncio.create_task(_return_of(app, time.monotonic())))
            # A pause of the load: there is nothing to wait for.
            await asyncio.sleep(chance.uniform(0, 0.1))
        over.set()
        await asyncio.gather(*freezing, *late)
        await until_jobs_are_over(app, lambda: _drained(app), stands_s)
        # A worker that has just started may not have installed its signal handlers yet.
        await eventually(lambda: _all_started(app, fleet), "the start of all workers", timeout=60)
        codes = fleet.stop()
        checked, violations = await check(app, fleet, workload, history, [*probe.away, *[await task for task in returning]])
        leases = await (await app.database()).fetchval("select count(*) from penstock.leases")
        return Result(violations, checked, codes, fleet.killed, fleet.stopped, leases, overtaken(checked, workload.late))

    async def look() -> list[str]:
        if not all(task.done() for task in returning):
            return []
        return (await check(app, fleet, workload, history, [*probe.away, *[task.result() for task in returning]]))[1]

    def found(violations: list[str]) -> Result:
        return Result(violations, History([], [], RULES), [], fleet.killed, fleet.stopped, 0, 0)

    try:
        return await until_found(whole(), sought, look, found)
    finally:
        for task in [probing, *freezing, *late, *returning]:
            task.cancel()
        await asyncio.gather(probing, *freezing, *late, *returning, return_exceptions=True)
        fleet.close()
        await app.close()
        await asyncio.to_thread(server.stop)


def overtaken(history: History, late: set[str]) -> int:
    """How many jobs of late transactions were behind others that were claimed before these transactions were committed."""
    committed = {event.id: event.at for event in reversed(history.events) if event.kind == "enqueued" and event.id in late}
    claims = [note for note in history.noted if note.what == "claimed"]
    first = {note.id: note for note in reversed(claims) if note.id in committed}
    return sum(
        any(other.name == own.name and other.seq > own.seq and other.at < committed[id] for other in claims)
        for id, own in first.items()
    )


async def _execute(app: Penstock, statements: str) -> None:
    connection = await (await app.database()).connect()
    await connection.execute(statements)
    await connection.close()


async def check(
    app: Penstock, fleet: Fleet, workload: Workload, path: Path, away: Sequence[tuple[float, float]]
) -> tuple[History, list[str]]:
    """The history so far, and its violations."""
    database = await app.database()
    begun, asked, withdrawn = time.monotonic(), list(workload.asked), set(workload.withdrawn)
    # The rows are read first: the events of a job that has ended in them are all recorded.
    final = await finals(app)
    noted = await notes(database, await clock_difference(database))
    recorded = read(path)
    gone = [*fleet.gone, *[Gone(worker, at) for worker, at in fleet.frozen.items()]]
    marks = [Event("begun", note.id, note.name, note.at, note.number, note.worker) for note in noted if note.what == "begun"]
    stalled = [Gone(event.worker, event.at - float(event.value), event.at) for event in recorded if event.kind == "stalled"]
    stalled = [gone for gone in stalled if gone.back - gone.at > TICK_S]
    jobs = [event for event in recorded if event.kind != "stalled"]
    events = sorted([*workload.events, *jobs, *marks], key=lambda event: event.at)
    # Events that were recorded while the rows were read belong to the next check.
    there, first = {row.id for row in final}, {event.id: event.at for event in reversed(events)}
    events = [event for event in events if event.id in there or first[event.id] < begun - SLACK_S]
    blocked = [Gone(run.worker, run.begin, run.until) for run in runs_of(events) if '"blocks_s": 3.5' in run.value]
    history = History(
        events, final, RULES, gone, cut=stalled, blocked=blocked, away=away, planned=workload.planned,
        healed_within=HEALED_WITHIN, safe_silence_s=SAFE_SILENCE_S, noted=noted, withdrawn=withdrawn,
    )  # fmt: skip
    return history, await asyncio.to_thread(lambda: check_jobs(history) + check_uniques(asked, noted))


class Probe:
    """Queries the database repeatedly. While an answer, or this process, is late, the database counts as away for all workers."""

    def __init__(self, app: Penstock) -> None:
        self.away: list[tuple[float, float]] = []
        self._app = app

    async def run(self) -> None:
        """Query until cancelled."""
        answered = time.monotonic()
        while True:
            with suppress(PenstockError):
                await (await self._app.database()).fetchval("select 1")
                now = time.monotonic()
                if now - answered > 2 * TICK_S:
                    self.away.append((answered, now + RETURNING_S))
                answered = now
            await asyncio.sleep(TICK_S / 2)


async def _return_of(app: Penstock, away: float) -> tuple[float, float]:
    """When the database was away, including the time that workers have for their next heartbeat."""
    while True:
        with suppress(PenstockError):
            await app.counts()
            return away, time.monotonic() + RETURNING_S
        await asyncio.sleep(0.05)


async def until_taken(taken: Callable[[str], Awaitable[bool]], worker: int) -> None:
    """Wait until the database has ended the leases of a process; for a limited time, since no worker may be alive to do so."""
    with suppress(TimeoutError):
        async with asyncio.timeout(20):
            while not await taken(str(worker)):
                await asyncio.sleep(0.05)


async def was_taken(app: Penstock, worker: str) -> bool:
    """Whether the process is dead according to the database, and its memberships have ended."""
    with suppress(PenstockError):
        return not await (await app.database()).fetchval(
            "select exists (select from penstock.workers where pid = $1::integer and state <> 'dead')"
            " or exists (select from penstock.members where id like '%.' || $1::text || '.%')",
            int(worker),
        )
    return False


async def _declared(app: Penstock) -> bool:
    return set(RULES) <= {record.name for record in await app.job_types()}


async def _drained(app: Penstock) -> bool:
    with suppress(PenstockError):
        return all(c.ready + c.deferred + c.in_progress == 0 for c in await app.counts())
    return False


async def _all_started(app: Penstock, fleet: Fleet) -> bool:
    with suppress(PenstockError):
        found = await (await app.database()).fetch("select pid from penstock.workers")
        return {worker.pid for worker in fleet.workers} <= {row["pid"] for row in found}
    return False
