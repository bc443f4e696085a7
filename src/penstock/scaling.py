"""Scaling advice: from how long jobs wait and how fast they went of late to how many workers there should be. Pure.

Little's law with the recent past as the guess of the near future: workers finish `finished_per_s` together, so a backlog of
`ready` jobs takes `ready / finished_per_s`; to have it take `wait_s` the workers must be that many times more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


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
        advised = min(ceil(workers * max(drain_s, waits) / wait_s), 2 * workers)
    elif drain_s < wait_s / 4 and waits < wait_s / 4:
        advised = max(1, workers - 1)
    else:
        advised = workers
    if load.most_workers is not None:
        advised = min(advised, load.most_workers)
    return ScaleAdvice(load.name, load.ready, load.oldest_ready_s, rate, drain_s, load.workers, max(advised, 1))
