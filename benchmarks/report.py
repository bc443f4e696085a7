"""What is shown of the measurements: tables for the terminal, and for the peers a table in Markdown, the figures and a chart."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
PEER_COLUMNS = (
    "system", "jobs kept in", "enqueue in bulk, jobs/s", "Penstock is", "drain, jobs/s", "Penstock is", "jobs",
    "enqueue to start, idle: p50", "p99", "sparse: p50", "p99",
)  # fmt: skip


@dataclass(slots=True)
class PeerResult:
    """What was measured of one system; a value for each round."""

    title: str
    store: str
    jobs: int
    versions: dict[str, str] = field(default_factory=dict)
    enqueue: list[float] = field(default_factory=list)
    """Jobs a second."""
    drain: list[float] = field(default_factory=list)
    """Jobs a second."""
    enqueue_ratios: list[float] = field(default_factory=list)
    """Penstock's rate just before, divided by this one."""
    drain_ratios: list[float] = field(default_factory=list)
    idle_ms: list[float] = field(default_factory=list)
    """From enqueue to the start of the handler, with pauses of 200 to 300 ms between jobs."""
    sparse_ms: list[float] = field(default_factory=list)
    """The same with pauses of 30 to 100 ms."""
    failure: str = ""


def percentile(values: Sequence[float], percent: int) -> float:
    """Of sorted values; the nearest rank."""
    return values[min(len(values) - 1, len(values) * percent // 100)]


def print_rows(rows: Sequence[tuple[str, str, str]]) -> None:
    """The measurements beside the bare SQL."""
    table = Table(box=None, pad_edge=False)
    for column in ("measured", "value", "compared"):
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


def print_peers(results: Sequence[PeerResult]) -> None:
    """The comparison with other systems, and what failed."""
    table = Table(box=None, pad_edge=False)
    for at, column in enumerate(PEER_COLUMNS):
        table.add_column(column, justify="left" if at < 2 else "right", max_width=22)
    for result in results:
        table.add_row(*_peer_row(result))
    console = Console(width=190)
    console.print(table)
    for result in results:
        if result.failure:
            console.print(f"{result.title}: {result.failure}", markup=False)


def write_peers(results: Sequence[PeerResult], about: dict[str, Any]) -> None:
    """Write `peers.json`, `peers.md` and `peers.svg` into `RESULTS`."""
    RESULTS.mkdir(exist_ok=True)
    figures = {"about": about, "systems": [asdict(result) for result in results]}
    (RESULTS / "peers.json").write_text(json.dumps(figures, indent=1) + "\n")
    (RESULTS / "peers.md").write_text(_markdown([_peer_row(result) for result in results]))
    if drained := [result for result in results if result.drain]:
        _chart(drained, RESULTS / "peers.svg")


def _peer_row(result: PeerResult) -> tuple[str, ...]:
    name = next(iter(result.versions.values()), "")
    return (
        f"{result.title} {name}",
        result.store,
        f"{statistics.median(result.enqueue):,.0f}" if result.enqueue else "-",
        _times(result.enqueue_ratios),
        f"{statistics.median(result.drain):,.0f}" if result.drain else "-",
        _times(result.drain_ratios),
        f"{result.jobs:,}",
        *(
            f"{percentile(sorted(waits), percent):.1f} ms" if waits else "-"
            for waits in (result.idle_ms, result.sparse_ms)
            for percent in (50, 99)
        ),
    )


def _times(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    ratio = statistics.median(ratios)
    return f"{ratio:,.1f} x faster" if ratio >= 1 else f"{1 / ratio:,.1f} x slower"


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(PEER_COLUMNS) + " |", "|---|---|" + "--:|" * (len(PEER_COLUMNS) - 2)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def _chart(results: Sequence[PeerResult], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "penstock"  # the same figures give the same file
    from matplotlib import pyplot as plt

    ordered = sorted(results, key=lambda result: statistics.median(result.drain))
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(ordered) + 1.2))
    rates = [statistics.median(result.drain) for result in ordered]
    colours = ["#1f6f8b" if not result.drain_ratios else "#b8c4cc" for result in ordered]
    bars = axes.barh([f"{result.title} ({result.store})" for result in ordered], rates, color=colours)
    axes.bar_label(
        bars,
        [
            f"{rate:,.0f}" + (f"   ({_times(result.drain_ratios).replace('faster', 'less')})" if result.drain_ratios else "")
            for rate, result in zip(rates, ordered, strict=True)
        ],
        padding=4,
    )
    axes.set_xlim(0, max(rates) * 1.25)
    axes.set_title("No-op jobs a second through one worker process (in brackets: than Penstock just before)", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
