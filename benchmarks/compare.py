"""This checkout beside another one, alternating in one run on fresh databases.

    python -m benchmarks compare --before PATH [--only drain,enqueue,latency,pools,streams,topics,http] [--rounds 5] [--share 1]

PATH is another checkout of this repository with its own `.venv`, such as a worktree of an older commit in which `make install`
has run. What is measured, and how, is in `benchmarks/compared.py`, which both interpreters run. In each round both are measured,
in the order this, before, and in the next one before, this, so that what else the machine does touches both alike. A ratio above
1 says that this checkout is better, whether more of the measure is better or less; it is that of the medians, and beside it
stand the lowest and the highest ratio of a single round, which say how much of it is noise. `--at-least 0.97` makes the command
fail when a ratio of medians lies below.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
MEASURES = ("drain", "enqueue", "latency", "pools", "streams", "topics", "http")
RUN_ENDS_WITHIN_S = 600
Side = Literal["this", "before"]


class CheckoutFailed(Exception):
    """A checkout could not be measured; the message has the end of what it printed."""


@dataclass(slots=True)
class Compared:
    """A measure of both checkouts, a value for each round."""

    name: str
    better: Literal["up", "down"]
    values: dict[Side, list[float]] = field(default_factory=lambda: {"this": [], "before": []})

    @property
    def ratio(self) -> float:
        """Of the medians; above 1: this checkout is better."""
        return self._better(statistics.median(self.values["this"]), statistics.median(self.values["before"]))

    @property
    def ratios(self) -> list[float]:
        """That of each round."""
        return [self._better(ours, theirs) for ours, theirs in zip(self.values["this"], self.values["before"], strict=False)]

    def _better(self, ours: float, theirs: float) -> float:
        over, under = (ours, theirs) if self.better == "up" else (theirs, ours)
        return over / under if under else (1.0 if over == under else float("inf"))


class Comparison:
    """The rounds and what came out of them.

    Args:
        before: The other checkout.
        share: Part of the usual amount of work.
    """

    def __init__(self, before: Path, share: float) -> None:
        self.results: dict[str, Compared] = {}
        self._pythons: dict[Side, Path] = {"this": Path(sys.executable), "before": before / ".venv" / "bin" / "python"}
        self._folders: dict[Side, Path] = {"this": ROOT, "before": before}
        self._share = share

    def check(self) -> None:
        """Fail early when a checkout is not built, or when both interpreters import the same package.

        Raises:
            CheckoutFailed: With what to do.
        """
        places: dict[Side, str] = {}
        for side, python in self._pythons.items():
            if not python.exists():
                raise CheckoutFailed(f"{python} is missing; run `make install` in {self._folders[side]}")
            says = "import penstock; print(penstock.__file__)"
            places[side] = self._run(side, ["-P", "-c", says]).strip()
            # Without compiled modules each process spends a second on compiling, also where Python may not write them.
            self._run(side, ["-P", "-m", "compileall", "-q", str(Path(places[side]).parent)])
        if places["this"] == places["before"] and self._folders["this"].resolve() != self._folders["before"].resolve():
            raise CheckoutFailed(f"both interpreters import {places['this']}; make the virtual environment of each in its folder")

    def round(self, measure: str, order: Sequence[Side]) -> None:
        """Measure both once.

        Raises:
            CheckoutFailed: One of them failed.
        """
        for side in order:
            output = self._run(side, ["-P", str(ROOT / "benchmarks" / "compared.py"), measure, str(self._share)])
            for name, (value, better) in json.loads(output.splitlines()[-1]).items():
                self.results.setdefault(name, Compared(name, better)).values[side].append(value)

    def _run(self, side: Side, arguments: list[str]) -> str:
        try:
            done = subprocess.run(
                [str(self._pythons[side]), *arguments],
                cwd=self._folders[side],
                capture_output=True,
                text=True,
                timeout=RUN_ENDS_WITHIN_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CheckoutFailed(f"{side}: {' '.join(arguments)}: not finished within {RUN_ENDS_WITHIN_S} s") from None
        if done.returncode != 0:
            raise CheckoutFailed(f"{side}: {' '.join(arguments)}: ended with {done.returncode}\n{done.stderr[-3000:]}")
        return done.stdout


def shown(results: Sequence[Compared]) -> list[tuple[str, ...]]:
    """A row for each measure."""
    rows: list[tuple[str, ...]] = []
    for result in results:
        if not result.ratios:
            continue
        ours, theirs = (statistics.median(result.values[side]) for side in ("this", "before"))
        least, most = min(result.ratios), max(result.ratios)
        rows.append((result.name, _figure(ours), _figure(theirs), f"{result.ratio:.2f}", f"{least:.2f} to {most:.2f}"))
    return rows


def main(arguments: Sequence[str]) -> None:
    """Compare what is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="the other checkout, with its own .venv")
    parser.add_argument("--only", type=_measures, default=MEASURES, help="only these, by comma: " + ",".join(MEASURES))
    parser.add_argument("--rounds", type=_positive, default=5, help="how often both are measured (5)")
    parser.add_argument("--share", type=float, default=1.0, help="part of the usual amount of work (1)")
    parser.add_argument("--at-least", type=float, default=0.0, help="fail when a ratio of medians is lower")
    given = parser.parse_args(arguments)
    console = Console(width=150)
    comparison = Comparison(given.before.absolute(), given.share)
    try:
        comparison.check()
        for number in range(given.rounds):
            for measure in given.only:
                console.print(f"round {number + 1} of {given.rounds}: {measure}", style="dim")
                comparison.round(measure, ("this", "before") if number % 2 == 0 else ("before", "this"))
    except CheckoutFailed as failure:
        console.print(f"error: {failure}", style="red", markup=False, highlight=False)
        sys.exit(2)
    results = list(comparison.results.values())
    table = Table("measure", "this", "before", "ratio, >1: this is better", "of single rounds", box=None, pad_edge=False)
    for row in shown(results):
        table.add_row(*row)
    console.print(table)
    if low := [result.name for result in results if result.ratios and result.ratio < given.at_least]:
        console.print(f"below {given.at_least}: {'; '.join(low)}", style="red", markup=False)
        sys.exit(1)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def _measures(given: str) -> tuple[str, ...]:
    names = tuple(given.split(","))
    if unknown := set(names) - set(MEASURES):
        raise argparse.ArgumentTypeError(f"no such measure: {', '.join(sorted(unknown))}; there are {', '.join(MEASURES)}")
    return names


def _positive(given: str) -> int:
    number = int(given)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number
