"""The overview: what is wrong first, then how much waits, runs and finishes. See `penstock.worker.overview`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from penstock.http.auth import Principal
from penstock.http.dashboard.poller import Reading
from penstock.http.dashboard.view import Page, Shown, View
from penstock.http.workers.access import is_open_to, shown_to
from penstock.jobs import type_queries
from penstock.postgres.database import Database
from penstock.worker.fleets import WorkerRecord
from penstock.worker.overview import Overview, look
from penstock.worker.problems import Problem

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
_SHOWN_TYPES = 15
# The page that is open all day on a wall reads seldom: its readings have to stay below half a per cent of a core together.
_KEPT_S = 10.0


async def seen_by(view: View) -> Overview:
    """The overview as the user of a view may see it."""

    async def read(call: Callable[[Database, *Arguments], Awaitable[T]], /, *arguments: *Arguments, follows: bool = False) -> T:
        return await view.read(call, *arguments, kept_s=_KEPT_S, follows=follows)

    return await look(read, view.user.types, partial(_seen, view.user))


def _seen(user: Principal, worker: WorkerRecord) -> WorkerRecord | None:
    return shown_to(user, worker) if is_open_to(user, worker) else None


def as_old_as(readings: Sequence[Reading[Any]], found: Overview) -> Overview:
    """An overview of the time of its oldest reading, and with the problem that keeps one from being younger."""
    problems = found.problems
    if any(reading.problem for reading in readings):
        problems = [Problem("problem", "The database does not answer; what is shown is old", ""), *problems]
    return replace(found, at=min(reading.at for reading in readings), problems=problems)


async def overview(view: View) -> Shown:
    """What is wrong, and the busiest job types."""
    periods = await view.periods(view.names)
    found = await seen_by(view)
    types = await view.read(type_queries.job_types, kept_s=_KEPT_S)
    return Shown(
        "Overview",
        "overview.html",
        {
            "overview": found,
            "loads": found.types[:_SHOWN_TYPES],
            "more": len(found.types) - _SHOWN_TYPES,
            "lags": found.lags[:_SHOWN_TYPES],
            "any_types": any(view.user.may(one.name) for one in types),
            "periods": periods,
        },
    )


PAGES = [Page("", overview)]
