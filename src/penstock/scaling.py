"""Scaling: from how long jobs wait and how fast they went of late to how many workers there should be. Pure.

Little's law with the recent past as the guess of the near future: workers finish `finished_per_s` together, so a backlog of
`ready` jobs takes `ready / finished_per_s`; to have it take `wait_s` the workers must be that many times more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf


@dataclass(frozen=True, slots=True)
class Load:
    """How a job type is doing: `busy_s` is the time that handlers ran in the last `over_s` seconds."""

    name: str
    ready: int
    in_progress: int
    oldest_ready_s: float | None
    finished: int
    over_s: float
    workers: int
    most_workers: int | None


@dataclass(frozen=True, slots=True)
class ScaleAdvice:
    """What to do about a job type.

    Attributes:
        name: The job type.
        ready: Jobs that could run now.
        oldest_ready_s: How long the oldest of them has waited; None: none waits. This is the queueing delay.
        finished_per_s: Jobs finished per second of late.
        drain_s: How long what is ready takes at that rate; None: nothing finished of late.
        workers: Worker processes of the type now.
        advised: How many there should be.
    """

    name: str
    ready: int
    oldest_ready_s: float | None
    finished_per_s: float
    drain_s: float | None
    workers: int
    advised: int


def advise(load: Load, wait_s: float) -> ScaleAdvice:
    """Advice for one job type.

    Args:
        load: How it is doing.
        wait_s: How long a job should wait at most.
    """
    rate = load.finished / load.over_s
    drain_s = load.ready / rate if rate > 0 else None
    workers = max(load.workers, 1)
    waits = load.oldest_ready_s or 0.0
    if load.ready == 0 and load.in_progress == 0 and load.finished == 0:
        advised = 1
    elif drain_s is None:
        # Nothing finished yet: only a longer wait tells that there are too few.
        advised = workers + 1 if waits > wait_s else workers
    elif drain_s > wait_s or waits > wait_s:
        # At most twice as many in one step: the guess is a guess.
        advised = ceil(workers * min(max(drain_s, waits) / wait_s, 2))
    elif drain_s < wait_s / 4 and waits < wait_s / 4:
        advised = max(1, workers - 1)
    else:
        advised = workers
    if load.most_workers is not None:
        advised = min(advised, load.most_workers)
    return ScaleAdvice(load.name, load.ready, load.oldest_ready_s, rate, drain_s, load.workers, max(advised, 1))


@dataclass(slots=True)
class Autoscale:
    """How many workers one machine should run, step by step. Times are seconds of a monotonic clock.

    More come at once; fewer only after fewer would have done for a while, one at a time. After each step it waits until the
    advice can show what came of it.

    Attributes:
        low: The fewest.
        high: The most.
        settle_s: Pause after each step.
        patience_s: For how long fewer must do before the first one goes.
    """

    low: int
    high: int
    settle_s: float
    patience_s: float
    _stepped_at: float = field(default=-inf, init=False)
    _fewer_since: float | None = field(default=None, init=False)

    def decide(self, advice: Sequence[ScaleAdvice], local: int, now: float) -> int:
        """How many there should be now.

        Args:
            advice: For the types that these workers work on; none: unknown, all stays as it is.
            local: How many there are here. Workers elsewhere get the same advice, and each machine does its share.
            now: The time.
        """
        wanted = min(max(self._share(advice, local), self.low), self.high)
        if wanted >= local:
            self._fewer_since = None
        elif self._fewer_since is None:
            self._fewer_since = now
        if not self.low <= local <= self.high:
            return min(max(local, self.low), self.high)
        if now - self._stepped_at < self.settle_s:
            return local
        if wanted > local:
            self._stepped_at = now
            return wanted
        if self._fewer_since is not None and now - self._fewer_since >= self.patience_s:
            self._stepped_at = now
            return local - 1
        return local

    @staticmethod
    def _share(advice: Sequence[ScaleAdvice], local: int) -> int:
        if not advice:
            return local
        # The type that needs most decides.
        factor = max(one.advised / max(one.workers, 1) for one in advice)
        return ceil(local * factor) if factor >= 1 else int(local * factor)
