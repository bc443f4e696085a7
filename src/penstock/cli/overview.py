"""The overview of `penstock top` as text: no input or output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.output import cell

if TYPE_CHECKING:
    from penstock.worker.overview import Overview, Throughput

_STYLES = {"problem": "bold red", "warning": "yellow"}


def screen(found: Overview | None, most: int, problem: str = "") -> RenderableType:
    """The overview, with at most so many lines of each list. `problem`: why it is old, or is not there."""
    parts: list[RenderableType] = []
    if problem:
        parts.append(Text(f"The database does not answer; what is shown is old: {problem}", style="bold red"))
    if found is None:
        return Group(*parts)
    parts.append(Text(f"Penstock, {cell(found.at)}", style="bold"))
    parts += [
        Text(f"{one.level}: {one.text}{f'. {one.advice}' if one.advice else ''}", style=_STYLES.get(one.level, ""))
        for one in found.problems[:most]
    ] or [Text("Nothing is wrong that is known.", style="green")]
    about = "" if found.looked_at >= 1 else f" (estimated from {found.looked_at:.1%} of the jobs)"
    parts.append(
        Text(
            f"{found.ready:,} ready, {found.in_progress:,} running, {found.deferred:,} deferred{about}; the oldest waits "
            f"{_time(found.oldest_ready_s)}; {found.workers} workers"
        )
    )
    parts.append(_times([("last hour", found.hour), ("last day", found.day)]))
    if found.types:
        parts.append(
            _table(
                ["type", "ready", "running", "deferred", "oldest"],
                [
                    (one.name, f"{one.ready:,}", f"{one.in_progress:,}", f"{one.deferred:,}", _time(one.oldest_ready_s))
                    for one in found.types[:most]
                ],
            )
        )
    if found.lags:
        parts.append(
            _table(
                ["stream", "group", "events behind", "oldest"],
                [(one.stream, one.group, f"{one.lag:,}", _time(one.lag_s)) for one in found.lags[:most]],
            )
        )
    return Group(*parts)


def _times(periods: list[tuple[str, Throughput]]) -> Table:
    return _table(
        ["", "finished", "a second", "failed", "retried", "waited p50", "p95", "ran p50", "p95"],
        [
            (
                name, f"{one.finished:,}", f"{one.per_s:,.2f}", f"{one.failed:,}", f"{one.retried:,}", _time(one.wait_p50_s),
                _time(one.wait_p95_s), _time(one.run_p50_s), _time(one.run_p95_s),
            )
            for name, one in periods
        ],
    )  # fmt: skip


def _table(columns: list[str], rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(value) for value in row))
    return table


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"
