"""Rates: how many attempts ended in each minute of the last hour and each quarter of the last day, and how long they took.

Processes count (`penstock.core.tally`) and write once a minute; the histograms of several rows and processes can be added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import orjson

from penstock.core.tally import TIMES, TypeTally
from penstock.postgres.database import Database

_FAILED = ("failed", "quarantined")
MINUTE = timedelta(minutes=1)
QUARTER = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Rate:
    """The attempts that ended in some time, of one job type or several.

    Attributes:
        succeeded: Attempts that succeeded.
        failed: Attempts after which the job was archived as failed.
        retried: Attempts that failed, after which the job went back to the queue.
        others: Attempts that ended otherwise: cancelled, released, snoozed, suspended.
        waits: Attempts by the time that their jobs waited, in the buckets of `TIMES`, the last one for what is longer.
        runs: Attempts by the time that they ran.
        wait_s: Sum of the times that are in `waits`.
        run_s: Sum of the times that are in `runs`.
    """

    succeeded: int
    failed: int
    retried: int
    others: int
    waits: Sequence[float]
    runs: Sequence[float]
    wait_s: float
    run_s: float

    @property
    def finished(self) -> int:
        """Jobs that succeeded or failed."""
        return self.succeeded + self.failed

    def wait(self, share: float) -> float | None:
        """A percentile of the waits, see `percentile`."""
        return percentile(self.waits, share)

    def run(self, share: float) -> float | None:
        """A percentile of the run times, see `percentile`."""
        return percentile(self.runs, share)


@dataclass(frozen=True, slots=True)
class RateAt:
    """What ended in a minute or quarter of an hour that began at `at`."""

    at: datetime
    rate: Rate


@dataclass(frozen=True, slots=True)
class TypeRate:
    """What ended of a job type since `since`."""

    name: str
    rate: Rate
    since: datetime


NOTHING = Rate(0, 0, 0, 0, [0.0] * (len(TIMES) + 1), [0.0] * (len(TIMES) + 1), 0.0, 0.0)


def percentile(buckets: Sequence[float], share: float) -> float | None:
    """The time that a share of what is in a histogram did not exceed: within its bucket in proportion, beyond the last bound that
    bound. None: nothing is in it.
    """
    wanted = share * sum(buckets)
    if not wanted:
        return None
    seen, below = 0.0, 0.0
    for bound, count in zip(TIMES, buckets, strict=False):
        if count and seen + count >= wanted:
            return below + (bound - below) * (wanted - seen) / count
        seen, below = seen + count, bound
    return float(TIMES[-1])


def total(rates: Iterable[Rate]) -> Rate:
    """All of them together."""
    found = [NOTHING, *rates]
    return Rate(
        *(sum(getattr(one, name) for one in found) for name in ("succeeded", "failed", "retried", "others")),
        *([sum(bucket) for bucket in zip(*(getattr(one, name) for one in found), strict=True)] for name in ("waits", "runs")),
        *(sum(getattr(one, name) for one in found) for name in ("wait_s", "run_s")),
    )


def rate_of(tally: TypeTally) -> Rate:
    """What a process counted of a job type."""
    outcomes, waits, runs = tally.outcomes, tally.waits, tally.runs
    named = {"succeeded": outcomes["succeeded"], "failed": sum(outcomes[one] for one in _FAILED), "retried": outcomes["retried"]}
    others = outcomes.total() - sum(named.values())
    return Rate(**named, others=others, waits=waits[:-1], runs=runs[:-1], wait_s=waits[-1], run_s=runs[-1])


_PERIODS = (("hour", timedelta(hours=1), MINUTE, "minute"), ("day", timedelta(days=1), QUARTER, "quarter of an hour"))


@dataclass(frozen=True, slots=True)
class Period:
    """What ended in a period.

    Attributes:
        name: `hour` or `day`.
        step: What a part of it is.
        whole: All of it together.
        parts: What ended in each part, oldest first.
        per_s: Jobs that finished each second, on average.
    """

    name: str
    step: str
    whole: Rate
    parts: list[Rate]
    per_s: float

    @property
    def bars(self) -> list[tuple[float, float]]:
        """Of each part the jobs that succeeded and those that failed."""
        return [(part.succeeded, part.failed) for part in self.parts]

    @property
    def most(self) -> int:
        """The most jobs that finished in a part."""
        return max(part.finished for part in self.parts)

    def times(self, which: Literal["wait", "run"], share: float) -> list[float]:
        """A percentile of the waits or run times of each part, 0 where nothing ended."""
        return [getattr(part, which)(share) or 0.0 for part in self.parts]


def period(now: datetime, rates: Sequence[RateAt], *, wide: bool) -> Period:
    """The last hour, or the last day (`wide`), until now by the clock of the database."""
    name, length, step, word = _PERIODS[wide]
    size = int(length / step)
    parts = [NOTHING] * size
    for rate in rates:
        # The part that has begun is the last one.
        place = size - 1 - int((now - rate.at) / step)
        if 0 <= place < size:
            parts[place] = rate.rate
    whole = total(parts)
    return Period(name, word, whole, parts, whole.finished / length.total_seconds())


async def read_period(database: Database, names: Sequence[str] | None = None, *, wide: bool = False) -> Period:
    """The last hour, or the last day (`wide`), of these job types together; None: of all."""
    found = await rates_of(database, names, wide=wide)
    return period(await database.fetchval("select penstock.clock()"), found, wide=wide)


async def read_hour(database: Database, names: Sequence[str] | None) -> Period:
    """The last hour of these job types together; None: of all."""
    return await read_period(database, names)


async def read_day(database: Database, names: Sequence[str] | None) -> Period:
    """The last day of these job types together; None: of all."""
    return await read_period(database, names, wide=True)


async def note_rates(database: Database, counted: Mapping[str, TypeTally]) -> float:
    """Write what a process counted, by job type. Returns the time of the database, in seconds since 1970.

    It is not repeated when the connection is lost: it would count twice.
    """
    rates = {name: rate_of(tally) for name, tally in counted.items()}
    rates[""] = total(rates.values())
    text = orjson.dumps([{"name": name, **_fields(rate)} for name, rate in rates.items()]).decode()
    written: float = await database.fetchval("select penstock.note_rates($1::jsonb)", text)
    return written


async def rates_of(database: Database, names: Sequence[str] | None = None, *, wide: bool = False) -> list[RateAt]:
    """The rates of these job types together (None: of all), by minute of the last hour, or by quarter of the last day (`wide`).

    A minute or quarter in which nothing ended is not in it.
    """
    rows = await database.fetch("select * from penstock.rates_of($1, $2)", names, wide)
    return [RateAt(at, Rate(*rate)) for at, *rate in map(tuple, rows)]


async def type_rates(database: Database, names: Sequence[str] | None = None, limit: int = 1_000) -> list[TypeRate]:
    """The rates of each of these job types (None: of all) of about the last hour, the busiest first."""
    rows = await database.fetch("select * from penstock.type_rates($1, $2)", names, limit)
    return [TypeRate(name, Rate(*rate), since) for name, *rate, since in map(tuple, rows)]


def _fields(rate: Rate) -> dict[str, object]:
    return {name: getattr(rate, name) for name in Rate.__slots__}
