"""Marks: below which number of a ready line there is nothing left to claim.

Settled jobs stay in the index as dead entries until vacuum may remove them, and one long transaction anywhere in the
database holds vacuum off. A claim that starts behind them does not pay for them. But a number can also be missing because
the transaction that drew it has not committed yet, so a mark may only pass a number when that can no longer be.

Every transaction takes its xid before it draws numbers. So when a claim saw number S, with `ceiling` the next xid at that
moment, all numbers up to S belong to xids below the ceiling; and when a later claim reports a `horizon` (the oldest xid
still running) of at least that ceiling, all of them are decided and that claim has seen what there is. From then on S is a
mark. What still turns up below a mark (a job handed back by a worker, or locked just then) is found by a sweep: a claim
without marks, made at intervals and whenever a notification asks for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.job import ClaimedJob

_SWEEP_EVERY_S = 1.0
_SWEEP_SHARE = 20.0  # a sweep may take at most a twentieth of the time
_PATIENCE_S = 0.1
_MOST_PENDING = 512


class Marks:
    """The marks of one worker. Keys are (job type, priority); times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._marks: dict[tuple[str, int], int] = {}
        self._pending: dict[tuple[str, int], deque[tuple[int, int, float]]] = {}
        self._next_sweep = 0.0

    def for_claim(self, now: float) -> dict[str, dict[str, int]]:
        """The marks for the next claim, as the SQL function takes them; empty when it is time for a sweep."""
        if now >= self._next_sweep:
            return {}
        marks: dict[str, dict[str, int]] = {}
        for (name, priority), mark in self._marks.items():
            # A transaction that stays open for long holds the horizon: go past it, and leave what it may still
            # bring to the sweeps.
            for seq, _, seen_at in reversed(self._pending[name, priority]):
                if seen_at < now - _PATIENCE_S:
                    mark = max(mark, seq)
                    break
            marks.setdefault(name, {})[str(priority)] = mark
        return marks

    def claimed(self, jobs: Sequence[ClaimedJob], horizon: int, ceiling: int, now: float) -> None:
        """Learn from a claim."""
        highest: dict[tuple[str, int], int] = {}
        for job in jobs:
            lane = (job.name, job.priority)
            if job.seq > highest.get(lane, 0):
                highest[lane] = job.seq
        for lane, seq in highest.items():
            pending = self._pending.setdefault(lane, deque())
            confirmed = self._marks.setdefault(lane, 0)
            while pending and pending[0][1] <= horizon and pending[0][0] <= seq:
                confirmed = max(confirmed, pending.popleft()[0])
            self._marks[lane] = confirmed
            if not pending or seq > pending[-1][0]:
                pending.append((seq, ceiling, now))
            if len(pending) > _MOST_PENDING:
                pending.popleft()

    def swept(self, now: float, took: float) -> None:
        """A sweep found nothing (more): the next one is due a while later, longer when it was slow."""
        self._next_sweep = now + max(_SWEEP_EVERY_S, took * _SWEEP_SHARE)

    def sweep(self) -> None:
        """Something came back below the marks: let the next claim be a sweep."""
        self._next_sweep = 0.0
