"""The executor of a pull worker: it keeps each job until the program asks for it, and then until the program settles it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import orjson

from penstock.core.encryption import Sealer
from penstock.core.tally import Tally
from penstock.errors import Conflict
from penstock.jobs import claim_queries
from penstock.jobs.models import ClaimedJob, Outcome, Settlement
from penstock.pools.worked import WorkedPool
from penstock.postgres.database import Database
from penstock.worker.finishing import Confirmer, Finishing
from penstock.worker.held import HeldJob
from penstock.worker.reports import Lines
from penstock.worker.results import Results

# A job for which the program has not asked within this share of its lease is released: too little time is left to run it.
_LONGEST_WAIT = 0.5
_LOOK_FOR_LATE_S = 0.2


class Pulled(HeldJob):
    """A claimed job that waits for the program to ask for it, or that the program has."""

    __slots__ = ("_executor", "settled", "since", "too_late_at")

    def __init__(self, executor: ExternalExecutor, claimed: ClaimedJob, claimed_at: float, may_start: Callable[[], bool]) -> None:
        self.executor = self._executor = executor
        self.claimed = claimed
        self.may_start = may_start
        self.lease = claimed.lease
        self.finishing: Finishing | None = None
        self.lines: Lines | None = None
        self.reason: str | None = None
        self.suspended: str | None = None
        self.too_late_at = claimed_at + claimed.lease_s * _LONGEST_WAIT
        self.settled: asyncio.Future[str | None] | None = None
        # When the program got it, by the monotonic clock.
        self.since: float | None = None

    @property
    def sealer(self) -> Sealer:
        """See `HeldJob`."""
        return self._executor.sealer

    def sealed_error(self, error: Mapping[str, Any]) -> str:
        """The error of the attempt as it is stored, JSON text."""
        return orjson.dumps(self.sealer.seal_error("error", error, str(self.claimed.id))).decode()

    def quarantine(self, problem: str) -> None:
        """Settle a job that cannot be given to the program."""
        detail = self.sealed_error(claim_queries.quarantined_error(problem))
        self._executor.finish(self, self.settlement(Outcome.QUARANTINED, detail))

    def settlement(self, outcome: Outcome, detail: str | None = None, after: timedelta | None = None) -> Settlement:
        """The settlement of this attempt."""
        return Settlement(self.claimed.id, self.claimed.attempt, self.lease, outcome, detail, after, self.claimed.name)

    async def settle(self, outcome: Outcome, detail: str | None, after: timedelta | None = None) -> None:
        """Settle the job, and wait until that is written. Raises `Conflict` when it no longer belongs to this worker."""
        if self.settled is not None:
            raise Conflict(f"job {self.claimed.id} was settled already", hint="Call ack, fail, snooze or release once.")
        self.settled = asyncio.get_running_loop().create_future()
        settlement = self.settlement(outcome, detail, after)
        if self.finishing is not None:
            settlement = await self._confirmed(self.finishing, settlement)
        self._executor.finish(self, settlement)
        if await self.settled == "stale":
            raise Conflict(
                f"job {self.claimed.id} no longer belongs to this worker",
                hint="Its slot moved or its visibility timeout ended: another worker runs it, or will.",
            )

    async def _confirmed(self, finishing: Finishing, settlement: Settlement) -> Settlement:
        """The settlement of a job that the program finished. Raises `Conflict` when its transaction was not committed."""
        finished = await self._executor.confirmer.finished(self.claimed, finishing)
        if finished:
            settlement = settlement._replace(outcome=Outcome.SUCCEEDED, detail=None, retry_after=None, written=True)
        elif settlement.outcome is Outcome.SUCCEEDED:
            finishing.rolled_back()
            self.settled = self.finishing = None
            raise Conflict(
                f"job {self.claimed.id} is not finished: the transaction of finish() was not committed",
                hint="It still belongs to this worker: do its work again, or settle it with fail or release.",
            )
        return settlement

    def written(self, outcome: str | None) -> None:
        """The settlement was written, with this outcome."""
        if self.settled is not None and not self.settled.done():
            self.settled.set_result(outcome)


class ExternalExecutor:
    """Gives the jobs of one pool to a program. A `WorkerExecutor`, and a `PoolExecutor`.

    Args:
        database: Database in which leases are extended.
        results: Receives the settlements that the program makes.
        prefetch: The largest number of jobs held at once.
        sealer: Encrypts what belongs to the jobs of the pool.
        tally: Where the times of attempts go; None: nothing measures.
    """

    def __init__(
        self,
        database: Database,
        results: Results,
        prefetch: int,
        sealer: Sealer,
        tally: Tally | None,
    ) -> None:
        self.database = database
        self.confirmer = Confirmer(database)
        self.sealer = sealer
        self.loop = asyncio.get_running_loop()
        self.on_room: list[Callable[[], None]] = []
        self.reports = results.completer.reports
        self.arrived = asyncio.Event()
        """Set when a job has arrived."""
        self.waiting: deque[Pulled] = deque()
        self._results = results
        self._prefetch = prefetch
        self._tally = tally
        self._jobs: dict[UUID, Pulled] = {}
        # By settlement, since a job that was lost while it is being settled may have been claimed again.
        self._settling: dict[Settlement, Pulled] = {}
        self._emptied = asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()
        results.completer.on_written.append(self._written)

    # -- for the program

    def next(self) -> Pulled | None:
        """The next job that may still start. The check comes last, since the process can be suspended at any point."""
        while self.waiting:
            pulled = self.waiting[0]
            if pulled.may_start() and time.monotonic() < pulled.too_late_at:
                pulled.since = time.monotonic()
                return self.waiting.popleft()
            self.give_back([pulled.claimed.id])
        return None

    def finish(self, pulled: Pulled, result: Settlement) -> None:
        """Pass on the settlement of a job."""
        if self._jobs.get(result.id) is not pulled:
            pulled.written("stale")
            return
        self._settling[result] = pulled
        # What is released may not have been begun.
        if self._tally is not None and pulled.since is not None and result.outcome is not Outcome.RELEASED:
            claimed = pulled.claimed
            attempts = self._tally.attempts(claimed.name, result.outcome)
            attempts.ended(claimed.run_after, claimed.created_at, pulled.since, time.monotonic())
        if pulled.lines is not None:
            self.reports.log(result.id, pulled)
        self._results.finish(result)
        self._tell_of_room()

    def release_all(self) -> None:
        """Release every job: the program asks for no more jobs and settles no more."""
        for pulled in list(self._jobs.values()):
            if pulled.settled is None:
                pulled.reason = "shutdown"
                if pulled.finishing is not None:
                    # Only its transaction decides what becomes of it.
                    ending = asyncio.create_task(pulled.settle(Outcome.RELEASED, None), name="penstock-confirm")
                    self._ending.add(ending)
                    ending.add_done_callback(self._ending.discard)
                else:
                    self.finish(pulled, pulled.settlement(Outcome.RELEASED))
        self.waiting.clear()

    # -- see `PoolExecutor`

    def room(self, name: str) -> int:
        """See `PoolExecutor`."""
        return self._prefetch - len(self._jobs)

    def found(self, name: str, more: bool) -> None:
        """See `PoolExecutor`: one type has all places."""

    def start(self, job: ClaimedJob, claimed_at: float, may_start: Callable[[], bool], ahead: bool) -> None:
        """See `PoolExecutor`."""
        pulled = self._jobs[job.id] = Pulled(self, job, claimed_at, may_start)
        if ahead:
            self.waiting.appendleft(pulled)
        else:
            self.waiting.append(pulled)
        self.arrived.set()

    def give_back(self, ids: Iterable[UUID]) -> None:
        """See `PoolExecutor`."""
        for id in ids:
            if self._jobs.get(id) in self.waiting:
                self.cancel(id, "moved")

    def cancel(self, id: UUID, reason: str) -> None:
        """See `PoolExecutor`. A waiting job is settled; a program that has the job checks `job.cancelled`."""
        pulled = self._jobs.get(id)
        if pulled is None:
            return
        pulled.reason = reason
        if pulled in self.waiting:
            self.waiting.remove(pulled)
            self.finish(pulled, pulled.settlement(Outcome.CANCELLED if reason == "cancelled" else Outcome.RELEASED))

    def abandon(self, lost: Iterable[UUID]) -> list[asyncio.Task[Any]]:
        """See `PoolExecutor`. The program cannot be stopped; `job.cancelled` tells it, and `ack` is refused."""
        for id in lost:
            if (pulled := self._jobs.pop(id, None)) is not None:
                pulled.reason = "lost"
                if pulled in self.waiting:
                    self.waiting.remove(pulled)
                pulled.written("stale")
        self._look_whether_empty()
        return []

    def leases(self) -> Iterable[int]:
        """See `PoolExecutor`."""
        return [pulled.lease for pulled in self._jobs.values()]

    # -- see `WorkerExecutor`

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """See `WorkerExecutor`: the program decides how many jobs it takes."""
        return {}

    @property
    def in_flight(self) -> int:
        """See `WorkerExecutor`."""
        return len(self._jobs)

    def runs_jobs_of(self, pool: WorkedPool) -> bool:
        """See `WorkerExecutor`: the program takes the jobs of its pool."""
        return True

    def in_loop(self) -> str | None:
        """See `WorkerExecutor`: the program's own task."""
        task = asyncio.current_task(self.loop)
        return None if task is None else task.get_name()

    def holds(self, id: str) -> bool:
        """See `WorkerExecutor`."""
        with suppress(ValueError):
            return UUID(id) in self._jobs
        return False

    def jobs_of(self, names: Collection[str]) -> list[UUID]:
        """See `WorkerExecutor`."""
        return [id for id, pulled in self._jobs.items() if pulled.claimed.name in names]

    async def run(self) -> None:
        """Release jobs for which the program does not ask in time, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_FOR_LATE_S)
            now = time.monotonic()
            self.give_back([pulled.claimed.id for pulled in list(self.waiting) if pulled.too_late_at <= now])

    def release_waiting(self) -> None:
        """See `WorkerExecutor`."""
        self.give_back([pulled.claimed.id for pulled in list(self.waiting)])

    async def finished(self, grace: float | None) -> bool:
        """See `WorkerExecutor`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._jobs:
                    self._emptied.clear()
                    await self._emptied.wait()
        return not self._jobs

    async def stop_handlers(self) -> None:
        """See `WorkerExecutor`. The program is told by `job.cancelled`."""
        self.release_all()

    def close(self) -> None:
        """Wake the callers that wait for a settlement, since no more are written."""
        for ending in self._ending:
            ending.cancel()
        for pulled in [*self._settling.values(), *self._jobs.values()]:
            pulled.written("stale")

    def _written(self, results: Sequence[Settlement], outcomes: Mapping[UUID, str]) -> None:
        for result in results:
            pulled = self._settling.pop(result, None)
            if pulled is None:
                continue
            if self._jobs.get(result.id) is pulled:
                del self._jobs[result.id]
            pulled.written(outcomes.get(result.id))
        self._tell_of_room()
        self._look_whether_empty()

    def _tell_of_room(self) -> None:
        for tell in self.on_room:
            tell()

    def _look_whether_empty(self) -> None:
        if not self._jobs:
            self._emptied.set()
