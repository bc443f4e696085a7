"""Scaling advice: the number of workers that the recent queueing delay and throughput call for. Pure functions.

The advice applies Little's law and takes the recent past as the estimate of the near future: all workers together finish
`finished_per_s`, so a backlog of `ready` jobs takes `ready / finished_per_s`. To finish it within `wait_s`, the number of
workers must grow by the ratio of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from penstock.core.records import example


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a job type: its ready and running jobs, and those that finished in the last `over_s` seconds.

    `most_workers`: how many workers could be busy, by the concurrency of the type or the slots of the pool; None: any number.
    """

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
    """The advised number of workers of a job type.

    Attributes:
        name: Name of the job type.
        ready: Number of jobs that could run now; 0 while the type is paused.
        oldest_ready_s: Queueing delay: how long the oldest ready job has waited; None: no job waits.
        finished_per_s: Jobs finished per second recently.
        drain_s: How long the ready jobs take at that rate; None: no job finished recently.
        workers: Current number of worker processes of the type.
        advised: Advised number of worker processes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "name": "fibonacci", "ready": 1200, "oldest_ready_s": 8.5, "finished_per_s": 100.0, "drain_s": 12.0, "workers": 2,
        "advised": 4,
    })  # fmt: skip

    name: str
    ready: int
    oldest_ready_s: Annotated[float | None, Field(description="How long the oldest job has lacked a worker; null: none does.")]
    finished_per_s: float
    drain_s: Annotated[float | None, Field(description="How long what waits takes at that rate; null: nothing finished of late.")]
    workers: int
    advised: int


def advise(load: Load, wait_s: float) -> ScaleAdvice:
    """Advice for one job type.

    Args:
        load: Load of the job type.
        wait_s: Longest time that a job should wait, in seconds.
    """
    rate = load.finished / load.over_s
    drain_s = load.ready / rate if rate > 0 else None
    workers = max(load.workers, 1)
    waits = load.oldest_ready_s or 0.0
    if load.ready == 0 and load.in_progress == 0 and load.finished == 0:
        advised = 1
    elif drain_s is None:
        # No job has finished yet: only a longer wait shows that there are too few workers.
        advised = workers + 1 if waits > wait_s else workers
    elif drain_s > wait_s or waits > wait_s:
        # At most twice as many in one step, since the estimate is rough.
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
    """Decides how many workers one machine runs, step by step. Times are seconds of a monotonic clock.

    It adds workers at once. It removes them one at a time, and only after fewer workers would have sufficed for a while. After
    each step it waits until the advice can reflect the change.

    Attributes:
        low: Minimum number of workers.
        high: Maximum number of workers.
        settle_s: Pause after each step.
        cooldown_s: For how long fewer workers must suffice before the first one is removed.
    """

    low: int
    high: int
    settle_s: float
    cooldown_s: float
    _stepped_at: float = field(default=-inf, init=False)
    _fewer_since: float | None = field(default=None, init=False)

    def decide(self, advice: Sequence[ScaleAdvice], local: int, now: float) -> int:
        """The number of workers that this machine should run now.

        Args:
            advice: Advice for the job types of these workers; empty: unknown, so the number stays as it is.
            local: Number of workers of this machine. Other machines get the same advice, and each contributes its share.
            now: Current time.
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
        if self._fewer_since is not None and now - self._fewer_since >= self.cooldown_s:
            self._stepped_at = now
            return local - 1
        return local

    @staticmethod
    def _share(advice: Sequence[ScaleAdvice], local: int) -> int:
        if not advice:
            return local
        # The type that needs the most workers decides.
        factor = max(one.advised / max(one.workers, 1) for one in advice)
        return ceil(local * factor) if factor >= 1 else int(local * factor)
