"""The overview: what is wrong first, then how much waits, runs and finishes. The dashboard and `penstock top` show the same.

Nothing here counts a whole queue: `penstock.top` has the same bound for any number of jobs, the gauges read the catalogue, and
the rates of all types together are a row for each minute.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar, Protocol, TypeVar, TypeVarTuple

from pydantic import ConfigDict

from penstock.core.records import example
from penstock.jobs import failures, type_queries
from penstock.jobs.rates import Period, read_day, read_hour
from penstock.jobs.top import TopRecord, top_types
from penstock.pools import views as pool_views
from penstock.postgres import health
from penstock.postgres.database import Database
from penstock.postgres.health import GroupLag
from penstock.worker import fleets, problems
from penstock.worker.fleets import WorkerRecord
from penstock.worker.problems import Problem

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
_MOST_TYPES = 10_000
_MOST_FAILURES = 1_000
_EXAMPLE_OF_TIMES = {
    "finished": 8123, "failed": 3, "retried": 41, "per_s": 2.26, "wait_p50_s": 0.004, "wait_p95_s": 0.09, "run_p50_s": 0.12,
    "run_p95_s": 0.8,
}  # fmt: skip


class Read(Protocol):
    """Reads something from the database, or has read it a moment ago."""

    async def __call__(
        self, call: Callable[[Database, *Arguments], Awaitable[T]], /, *arguments: *Arguments, follows: bool = False
    ) -> T:
        """What `call` gives for these arguments, which are all that it depends on. `follows`: it shows jobs."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """What finished in a period, and how long it took.

    Attributes:
        finished: Jobs that succeeded or failed.
        failed: Jobs that failed.
        retried: Attempts that failed, after which the job went back to the queue.
        per_s: Jobs that finished each second, on average.
        wait_p50_s: Seconds that half of the jobs waited at most; None: no time is known.
        wait_p95_s: Seconds that 95 % of the jobs waited at most.
        run_p50_s: Seconds that half of the attempts ran at most.
        run_p95_s: Seconds that 95 % of the attempts ran at most.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example(_EXAMPLE_OF_TIMES)

    finished: int
    failed: int
    retried: int
    per_s: float
    wait_p50_s: float | None
    wait_p95_s: float | None
    run_p50_s: float | None
    run_p95_s: float | None

    @classmethod
    def of(cls, period: Period) -> Throughput:
        """What finished in a period.

        Args:
            period: The period.
        """
        whole = period.whole
        times = (whole.wait(0.5), whole.wait(0.95), whole.run(0.5), whole.run(0.95))
        return cls(whole.finished, whole.failed, whole.retried, period.per_s, *times)


@dataclass(frozen=True, slots=True)
class Overview:
    """How the job types, workers and consumer groups are doing.

    Attributes:
        at: When it was read; of readings that a server keeps for some time, when the oldest was.
        problems: What is wrong, worst first.
        ready: Number of jobs that could start now.
        in_progress: Number of jobs that belong to a worker.
        deferred: Number of jobs that wait for their time.
        oldest_ready_s: Seconds since the oldest ready job could start; None: no job is ready.
        looked_at: Share of the ready and running jobs that were looked at; below 1 the numbers are estimates.
        workers: Number of workers that live.
        hour: What finished in the last hour, as far as processes have written it.
        day: What finished in the last day.
        types: The job types with jobs, the fullest first.
        lags: The consumer groups, the one that is furthest behind first.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "at": "2026-01-11T18:26:26Z", "problems": [], "ready": 120, "in_progress": 8, "deferred": 3, "oldest_ready_s": 0.4,
        "looked_at": 1.0, "workers": 2, "hour": _EXAMPLE_OF_TIMES, "day": _EXAMPLE_OF_TIMES, "types": [], "lags": [],
    })  # fmt: skip

    at: datetime
    problems: list[Problem]
    ready: int
    in_progress: int
    deferred: int
    oldest_ready_s: float | None
    looked_at: float
    workers: int
    hour: Throughput
    day: Throughput
    types: list[TopRecord]
    lags: list[GroupLag]


def reading(database: Database) -> Read:
    """Reads from a database."""

    async def read(call: Callable[[Database, *Arguments], Awaitable[T]], /, *arguments: *Arguments, follows: bool = False) -> T:
        return await call(database, *arguments)

    return read


async def look(
    read: Read, names: Collection[str] | None = None, see: Callable[[WorkerRecord], WorkerRecord | None] = lambda worker: worker
) -> Overview:
    """The overview.

    Args:
        read: How it is read.
        names: Only what belongs to these job types, streams and pools; None: everything.
        see: A worker as the reader may see it; None: not at all.
    """

    def shown(name: str) -> bool:
        return names is None or name in names

    chosen = None if names is None else tuple(sorted(names))
    loads = await read(top_types, chosen, _MOST_TYPES, follows=True)
    types = [one for one in await read(type_queries.job_types) if shown(one.name)]
    all_workers = await read(fleets.workers)
    workers = [one for one in map(see, all_workers) if one is not None]
    failed = await read(_failures, chosen, follows=True)
    lags = [lag for lag in await read(health.stream_lags) if shown(lag.stream)]
    quarantined = await read(pool_views.quarantined_counts)
    hour, day = [await read(call, chosen) for call in (read_hour, read_day)]
    found = [
        *problems.of_failures(failed, datetime.now(UTC), whole=len(failed) < _MOST_FAILURES),
        # A worker that the reader may not see works on the reader's types too.
        *problems.of_types(loads, types, all_workers),
        *problems.of_workers(workers),
        *problems.of_streams(lags),
        *problems.of_keys({name: number for name, number in quarantined.items() if shown(name)}),
    ]
    if names is None:
        found += problems.of_database(await read(health.gauges), await read(health.lake_lags))
    return Overview(
        at=datetime.now(UTC),
        problems=problems.worst_first(found),
        ready=sum(load.ready for load in loads),
        in_progress=sum(load.in_progress for load in loads),
        deferred=sum(load.deferred for load in loads),
        oldest_ready_s=max((load.oldest_ready_s for load in loads if load.oldest_ready_s is not None), default=None),
        looked_at=min((load.looked_at for load in loads), default=1.0),
        workers=sum(worker.alive for worker in workers),
        hour=Throughput.of(hour),
        day=Throughput.of(day),
        types=sorted(loads, key=lambda load: (load.ready + load.in_progress, load.finished), reverse=True),
        lags=sorted(lags, key=lambda lag: lag.lag, reverse=True),
    )


async def _failures(database: Database, names: tuple[str, ...] | None) -> list[failures.Failure]:
    since = datetime.now(UTC) - problems.HOUR
    return await failures.recent_failures(database, names, since, _MOST_FAILURES, muted=False)
