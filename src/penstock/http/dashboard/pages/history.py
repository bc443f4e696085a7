"""The history: what finished over days, by the rollups of a lake, in two periods that do not overlap; and runs of workflows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from penstock.history import lake_queries
from penstock.history.lake_queries import PastRun, WorkflowSummary
from penstock.http.dashboard import queries
from penstock.http.dashboard.queries import PastLoad
from penstock.http.dashboard.view import Page, Shown, View
from penstock.postgres.database import Database

AGAINST = {
    "before": "the one before", "day": "the same a day earlier", "week": "the same a week earlier",
    "month": "the same 30 days earlier",
}  # fmt: skip
_EARLIER = {"day": timedelta(days=1), "week": timedelta(days=7), "month": timedelta(days=30)}
_RUNS = 20
PERIODS = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(days=7), "month": timedelta(days=30)}


@dataclass(frozen=True, slots=True)
class Compared:
    """A type in a period, and in the one that it is compared with (None: it had no job)."""

    now: PastLoad
    before: PastLoad | None

    @property
    def growth(self) -> float | None:
        """By which factor the number of its jobs has changed."""
        return None if self.before is None or not self.before.finished else self.now.finished / self.before.finished


def others_of(period: str) -> dict[str, str]:
    """With what a period can be compared: with what begins earlier by its length at least, so that they do not overlap."""
    return {name: words for name, words in AGAINST.items() if _EARLIER.get(name, PERIODS[period]) >= PERIODS[period]}


async def show(view: View) -> Shown:
    """The types that ran longest in a period, and the same in the one before, or in that of a day, a week or a month earlier."""
    lakes = await view.read(lake_queries.lakes, kept_s=10.0)
    names = [lake.name for lake in lakes]
    lake = view.query.get("lake") if view.query.get("lake") in names else (names[0] if names else None)
    period = given if (given := view.query.get("period", "")) in PERIODS else "day"
    others = others_of(period)
    against = given if (given := view.query.get("against", "")) in others else "before"
    length = PERIODS[period]
    step = _EARLIER.get(against, length)
    until = datetime.now(UTC).replace(second=0, microsecond=0)
    rows: list[Compared] = []
    workflows: tuple[list[WorkflowSummary], list[PastRun]] = ([], [])
    if lake is not None:
        now, before = await view.read(_both, lake, until, length, step, view.names, kept_s=30.0)
        if view.user.types is None:
            # A run has steps of any job type, so only users of all types may know of it.
            workflows = await view.read(_runs, lake, until, length, kept_s=30.0)
        earlier = {one.name: one for one in before}
        rows = [Compared(one, earlier.get(one.name)) for one in now]
    return Shown(
        "History",
        "history.html",
        {
            "lakes": names, "lake": lake, "period": period, "periods": list(PERIODS), "rows": rows, "against": against,
            "others": others, "workflows": workflows[0], "runs": workflows[1],
        },
    )  # fmt: skip


async def _both(
    database: Database, lake: str, until: datetime, length: timedelta, step: timedelta, names: tuple[str, ...] | None
) -> tuple[list[PastLoad], list[PastLoad]]:
    return (
        await queries.history_of(database, lake, until - length, until, names),
        await queries.history_of(database, lake, until - step - length, until - step, names),
    )


async def _runs(database: Database, lake: str, until: datetime, length: timedelta) -> tuple[list[WorkflowSummary], list[PastRun]]:
    """The workflows whose runs ended in a period, and the last of these runs."""
    since = until - length
    return (
        await lake_queries.workflow_summaries(database, lake, since, until + timedelta(minutes=1)),
        await lake_queries.runs(database, lake, limit=_RUNS, since=since),
    )


PAGES = [Page("history", show)]
