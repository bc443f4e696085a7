"""Watermarks: below which number of a ready queue there is nothing left to claim.

Settled jobs stay in the index as dead entries until vacuum may remove them, and one long transaction anywhere in the
database holds vacuum off. A claim that starts behind them does not pay for them. But a number can also be missing because
the transaction that drew it has not committed yet, so a watermark may only pass a number when that can no longer be.

Every transaction takes its xid before it draws numbers. So when a claim saw number S, with `ceiling` the next xid at that
moment, all numbers up to S belong to xids below the ceiling; and when a later claim reports a `horizon` (the oldest xid
still running) of at least that ceiling, all of them are decided and that claim has seen what there is. From then on S is a
watermark. What still turns up below one (a job handed back by a worker, or locked just then) is found by a full scan: a claim
without watermarks, made at intervals and whenever a notification asks for it. A full scan of a worker that has few free places
takes only the first of these jobs; it lowers the watermark to where it stopped, so that the next claims take the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.jobs.models import ClaimedJob

_FULL_SCAN_EVERY_S = 1.0
_FULL_SCAN_SHARE = 20.0  # a full scan may take at most a twentieth of a processor
_HORIZON_WAIT_S = 0.1
_MOST_PENDING = 512


class Watermarks:
    """The watermarks of one worker, by job type and priority. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._watermarks: dict[tuple[str, int], int] = {}
        self._pending: dict[tuple[str, int], deque[tuple[int, int, float]]] = {}
        self._next_full_scan = 0.0

    def for_claim(self, now: float) -> dict[str, dict[str, int]]:
        """The watermarks for the next claim, as the SQL function takes them; empty when it is time for a full scan."""
        if now >= self._next_full_scan:
            return {}
        watermarks: dict[str, dict[str, int]] = {}
        for (name, priority), watermark in self._watermarks.items():
            # A transaction that stays open for long holds the horizon: go past it, and leave what it may still
            # bring to the full scans.
            for seq, _, seen_at in reversed(self._pending[name, priority]):
                if seen_at < now - _HORIZON_WAIT_S:
                    watermark = max(watermark, seq)
                    break
            watermarks.setdefault(name, {})[str(priority)] = watermark
        return watermarks

    def claimed(self, jobs: Sequence[ClaimedJob], horizon: int, ceiling: int, now: float) -> None:
        """Learn from a claim, whose jobs stand in the order of their numbers within each lease."""
        highest: dict[tuple[str, int], int] = {}
        # Of each lease, which is of one queue, the last job: to look closely at each of a thousand jobs would take long.
        for job in {job.lease: job for job in jobs}.values():
            queue = (job.name, job.priority)
            if job.seq > highest.get(queue, 0):
                highest[queue] = job.seq
        for queue, seq in highest.items():
            pending = self._pending.setdefault(queue, deque())
            confirmed = min(self._watermarks.setdefault(queue, 0), seq)
            while pending and pending[-1][0] > seq:
                # The claim stopped below: what it left up to there is still to be claimed.
                pending.pop()
            while pending and pending[0][1] <= horizon and pending[0][0] <= seq:
                confirmed = max(confirmed, pending.popleft()[0])
            self._watermarks[queue] = confirmed
            if not pending or seq > pending[-1][0]:
                pending.append((seq, ceiling, now))
            if len(pending) > _MOST_PENDING:
                pending.popleft()

    def scanned(self, now: float, cost_s: float) -> None:
        """A full scan found nothing (more): the next one is due a while later, longer when it was dear."""
        self._next_full_scan = now + max(_FULL_SCAN_EVERY_S, cost_s * _FULL_SCAN_SHARE)

    def full_scan(self) -> None:
        """Something came back below the watermarks: let the next claim be a full scan."""
        self._next_full_scan = 0.0
