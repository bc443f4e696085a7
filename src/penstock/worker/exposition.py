"""What a process with workers shows to the outside: its metrics, whether it makes progress, and whether it is ready.

A process reports about itself, a `Report`. The endpoint shows the reports of one process, or the sum of those of several, with
gauges that it reads from the database by a connection of its own: a process whose pool is exhausted, or whose event loop a
handler blocks, can still be seen.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from penstock.core.bounded import Bounded
from penstock.core.cached import Kept
from penstock.core.meter import Gauges, Meter, gauge
from penstock.core.tally import BoundedNames
from penstock.errors import PenstockError
from penstock.postgres import health
from penstock.postgres.database import Database
from penstock.postgres.translation import DRIVER_ERRORS
from penstock.worker.endpoint import Answer
from penstock.worker.progress import Progressing

# A claim loop without progress for so long is stalled, unless the database does not answer.
STALLED_S = 30.0
# Less than a probe or a scrape waits: those of deploy/ wait for 5 and 10 s.
ANSWER_S = 4.0
GAUGES_S = 8.0
_MOST_NAMES = 1_000
# Gauges of which a sum over processes would mean nothing: the largest is shown.
_BY_LARGEST = frozenset({"penstock_info", "penstock_claim_loop_idle_seconds"})
_OF_DATABASE = {
    "oldest_snapshot_seconds": "Age of the oldest transaction or snapshot, which holds back vacuum.",
    "replication_slot_bytes": "Most bytes of write-ahead log that a replication slot retains.",
    "database_bytes": "Size of the database.",
}
_OF_WORKFLOWS = {
    "workflow_tick_seconds": "For how long what waits for a job that has ended was not released.",
    "waiting_jobs": "Jobs that wait for other jobs, as PostgreSQL's statistics estimate it.",
}
_NOTIFY_S = 2.0
_LOOK_AT_NOTIFICATIONS_S = 60.0
_OF_TABLES = {
    "dead_rows": "Dead rows of a hot table that vacuum has not removed.",
    "table_bytes": "Size of a table with its indexes; of the archive and of all streams as of the last vacuum.",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What one process says about itself.

    Attributes:
        families: Its metrics.
        idle_s: For how many seconds its claim loops or its event loop have made no progress.
        running: Whether its worker is registered and claims.
        stopping: Whether its worker has been told to stop.
        at: When it was made or received, by this process's monotonic clock.
    """

    families: list[Metric] = field(default_factory=list)
    idle_s: float = 0.0
    running: bool = False
    stopping: bool = False
    at: float = field(default_factory=time.monotonic)


def report_of(meter: Meter, workers: Sequence[Progressing]) -> Report:
    """The report of this process. May be called from any thread. No workers: they do not exist yet."""
    families = [*meter.registry.collect()]
    if not workers:
        return Report(families)
    found = [worker.progress() for worker in workers]
    idle_s = max(progress.idle_s for progress in found)
    # A type that takes batches has places of its own, and there may be many such types.
    names = BoundedNames()
    used, places = Counter[tuple[str]](), Counter[tuple[str]]()
    for lane, (taken, all_places) in chain.from_iterable(progress.places.items() for progress in found):
        kind = (names.label(lane),)
        used[kind] += taken
        places[kind] += all_places
    families += [
        gauge("penstock_places_used", "Places taken by running jobs.", used, ["kind"]),
        gauge("penstock_places", "Places for running jobs.", places, ["kind"]),
        gauge("penstock_claim_loop_idle_seconds", "Seconds without progress of the claim loop or event loop.", {(): idle_s}, []),
    ]
    running = all(progress.running for progress in found)
    return Report(families, idle_s, running, any(progress.stopping for progress in found))


def merged(reports: Iterable[Sequence[Metric]]) -> list[Metric]:
    """The metrics of several processes as those of one: sums, except for gauges of which only the largest means something."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for report in reports:
        for family in report:
            families.setdefault(family.name, family)
            found = values.setdefault(family.name, {})
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                key = (sample.name, tuple(sample.labels.items()))
                value = float(sample.value)
                if family.name in _BY_LARGEST:
                    found[key] = max(found.get(key, value), value)
                else:
                    found[key] = found.get(key, 0.0) + value
    result = []
    for name, family in families.items():
        total = Metric(name, family.documentation, family.type)
        for (of, labels), value in values[name].items():
            total.add_sample(of, dict(labels), value)
        result.append(total)
    return result


def totals(report: Report) -> list[Metric]:
    """What stays of a process that has ended: counters and histograms."""
    return [family for family in report.families if family.type in ("counter", "histogram")]


class Exposition:
    """Answers /metrics, /livez and /readyz for the workers of this machine's process, or of several.

    Args:
        database: Database of its own, which is opened when it is first needed.
        reports: The latest reports of all processes.
        ended: Totals of processes that have ended.
        processes: Number of processes that should report.
    """

    def __init__(
        self,
        database: Database,
        reports: Callable[[], Sequence[Report]],
        ended: Callable[[], Sequence[Metric]] = lambda: (),
        processes: Callable[[], int] = lambda: 1,
    ) -> None:
        self._database = database
        self._reports = reports
        self._ended = ended
        self._processes = processes
        self._gauges = DatabaseGauges(database)
        self._answering = Bounded(self._ask, ANSWER_S)
        self._reading = Bounded(self._of_database, GAUGES_S)
        self.routes: Mapping[str, Callable[[], Awaitable[Answer]]] = {
            "/metrics": self.metrics, "/livez": self.live, "/readyz": self.ready,
        }  # fmt: skip

    async def metrics(self) -> Answer:
        """Numbers for Prometheus."""
        families = await self.families()
        registry = CollectorRegistry()
        registry.register(Gauges(lambda: families))
        return Answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)

    async def families(self) -> list[Metric]:
        """The metrics of all processes and the gauges of the database; those without samples when it does not answer."""
        own = merged([*(report.families for report in self._reports()), self._ended()])
        try:
            return [*own, *await self._reading(), database_up(True)]
        except PenstockError:
            return [*own, *database_families(), database_up(False)]

    async def live(self) -> Answer:
        """200 while the claim loops advance, or while they cannot because the database does not answer; otherwise 503."""
        now = time.monotonic()
        stalled = [report for report in self._reports() if report.idle_s + now - report.at > STALLED_S and not report.stopping]
        if stalled and await self._answers():
            longest = max(report.idle_s + now - report.at for report in stalled)
            return Answer(503, f"no progress for {longest:.0f} s\n".encode())
        return Answer(200, b"ok\n")

    async def ready(self) -> Answer:
        """200 when all processes claim and the database answers; otherwise 503."""
        reports = self._reports()
        if len(reports) < self._processes() or not all(report.running for report in reports):
            return Answer(503, b"starting\n")
        if any(report.stopping for report in reports):
            return Answer(503, b"stopping\n")
        return Answer(200, b"ready\n") if await self._answers() else Answer(503, b"no database\n")

    async def close(self) -> None:
        """Close the connection."""
        self._answering.close()
        self._reading.close()
        await self._database.close()

    async def _answers(self) -> bool:
        try:
            await self._answering()
        except PenstockError:
            return False
        return True

    async def _ask(self) -> None:
        await self._database.open()
        await self._database.fetch("select 1", timeout=ANSWER_S)

    async def _of_database(self) -> list[Metric]:
        await self._database.open()
        return await self._gauges()


class DatabaseGauges:
    """Gauges of the database, the same in workers and in servers, some seconds old at most. None of them reads a queue.

    Args:
        database: Database to look at.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._families = Kept(self._read)
        self._notifications = Kept(self._arrive, kept_s=_LOOK_AT_NOTIFICATIONS_S)

    async def __call__(self) -> list[Metric]:
        """The families. Raises `PenstockError` when the database does not answer."""
        return [*await self._families(), _notifications({(): float(await self._notifications())})]

    async def _read(self) -> list[Metric]:
        found = await health.gauges(self._database)
        lakes = dict(list((await health.lake_lags(self._database)).items())[:_MOST_NAMES])
        return _families(found, (await health.stream_lags(self._database))[:_MOST_NAMES], lakes)

    async def _arrive(self) -> bool:
        try:
            return await health.notifications_arrive(self._database, _NOTIFY_S)
        except (PenstockError, *DRIVER_ERRORS):
            return False


def database_families() -> list[Metric]:
    """The families of the gauges of the database, without samples."""
    return [Metric(one.name, one.documentation, one.type) for one in (*_families([], [], {}), _notifications({}))]


def database_up(up: bool) -> Metric:
    """Whether the database answers, as a gauge."""
    return gauge("penstock_database_up", "Whether the database answers.", {(): float(up)}, [])


def _notifications(values: Mapping[tuple[str, ...], float]) -> Metric:
    help = "1 while a notification arrives where workers listen; 0: a pooler swallows it, and workers poll."
    return gauge("penstock_notifications_arrive", help, values, [])


def _families(found: Sequence[health.DatabaseGauge], lags: Sequence[health.GroupLag], lakes: Mapping[str, float]) -> list[Metric]:
    amounts = {one.gauge: one.amount for one in found}
    families = [gauge(f"penstock_{name}", help, {(): amounts.get(name, 0.0)}, []) for name, help in _OF_DATABASE.items()]
    families += [
        gauge(f"penstock_{name}", help, {(one.label,): one.amount for one in found if one.gauge == name}, ["table"])
        for name, help in _OF_TABLES.items()
    ]
    families += [gauge(f"penstock_{name}", help, {(): amounts.get(name, 0.0)}, []) for name, help in _OF_WORKFLOWS.items()]
    groups = {(one.label,): one.amount for one in found if one.gauge == "job_groups"}
    families.append(gauge("penstock_job_groups", "Job groups that have not ended; up to 10,000 are counted.", groups, ["status"]))
    by_group = ["stream", "group"]
    families += [
        gauge("penstock_stream_lag_events", "Events before a group.", {(g.stream, g.group): g.lag for g in lags}, by_group),
        gauge(
            "penstock_stream_lag_seconds", "Age of the oldest event before a group.",
            {(g.stream, g.group): g.lag_s for g in lags}, by_group,
        ),
        gauge(
            "penstock_quarantined_partitions", "Partitions that are paused before an event that fails or kills its worker.",
            {(g.stream, g.group): g.quarantined for g in lags}, by_group,
        ),
        gauge(
            "penstock_lake_behind_seconds", "How long the first finished job that a lake does not have has waited for it.",
            {(name,): behind_s for name, behind_s in lakes.items()}, ["lake"],
        ),
    ]  # fmt: skip
    return families
