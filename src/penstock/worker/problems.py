"""What is wrong, worst first, from what an overview reads: no input or output."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import ClassVar
from urllib.parse import quote

from pydantic import ConfigDict

from penstock.core.records import example
from penstock.jobs.failures import Failure
from penstock.jobs.records import JobTypeRecord
from penstock.jobs.top import TopRecord
from penstock.postgres.health import DatabaseGauge, GroupLag
from penstock.worker.fleets import WorkerRecord

_WAITS_LONG_S = 60.0
_OLD_SNAPSHOT_S = 300.0
_LAG_LONG_S = 60.0
_LAKE_BEHIND_S = 86_400.0
_MOST_OF_A_KIND = 20
HOUR = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong.

    Attributes:
        level: `problem` (work stands still, or fails) or `warning`.
        text: What is so.
        to: The page that shows it, relative to the dashboard.
        advice: What to do; empty: the page says it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "level": "warning", "text": "invoices is paused since 2026-01-11 18:26 UTC, and 12 jobs wait", "to": "types/invoices",
        "advice": "When the reason is gone: penstock resume invoices",
    })  # fmt: skip

    level: str
    text: str
    to: str
    advice: str = ""


def of_types(loads: Sequence[TopRecord], types: Sequence[JobTypeRecord], workers: Sequence[WorkerRecord]) -> list[Problem]:
    """Types for which no worker works, that wait too long, or are paused with jobs."""
    paused = {record.name: record for record in types if is_paused(record)}
    worked = {name for worker in workers if worker.alive for name in worker.names}
    pauses, unworked, waits = [], [], []
    for load in loads:
        if not load.ready:
            continue
        to = f"types/{_segment(load.name)}"
        waited = load.oldest_ready_s or 0.0
        if load.name in paused:
            text = f"{paused_since(paused[load.name])}, and {load.ready:,} jobs wait"
            pauses.append(Problem("warning", text, to, end_of_pause(paused[load.name])))
        elif load.name not in worked:
            unworked.append(
                Problem(
                    "problem",
                    f"{load.ready:,} jobs of {load.name} wait, and no worker works on this type",
                    to,
                    "Start one: penstock worker MODULE:APP",
                )
            )
        elif waited > _WAITS_LONG_S:
            waits.append(Problem("warning", f"The oldest job of {load.name} has waited {waited:,.0f} s for a worker", to))
    return [*_first(unworked), *_first(pauses), *_first(waits)]


def _first(found: list[Problem]) -> list[Problem]:
    """The first of one kind, which are those of the fullest types, and how many more there are: all of them would hide others."""
    rest = len(found) - _MOST_OF_A_KIND
    if rest <= 0:
        return found
    return [*found[:_MOST_OF_A_KIND], Problem(found[-1].level, f"The same holds for at least {rest:,} more job types", "types")]


def is_paused(record: JobTypeRecord) -> bool:
    """Whether no job of a type starts."""
    return record.paused_at is not None or record.concurrency == 0


def paused_since(record: JobTypeRecord) -> str:
    """That a type is paused, and since when; a concurrency of 0 has no time."""
    if record.paused_at is None:
        return f"{record.name} is paused by a concurrency of 0"
    return f"{record.name} is paused since {record.paused_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def end_of_pause(record: JobTypeRecord) -> str:
    """What ends the pause of a type."""
    if record.concurrency == 0:
        return "Give it another concurrency: penstock types change"
    return f"When the reason is gone: penstock resume {shlex.quote(record.name)}"


def of_failures(failures: Sequence[Failure], now: datetime, *, whole: bool) -> list[Problem]:
    """Types whose jobs failed in the last hour, most first."""
    recent = Counter(failure.name for failure in failures if failure.finished_at > now - HOUR)
    least = "" if whole else "at least "
    return _first([
        Problem("problem", f"{least}{number:,} jobs of {name} failed in the last hour", f"failures?type={_segment(name)}")
        for name, number in recent.most_common()
    ])  # fmt: skip


def of_workers(workers: Sequence[WorkerRecord]) -> list[Problem]:
    """Workers that make no progress, and consumers that have ended."""
    found = []
    for worker in workers:
        if not worker.alive:
            continue
        if worker.blocked_since is not None:
            by = worker.blocked_by or "something"
            found.append(Problem("problem", f"The event loop of {worker.id} makes no progress: {by} blocks it", "workers"))
        found += [
            Problem("problem", f"The consumer {consumer} has ended in {worker.id}: it halted", "workers")
            for consumer in worker.halted
        ]
    return found


def of_streams(lags: Sequence[GroupLag]) -> list[Problem]:
    """Consumer groups that stand before a quarantined partition, or are far behind."""
    found = []
    for lag in lags:
        to = f"streams/{_segment(lag.stream)}"
        if lag.quarantined:
            found.append(
                Problem("problem", f"{lag.quarantined} partitions of {lag.stream} are quarantined for the group {lag.group}", to)
            )
        elif lag.lag_s > _LAG_LONG_S:
            found.append(
                Problem(
                    "warning",
                    f"The group {lag.group} is {lag.lag:,} events behind in {lag.stream}; the oldest waits {lag.lag_s:,.0f} s",
                    to,
                )
            )
    return found


def of_keys(quarantined: Mapping[str, int]) -> list[Problem]:
    """Pools with keys for which the assignment rule fails."""
    return [
        Problem("problem", f"{number} keys of the pool {name} are quarantined", f"pools/{_segment(name)}")
        for name, number in quarantined.items()
        if number
    ]


def of_database(gauges: Sequence[DatabaseGauge], lakes: Mapping[str, float]) -> list[Problem]:
    """Old transactions, missing days of the archive, lakes that are behind."""
    found = []
    for gauge in gauges:
        if gauge.gauge == "oldest_snapshot_seconds" and gauge.amount > _OLD_SNAPSHOT_S:
            text = f"A transaction has been open for {gauge.amount:,.0f} s: dead rows cannot be removed"
            found.append(Problem("warning", text, "health"))
        if gauge.gauge == "archive_day_missing" and gauge.amount:
            found.append(
                Problem("problem", f"The archive has no partition for {gauge.label}", "health", "A running worker makes it.")
            )
    found += [
        Problem("warning", f"The lake {name} is {behind_s / 3600:,.0f} h behind", "health", "Run: penstock history run")
        for name, behind_s in lakes.items()
        if behind_s > _LAKE_BEHIND_S
    ]
    return found


def worst_first(problems: Sequence[Problem]) -> list[Problem]:
    """Problems before warnings, otherwise in order."""
    return sorted(problems, key=lambda problem: problem.level != "problem")


def _segment(name: str) -> str:
    return quote(name, safe="")
