"""The history report: throughput, delays, failures by cause, keys and workers, from the rollups of a lake in Postgres.

The numbers need no Spark: percentiles come from merging the sketches of the minutes. Spark's plotting draws the plots, over the
same rollups.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from penstock.core.logs import get_logger
from penstock.history import lake_queries as lakes
from penstock.history.lake import known_lake
from penstock.history.lake_queries import Failure, Rollup
from penstock.postgres.database import Database
from penstock.spark.sketches import merged, quantiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = get_logger("penstock.history")
_WIDE = 140
_BARS = "▁▂▃▄▅▆▇█"
_MOST_ROWS = 10
_LONGEST_PICTURE_S = 60.0


@dataclass(frozen=True, slots=True)
class TypeSummary:
    """A job type in a period. Delays and run times are the p50, p95 and p99 in seconds; None when no job started."""

    name: str
    succeeded: int
    failed: int
    expired: int
    cancelled: int
    retries: int
    delay: tuple[float | None, float | None, float | None]
    run: tuple[float | None, float | None, float | None]

    @property
    def jobs(self) -> int:
        """The number of jobs that finished."""
        return self.succeeded + self.failed + self.expired + self.cancelled


@dataclass(frozen=True, slots=True)
class Report:
    """The contents of a report."""

    lake: str
    since: datetime
    until: datetime
    rollups: Sequence[Rollup]
    types: Sequence[TypeSummary]
    keys: Sequence[tuple[str, int]]
    workers: Sequence[tuple[str, int, float, int]]
    failures: Sequence[Failure]


async def report(database: Database, lake: str, since: datetime, until: datetime) -> Report:
    """The report of a period. Raises `NotFound` when the lake does not exist."""
    await known_lake(database, lake)
    rollups = await lakes.rollups(database, lake, since, until)
    keys: Counter[str] = Counter()
    for rollup in rollups:
        keys.update(rollup.hot_keys)
    days = max(1, round((until - since) / timedelta(days=1)))
    return Report(
        lake,
        since,
        until,
        rollups,
        summaries(rollups),
        keys.most_common(_MOST_ROWS),
        await lakes.worker_use(database, lake, since, until),
        await lakes.failures(database, lake, until.astimezone(UTC).date(), days),
    )


def summaries(rollups: Iterable[Rollup]) -> list[TypeSummary]:
    """The rollups of several minutes as one summary for each type, the busiest first."""
    by_type: dict[str, list[Rollup]] = {}
    for rollup in rollups:
        by_type.setdefault(rollup.name, []).append(rollup)
    found = []
    for name, minutes in by_type.items():
        delay = quantiles(merged(minute.delay_sketch for minute in minutes))
        run = quantiles(merged(minute.run_sketch for minute in minutes))
        found.append(
            TypeSummary(
                name,
                sum(minute.succeeded for minute in minutes),
                sum(minute.failed for minute in minutes),
                sum(minute.expired for minute in minutes),
                sum(minute.cancelled for minute in minutes),
                sum(minute.retries for minute in minutes),
                (delay[0], delay[1], delay[2]),
                (run[0], run[1], run[2]),
            )
        )
    return sorted(found, key=lambda summary: (-summary.jobs, summary.name))


def print_report(console: Console, found: Report) -> None:
    """Print a report."""
    if not found.types:
        console.print(
            f"no finished jobs from {found.since:%Y-%m-%d %H:%M} to {found.until:%Y-%m-%d %H:%M} in the lake {found.lake}"
        )
        return
    per_minute: Counter[datetime] = Counter()
    for rollup in found.rollups:
        per_minute[rollup.minute] += rollup.succeeded + rollup.failed + rollup.expired + rollup.cancelled
    console.print(f"jobs a minute: {sparkline(per_minute)}  (most {max(per_minute.values()):,})", highlight=False)
    _print(
        console,
        "Job types",
        ["type", "jobs", "failed", "expired", "cancelled", "retries"],
        [[t.name, t.jobs, t.failed, t.expired, t.cancelled, t.retries] for t in found.types[:_MOST_ROWS]],
    )
    _print(
        console,
        "How long they waited and ran",
        ["type", "wait p50", "p95", "p99", "run p50", "p95", "p99"],
        [[t.name, *map(span, t.delay), *map(span, t.run)] for t in found.types[:_MOST_ROWS]],
    )
    print_causes(console, found.failures)
    _print(console, "Busiest keys", ["key", "jobs, about"], [list(row) for row in found.keys])
    _print(
        console,
        "Workers",
        ["worker", "jobs", "handlers ran, s", "minutes"],
        [[worker, jobs, round(busy, 1), minutes] for worker, jobs, busy, minutes in found.workers[:_MOST_ROWS]],
    )


def print_causes(console: Console, failures: Sequence[Failure]) -> None:
    """Print the most frequent failures."""
    causes = [
        [f.name, f.message, f.failures, f.failures_before, "new" if f.new else "", f.kind, str(f.sample_id)]
        for f in failures[:_MOST_ROWS]
    ]
    # A cut id is useless, so the column is left out where there is no room for whole ids.
    shown = 7 if console.width >= _WIDE else 5
    columns = ["type", "message", "failures", "before", "", "error", "for example"]
    _print(console, "Failed attempts by cause", columns[:shown], [cause[:shown] for cause in causes])


def sparkline(per_minute: Counter[datetime], width: int = 60) -> str:
    """Counts over time as a line of bars."""
    first, last = min(per_minute), max(per_minute)
    minutes = int((last - first) / timedelta(minutes=1)) + 1
    buckets = [0] * min(width, minutes)
    for minute, count in per_minute.items():
        buckets[int((minute - first) / timedelta(minutes=1)) * len(buckets) // minutes] += count
    top = max(buckets)
    return "".join(_BARS[(len(_BARS) - 1) * count // top] if count else " " for count in buckets)


def span(seconds: float | None) -> str:
    """A duration for people, such as 12 ms or 3.5 min."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.3g} min"


def plot(spark: SparkSession, found: Report, folder: Path, *, png: bool = True) -> list[Path]:
    """Draw the report into a folder: an HTML page, and PNG pictures if a browser that draws them is installed.

    Returns:
        The files that were written.
    """
    import plotly.io

    folder.mkdir(parents=True, exist_ok=True)
    figures = _figures(spark, found)
    page = folder / "report.html"
    parts = [
        plotly.io.to_html(figure, full_html=False, include_plotlyjs=place == 0) for place, figure in enumerate(figures.values())
    ]
    page.write_text(
        f"<!doctype html><meta charset='utf-8'><title>Penstock: {found.lake}</title>"
        f"<body style='font-family: sans-serif'><h1>{found.since:%Y-%m-%d %H:%M} to {found.until:%Y-%m-%d %H:%M}</h1>"
        + "".join(parts),
        "utf-8",
    )
    written = [page]
    if png:
        for name, figure in figures.items():
            if not _draw(figure, folder / f"{name}.png"):
                break
            written.append(folder / f"{name}.png")
    return written


def _draw(figure: Any, path: Path) -> bool:
    """Write a figure as a picture. Returns False when no browser is installed, or the browser does not answer in time."""
    failed: list[Exception] = []

    def write() -> None:
        try:
            figure.write_image(path, width=1000, height=500)
        except Exception as error:
            failed.append(error)

    # The library that talks to the browser waits without a limit. A thread that hangs there does not keep the process alive.
    thread = threading.Thread(target=write, name="penstock-picture", daemon=True)
    thread.start()
    thread.join(_LONGEST_PICTURE_S)
    if thread.is_alive():
        log.warning("picture_not_drawn", path=str(path), waited_s=_LONGEST_PICTURE_S)
        return False
    # Pictures need Chrome or Chromium; the page does not.
    if failed and "chrom" not in str(failed[0]).lower():
        raise failed[0]
    return not failed


def _figures(spark: SparkSession, found: Report) -> dict[str, Any]:
    frame: DataFrame = spark.createDataFrame(
        [
            (r.minute, r.name, r.succeeded + r.failed + r.expired + r.cancelled, r.failed, *quantiles(r.delay_sketch))
            for r in found.rollups
        ],
        "minute timestamp, name string, jobs long, failed long, p50 double, p95 double, p99 double",
    ).orderBy("minute")
    by_minute = frame.groupBy("minute").pivot("name", [t.name for t in found.types[:_MOST_ROWS]]).sum("jobs").orderBy("minute")
    names = [name for name in by_minute.columns if name != "minute"]
    figures = {
        "throughput": by_minute.fillna(0).plot.area(x="minute", y=names),
        "failures": frame.groupBy("name")
        .sum("jobs", "failed")
        .toDF("name", "jobs", "failed")
        .plot.bar(x="name", y=["jobs", "failed"]),
    }
    if found.types:
        busiest = frame.where(frame.name == found.types[0].name)
        figures["delays"] = busiest.plot.line(x="minute", y=["p50", "p95", "p99"])
        figures["delays"].update_layout(title=f"Wait for a worker, seconds: {found.types[0].name}")
    figures["throughput"].update_layout(title="Jobs finished in a minute")
    figures["failures"].update_layout(title="Finished and failed jobs by type")
    return figures


def _print(console: Console, title: str, columns: list[str], rows: list[list[Any]]) -> None:
    if not rows:
        return
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(columns):
        number = any(isinstance(row[place], (int, float)) for row in rows)
        # A message wraps in the room that the other columns leave. Ids are not cut, so that they can be copied.
        name = column in ("type", "key", "worker")
        table.add_column(
            column,
            justify="right" if number else "left",
            overflow="ellipsis" if name else "fold",
            no_wrap=number or name or column in ("", "for example"),
            max_width=max(12, console.width // 4) if name and "message" in columns else None,
            min_width=20 if column == "message" else None,
        )
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, (int, float)) else str(value) for value in row))
    console.print()
    console.print(table)
