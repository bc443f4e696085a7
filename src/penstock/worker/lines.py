"""Lines: the jobs of one key wait in a line of their own, and one of them runs at a time.

Between the claim of a pool and the runner. The database hands out the first jobs of a key, in order, to the owner of its slot
alone; here they are started one after the other. The next one starts when the one before has ended well, while that one's
result is on its way to the database: after a crash the jobs whose results were not written run again, in order.

A line closes when a job has to run again (or was lost): what waits behind it is handed back, and so is what is claimed for the
key before the database has all results of the line. The next claim then finds the failed job at the head of its key.

A claim always reads a key from its lowest visible number, also while jobs of the key are in hand here. What it returns goes
behind those: they were visible earlier, so their transactions committed earlier, whatever their numbers are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from uuid import UUID

from penstock.job import ClaimedJob, Outcome, Settlement
from penstock.waiting import happens

# A job that waited longer than this share of its lease is handed back: it would not have the time to run.
_LONGEST_WAIT = 0.25
_MOST_IN_HAND = 100


class _Line:
    __slots__ = ("closed", "half", "running", "slot", "turn_left", "unsettled", "waiting", "weight")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        # A list, since there are many lines and most are short.
        self.waiting: list[tuple[ClaimedJob, float]] = []
        self.running: dict[UUID, ClaimedJob] = {}
        self.unsettled: dict[UUID, Settlement] = {}
        self.closed = False
        self.half = 0
        self.weight = 1
        self.turn_left = 0

    @property
    def empty(self) -> bool:
        return not self.waiting and not self.running and not self.unsettled


class Lines:
    """The lines of one pool in one process.

    Args:
        concurrency: Jobs of one key at once; 1 keeps their order.
        blocking: Whether a job that is to be retried holds up its key.
        start: Starts a job that was claimed at a (monotonic) time, if at the last moment it still may; ahead of the jobs of
            other keys, when the turn of its key goes on.
        settle: Takes a result on its way to the database.
        may_work: Whether a slot is still this process's to work on.
        freed: Called when a key became free, so that its next jobs can be claimed.
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
        self._lines: dict[str, _Line] = {}
        self._asked_for: dict[str, _Line] = {}
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
        """Leases of the jobs in hand, settled ones too until that is written."""
        return set(self._leases.values())

    def holds(self, id: UUID) -> bool:
        """Whether a job is in one of the lines."""
        return id in self._of_job

    def submit(self, claimed: Sequence[tuple[ClaimedJob, int]], now: float, weights: Mapping[str, int] | None = None) -> None:
        """Take claimed jobs with their slots; `now` is the monotonic time before the claim.

        `weights` has the keys that get more than one job a turn.
        """
        mine = {slot for slot in {slot for _, slot in claimed} if self._may_work(slot)}
        keys: dict[str, None] = {}
        for job, slot in sorted(claimed, key=lambda pair: pair[0].seq):
            key = str(job.key)
            keys[key] = None
            line = self._lines.get(key)
            if line is None:
                line = self._lines[key] = _Line(slot)
            if self._asked_for and (asked_for := self._asked_for.get(key)) is not None and asked_for.closed:
                # The claim went past jobs that are to run again, in a line that has come and gone meanwhile.
                line.closed = True
            if job.id in self._of_job:
                # Its earlier attempt was taken away and has not ended here: what is in hand no longer counts, nor its order.
                self._close(line)
                self._settle(_handed_back(job))
                continue
            self._of_job[job.id] = key
            self._leases[job.id] = job.lease
            if line.closed or self._stopped or slot not in mine:
                self._release(line, job)
            else:
                line.waiting.append((job, now))
                line.half = len(line.waiting) // 2
        self._asked_for.clear()
        for key, weight in (weights or {}).items():
            if key in self._lines:
                self._lines[key].weight = weight
        for key in keys:
            self._advance(key)

    def in_hand(self) -> list[str]:
        """Keys whose lines run low: more of them may be claimed before what is in hand is settled.

        For the next claim, whose jobs `submit` gets; when a line has closed by then, what was claimed behind it is handed back.
        """
        self._asked_for.clear()
        if self.concurrency > 1:
            return []
        for key, line in self._lines.items():
            if line.half and not line.closed and len(line.waiting) <= line.half:
                self._asked_for[key] = line
                if len(self._asked_for) == _MOST_IN_HAND:
                    break
        return list(self._asked_for)

    def finished(self, result: Settlement) -> None:
        """A job ended, well or not; its result goes on to the database."""
        key = self._of_job[result.id]
        line = self._lines[key]
        line.running.pop(result.id, None)
        line.unsettled[result.id] = result
        if (began := self._began.pop(result.id, None)) is not None:
            self.duration_s += 0.1 * (time.monotonic() - began - self.duration_s)
        again = result.outcome is Outcome.RELEASED or (self.blocking and result.outcome is Outcome.FAILED)
        self._settle(result)
        if again:
            self._close(line)
        elif line.half and len(line.waiting) == line.half:
            # Time to claim what follows, before the line stands still.
            self._freed()
        self._advance(key)

    def written(self, results: Iterable[Settlement], outcomes: Mapping[UUID, str]) -> None:
        """Results are in the database; `outcomes` has those that are not plain successes."""
        for result in results:
            key = self._of_job.get(result.id)
            # A job that was lost meanwhile, and may even have been claimed anew, is not this one.
            if key is None or self._lines[key].unsettled.get(result.id) is not result:
                continue
            line = self._lines[key]
            del line.unsettled[result.id], self._of_job[result.id], self._leases[result.id]
            if outcomes.get(result.id) == "stale":
                # It was taken away, and those behind it may have been too.
                self._close(line)
            self._tidy(key)
        self._freed()

    def release_waiting(self, slot: int | None = None) -> None:
        """Hand back what did not start, in one slot or (for good) in all."""
        if slot is None:
            self._stopped = True
        for key, line in list(self._lines.items()):
            if slot is None or line.slot == slot:
                self._close(line)
                self._tidy(key)

    async def drained(self, slot: int, within: float) -> bool:
        """Wait until nothing of a slot runs or is unsettled. False when `within` seconds were not enough."""
        deadline = time.monotonic() + within
        while any(line.slot == slot for line in self._lines.values()):
            self._changed.clear()
            if time.monotonic() >= deadline or not await happens(self._changed, deadline - time.monotonic()):
                return not any(line.slot == slot for line in self._lines.values())
        return True

    def lease_s(self, slot: int) -> float:
        """The longest lease, in seconds, of the jobs of a slot that run: none of them runs longer unless it extends its lease."""
        return max(
            (job.lease_s for line in self._lines.values() if line.slot == slot for job in line.running.values()), default=0.0
        )

    def running(self, slot: int) -> list[UUID]:
        """The jobs of a slot that run."""
        return [id for line in self._lines.values() if line.slot == slot for id in line.running]

    def drop(self, slot: int) -> list[UUID]:
        """Forget the jobs of a slot that belong to others now. Returns those that run, to be stopped without settling."""
        dropped = []
        for key, line in list(self._lines.items()):
            if line.slot == slot:
                dropped += list(line.running)
                for id in [job.id for job, _ in line.waiting] + list(line.running) + list(line.unsettled):
                    self._of_job.pop(id, None)
                    self._leases.pop(id, None)
                    self._began.pop(id, None)
                line.closed = True
                del self._lines[key]
        self._changed.set()
        return dropped

    def _advance(self, key: str) -> None:
        line = self._lines.get(key)
        if line is None:
            return
        while line.waiting and len(line.running) < self.concurrency:
            job, claimed_at = line.waiting.pop(0)
            now = time.monotonic()
            if not self._may_work(line.slot) or now - claimed_at > job.lease_s * _LONGEST_WAIT:
                line.waiting.insert(0, (job, claimed_at))
                self._close(line)
                break
            line.running[job.id] = job
            self._began[job.id] = now
            ahead = line.turn_left > 0
            line.turn_left = line.turn_left - 1 if ahead else line.weight - 1
            self._start(job, claimed_at, partial(self._may_work, line.slot), ahead)
        self._tidy(key)

    def _close(self, line: _Line) -> None:
        line.closed = True
        waiting, line.waiting = line.waiting, []
        for job, _ in waiting:
            self._release(line, job)

    def _release(self, line: _Line, job: ClaimedJob) -> None:
        line.unsettled[job.id] = _handed_back(job)
        self._settle(line.unsettled[job.id])

    def _tidy(self, key: str) -> None:
        if self._lines[key].empty:
            del self._lines[key]
            self._changed.set()


def _handed_back(job: ClaimedJob) -> Settlement:
    return Settlement(job.id, job.attempts, job.lease, Outcome.RELEASED)
