"""What a process counts of the attempts that end: numbers by outcome, and the times of each, in buckets.

The times of each job are not observed one by one: that would cost a worker a tenth of its throughput. The executor notes how long
each attempt ran as a plain number, which keeps no object of the job in memory, and the numbers are folded into the buckets many
at a time, by functions that are written in C. A server that settles what ran elsewhere gets the times of a batch from the
database, with the statement that it needs anyway.

There is one tally for each database, see `of`. Every minute what it holds is written there (`penstock.worker.rates`); a meter
that follows it keeps the same times for Prometheus. Names are bounded: the first thousand job types have counts of their own, and
all others share those of the name "others".
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol
from weakref import WeakKeyDictionary

OTHERS = "others"
TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
"""Bounds of the buckets, in seconds; one more bucket has what is longer. `penstock.rates` in the database has the same."""
_MOST_NAMES = 1_000
# Of the attempts that are folded together the waits of the first ones are counted, then every 32nd one, as a sample.
_FIRST_WAITS = 32
# While jobs are settled, so many attempts are folded together: folding a few costs as much as folding many.
_FOLDED_TOGETHER = 512
# A callback for a job that does not exist may name any type.
REFUSED = frozenset(("stale", "unknown"))
# What was handed back may not have been started.
_UNTIMED = REFUSED | {"released"}


class Follower(Protocol):
    """Something else that receives the times of a tally."""

    def ran(self, name: str, outcome: str, runs: Sequence[float]) -> None:
        """Attempts of a type ended with an outcome: how long they ran, sorted."""

    def waited(self, name: str, outcome: str, waits: Sequence[float], weight: float) -> None:
        """How long some of them waited, sorted; each stands for `weight` attempts."""


class BoundedNames:
    """Names as values of a label: the first ones that come as they are, all others as "others".

    Args:
        most: Number of names that have a value of their own.
    """

    def __init__(self, most: int = _MOST_NAMES) -> None:
        self._most = most
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        """The value of the label for a name."""
        if name in self._names:
            return name
        if len(self._names) < self._most:
            self._names.add(name)
            return name
        return OTHERS


def buckets() -> list[float]:
    """A histogram: the counts of each bucket, the last one for what is longer than all bounds, then the sum."""
    return [0.0] * (len(TIMES) + 2)


def observe(series: list[float], times: Sequence[float], weight: float = 1.0) -> None:
    """Count sorted times, each as `weight` times."""
    series[-1] += sum(times) * weight
    begin = 0
    while begin < len(times):
        # As many as are in the bucket of the shortest of those that are left.
        bucket = bisect_left(TIMES, times[begin])
        end = bisect_right(times, TIMES[bucket], begin) if bucket < len(TIMES) else len(times)
        series[bucket] += (end - begin) * weight
        begin = end


@dataclass(slots=True)
class TypeTally:
    """What is counted of one job type.

    Attributes:
        outcomes: Number of attempts by what became of the job.
        waits: Histogram of the times from when jobs could run to their start.
        runs: Histogram of the times that attempts ran.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=buckets)
    runs: list[float] = field(default_factory=buckets)


class Attempts:
    """The times of the attempts of one job type with one outcome that are not folded yet."""

    __slots__ = ("_runs", "_waits")

    def __init__(self) -> None:
        self._runs = array("d")
        # Converting the times of a job is expensive: that is left to the fold, and done for a sample.
        self._waits: list[tuple[datetime, datetime, float]] = []

    def ended(self, run_after: datetime, created_at: datetime, since: float, until: float) -> None:
        """Note an attempt that ended: the time before which the job could not run and that of its enqueue, by the clock of the
        database; when the attempt got its place and when it ended, by the monotonic clock.
        """
        runs = self._runs
        runs.append(until - since)
        if (number := len(runs)) <= _FIRST_WAITS or not number % 32:
            self._waits.append((run_after, created_at, since))

    def take(self) -> tuple[Sequence[float], Sequence[tuple[datetime, datetime, float]]]:
        """How long they ran, and the sample of what says how long they waited; other threads may note attempts meanwhile."""
        waits = self._waits[:]
        runs = self._runs[:]
        del self._runs[: len(runs)], self._waits[: len(waits)]
        return runs, waits


class Tally:
    """The attempts that ended in this process and belong to one database, since they were last taken."""

    def __init__(self) -> None:
        self._attempts: dict[tuple[str, str], Attempts] = {}
        self._noted_names = BoundedNames()
        self._unfolded = 0
        self._types: dict[str, TypeTally] = {}
        self._names = BoundedNames()
        self._followers: list[Follower] = []
        self._folding = threading.Lock()
        # From the monotonic clock of this machine to the clock of the database.
        self._offset_s = time.time() - time.monotonic()

    def clock_is_ahead(self, seconds: float) -> None:
        """The database's clock is this much ahead of this machine's, now."""
        self._offset_s = time.time() - time.monotonic() + seconds

    def follow(self, follower: Follower) -> None:
        """Pass the times on to a follower from now on."""
        if follower not in self._followers:
            self._followers.append(follower)

    def leave(self, follower: Follower) -> None:
        """Stop passing the times on to a follower."""
        self._followers.remove(follower)

    def settled(self, names: Sequence[str], others: Sequence[tuple[str, str]]) -> None:
        """A batch was settled: the job type of each result, and type and outcome of those that are not plain successes."""
        succeeded, unlike = Counter(names), Counter(others)
        with self._folding:
            for (name, outcome), results in unlike.items():
                succeeded[name] -= results
                if outcome not in REFUSED:
                    self._of(name).outcomes[outcome] += results
            for name, results in succeeded.items():
                if results:
                    self._of(name).outcomes["succeeded"] += results
        self._unfolded += len(names)
        if self._unfolded >= _FOLDED_TOGETHER:
            self.fold()

    def timed(self, ended: Iterable[tuple[str, str, float, float]]) -> None:
        """Attempts that ran elsewhere were settled: type and outcome of each, and for how many seconds it waited and ran."""
        by_type: dict[str, list[tuple[float, float]]] = {}
        for name, outcome, wait_s, run_s in ended:
            if outcome not in _UNTIMED:
                by_type.setdefault(name, []).append((max(wait_s, 0.0), max(run_s, 0.0)))
        with self._folding:
            for name, times in by_type.items():
                waits, runs = zip(*times, strict=True)
                of_type = self._of(name)
                observe(of_type.waits, sorted(waits))
                observe(of_type.runs, sorted(runs))

    def attempts(self, name: str, outcome: str) -> Attempts:
        """Where the executor notes the attempts of a type that end with an outcome."""
        return self._attempts.setdefault((self._noted_names.label(name), outcome), Attempts())

    def fold(self) -> None:
        """Count the attempts that ended. May be called from any thread."""
        with self._folding:
            self._unfolded = 0
            for (name, outcome), attempts in list(self._attempts.items()):
                runs, waits = attempts.take()
                if runs:
                    self._count(name, outcome, sorted(runs), waits)

    def take(self) -> dict[str, TypeTally]:
        """What was counted since the last call, by job type."""
        self.fold()
        with self._folding:
            taken, self._types, self._names = self._types, {}, BoundedNames()
        return taken

    def _of(self, name: str) -> TypeTally:
        label = self._names.label(name)
        found = self._types.get(label)
        if found is None:
            found = self._types[label] = TypeTally()
        return found

    def _count(self, name: str, outcome: str, runs: Sequence[float], sample: Sequence[tuple[datetime, datetime, float]]) -> None:
        """Count attempts of one type with one outcome."""
        waits = [
            max(since + self._offset_s - max(run_after, created_at).timestamp(), 0.0) for run_after, created_at, since in sample
        ]
        first, later = sorted(waits[:_FIRST_WAITS]), sorted(waits[_FIRST_WAITS:])
        of_type = self._of(name)
        observe(of_type.runs, runs)
        for follower in self._followers:
            follower.ran(name, outcome, runs)
        # Each of the later ones stands for those between them.
        weights = (1.0, (len(runs) - len(first)) / len(later)) if later else (len(runs) / max(len(first), 1), 0.0)
        for times, weight in zip((first, later), weights, strict=True):
            if times:
                observe(of_type.waits, times, weight)
                for follower in self._followers:
                    follower.waited(name, outcome, times, weight)


_tallies: WeakKeyDictionary[object, Tally] = WeakKeyDictionary()


def of(database: object) -> Tally:
    """The tally of this process for a database."""
    found = _tallies.get(database)
    if found is None:
        found = _tallies[database] = Tally()
    return found
