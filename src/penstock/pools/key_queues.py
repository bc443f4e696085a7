"""Key queues: the jobs of one key wait in a queue of their own, and one of them runs at a time.

They stand between the claim of a pool and the executor. The database gives the first jobs of a key, in order, only to the owner
of its slot; the key queue starts them one after the other. A job starts when the one before has succeeded, while that result is
still on its way to the database: after a crash, the jobs whose results were not written run again, in order.

A key queue closes when a job has to run again, or was lost. It then releases the jobs that wait behind it, and those that are
claimed for the key before the database has all results of the queue. The next claim finds the failed job at the head of its key.

A claim always reads a key from its lowest visible number, also while this process holds jobs of the key. The jobs that it returns
go behind those: these were visible earlier, so their transactions committed earlier, whatever their numbers are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from uuid import UUID

from penstock.core.polling import wait_for_event
from penstock.jobs.models import ClaimedJob, Outcome, Settlement

# A job that waited longer than this share of its lease is released: too little time is left to run it.
_LONGEST_WAIT = 0.25
_MOST_ASKED_FOR = 100


class _KeyQueue:
    __slots__ = ("closed", "half", "quantum", "quantum_left", "running", "slot", "unsettled", "waiting")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        # A list, since there are many queues and most are short.
        self.waiting: list[tuple[ClaimedJob, float]] = []
        self.running: dict[UUID, ClaimedJob] = {}
        self.unsettled: dict[UUID, Settlement] = {}
        self.closed = False
        self.half = 0
        self.quantum = 1
        self.quantum_left = 0

    @property
    def empty(self) -> bool:
        return not self.waiting and not self.running and not self.unsettled


class KeyQueues:
    """The key queues of one pool in one process.

    Args:
        concurrency: The largest number of running jobs of one key; 1 keeps their order.
        blocking: Whether a job that waits for its retry blocks its key.
        start: See `PoolExecutor.start`.
        settle: Passes a result on to the completer.
        may_work: Whether this process may still work on a slot.
        freed: Called when more jobs of a key can be claimed.
    """

    def __init__(
        self,
        concurrency: int,
        blocking: bool,
        start: Callable[[ClaimedJob, float, Callable[[], bool], bool], None],
        settle: Callable[[Settlement], None],
        may_work: Callable[[int], bool],
        freed: Callable[[], None],
    ) -> None:
        self.concurrency = concurrency
        self.blocking = blocking
        self._start = start
        self._settle = settle
        self._may_work = may_work
        self._freed = freed
        self._queues: dict[str, _KeyQueue] = {}
        self._asked_for: dict[str, _KeyQueue] = {}
        self._of_job: dict[UUID, str] = {}
        self._leases: dict[UUID, int] = {}
        self._began: dict[UUID, float] = {}
        self._stopped = False
        self._changed = asyncio.Event()
        self.duration_s = 0.0

    def __len__(self) -> int:
        return len(self._of_job)

    @property
    def leases(self) -> set[int]:
        """Leases of the jobs in the queues, also of finished ones until their results are written."""
        return set(self._leases.values())

    def holds(self, id: UUID) -> bool:
        """Whether a job is in one of the queues."""
        return id in self._of_job

    def submit(self, claimed: Sequence[tuple[ClaimedJob, int]], now: float, quanta: Mapping[str, int] | None = None) -> None:
        """Accept claimed jobs with their slots; `now` is the monotonic time before the claim.

        `quanta` holds the quanta that are larger than 1.
        """
        mine = {slot for slot in {slot for _, slot in claimed} if self._may_work(slot)}
        keys: dict[str, None] = {}
        for job, slot in sorted(claimed, key=lambda pair: pair[0].seq):
            key = str(job.key)
            keys[key] = None
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = _KeyQueue(slot)
            if self._asked_for and (asked_for := self._asked_for.get(key)) is not None and asked_for.closed:
                # The claim passed over jobs that have to run again: the queue that held them has closed and is gone.
                queue.closed = True
            if job.id in self._of_job:
                # The job was lost and claimed again while its earlier attempt still runs here: the order of the queue is lost.
                self._close(queue)
                self._settle(_handed_back(job))
                continue
            self._of_job[job.id] = key
            self._leases[job.id] = job.lease
            if queue.closed or self._stopped or slot not in mine:
                self._release(queue, job)
            else:
                queue.waiting.append((job, now))
                queue.half = len(queue.waiting) // 2
        self._asked_for.clear()
        for key, quantum in (quanta or {}).items():
            if key in self._queues:
                self._queues[key].quantum = quantum
        for key in keys:
            self._advance(key)

    def running_low(self) -> list[str]:
        """Keys whose queues run low, so that the next claim may take more of their jobs before the held ones are settled.

        `submit` receives the jobs of that claim; it releases those that were claimed behind a queue that has closed meanwhile.
        """
        self._asked_for.clear()
        if self.concurrency > 1:
            return []
        for key, queue in self._queues.items():
            if queue.half and not queue.closed and len(queue.waiting) <= queue.half:
                self._asked_for[key] = queue
                if len(self._asked_for) == _MOST_ASKED_FOR:
                    break
        return list(self._asked_for)

    def finished(self, result: Settlement) -> None:
        """Accept the result of a job, pass it on to the completer, and start the next job of the key."""
        key = self._of_job[result.id]
        queue = self._queues[key]
        queue.running.pop(result.id, None)
        queue.unsettled[result.id] = result
        if (began := self._began.pop(result.id, None)) is not None:
            self.duration_s += 0.1 * (time.monotonic() - began - self.duration_s)
        again = result.outcome is Outcome.RELEASED or (
            self.blocking and result.outcome in (Outcome.FAILED, Outcome.SNOOZED, Outcome.SUSPENDED)
        )
        self._settle(result)
        if again:
            self._close(queue)
        elif queue.half and len(queue.waiting) == queue.half:
            # Claim the next jobs before the queue is empty.
            self._freed()
        self._advance(key)

    def written(self, results: Iterable[Settlement], outcomes: Mapping[UUID, str]) -> None:
        """Remove jobs whose results are in the database; `outcomes` has those that are not plain successes."""
        for result in results:
            key = self._of_job.get(result.id)
            # A job that was lost meanwhile, and perhaps claimed again, has another settlement.
            if key is None or self._queues[key].unsettled.get(result.id) is not result:
                continue
            queue = self._queues[key]
            del queue.unsettled[result.id], self._of_job[result.id], self._leases[result.id]
            if outcomes.get(result.id) == "stale":
                # The job was lost, and those behind it may have been lost too.
                self._close(queue)
            self._tidy(key)
        self._freed()

    def release_waiting(self, slot: int | None = None) -> None:
        """Release the jobs that have not started, in one slot; None: in all slots."""
        for key, queue in list(self._queues.items()):
            if slot is None or queue.slot == slot:
                self._close(queue)
                self._tidy(key)

    def stop(self) -> None:
        """Release the jobs that have not started, and those that are claimed later."""
        self._stopped = True
        self.release_waiting()

    def release_keys(self, keys: Iterable[str]) -> list[UUID]:
        """Release the jobs of these keys that have not started. Returns those that the executor has."""
        handed_over: list[UUID] = []
        for key in keys:
            if (queue := self._queues.get(key)) is not None:
                self._close(queue)
                handed_over += queue.running
                self._tidy(key)
        return handed_over

    async def drained(self, slot: int, within: float) -> bool:
        """Wait until no job of a slot runs or is unsettled. Returns False when `within` seconds were not enough."""
        deadline = time.monotonic() + within
        while any(queue.slot == slot for queue in self._queues.values()):
            self._changed.clear()
            if time.monotonic() >= deadline or not await wait_for_event(self._changed, deadline - time.monotonic()):
                return not any(queue.slot == slot for queue in self._queues.values())
        return True

    def lease_s(self, slot: int) -> float:
        """The longest lease, in seconds, of the running jobs of a slot: none runs longer unless it extends its lease."""
        return max(
            (job.lease_s for queue in self._queues.values() if queue.slot == slot for job in queue.running.values()), default=0.0
        )

    def running(self, slot: int | None = None) -> list[UUID]:
        """The running jobs of a slot; None: of all slots."""
        return [id for queue in self._queues.values() if slot is None or queue.slot == slot for id in queue.running]

    def drop(self, slot: int) -> list[UUID]:
        """Forget the jobs of a slot, which belong to others now. Returns the running ones, to be stopped without settling."""
        dropped = []
        for key, queue in list(self._queues.items()):
            if queue.slot == slot:
                dropped += list(queue.running)
                for id in [job.id for job, _ in queue.waiting] + list(queue.running) + list(queue.unsettled):
                    self._of_job.pop(id, None)
                    self._leases.pop(id, None)
                    self._began.pop(id, None)
                queue.closed = True
                del self._queues[key]
        self._changed.set()
        return dropped

    def _advance(self, key: str) -> None:
        queue = self._queues.get(key)
        if queue is None:
            return
        while queue.waiting and len(queue.running) < self.concurrency:
            job, claimed_at = queue.waiting.pop(0)
            now = time.monotonic()
            if not self._may_work(queue.slot) or now - claimed_at > job.lease_s * _LONGEST_WAIT:
                queue.waiting.insert(0, (job, claimed_at))
                self._close(queue)
                break
            queue.running[job.id] = job
            self._began[job.id] = now
            ahead = queue.quantum_left > 0
            queue.quantum_left = queue.quantum_left - 1 if ahead else queue.quantum - 1
            self._start(job, claimed_at, partial(self._may_work, queue.slot), ahead)
        self._tidy(key)

    def _close(self, queue: _KeyQueue) -> None:
        queue.closed = True
        waiting, queue.waiting = queue.waiting, []
        for job, _ in waiting:
            self._release(queue, job)

    def _release(self, queue: _KeyQueue, job: ClaimedJob) -> None:
        queue.unsettled[job.id] = _handed_back(job)
        self._settle(queue.unsettled[job.id])

    def _tidy(self, key: str) -> None:
        if self._queues[key].empty:
            del self._queues[key]
            self._changed.set()


def _handed_back(job: ClaimedJob) -> Settlement:
    return Settlement(job.id, job.attempt, job.lease, Outcome.RELEASED, None, None, job.name)
