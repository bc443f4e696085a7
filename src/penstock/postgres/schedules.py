"""One typed function for each SQL function about schedules."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from penstock.errors import NotFound
from penstock.postgres.database import Database


@dataclass(frozen=True, slots=True)
class Due:
    """Whether a schedule was taken, for which time it runs (or will), and what time it is."""

    taken: bool
    at: datetime
    now: datetime
    in_s: float


async def now(database: Database) -> datetime:
    """The database's clock."""
    moment: datetime = await database.fetchval("select penstock.clock()", retry=True)
    return moment


async def declare(database: Database, name: str, kind: str, spec: str, first_at: datetime) -> None:
    """Create a schedule, or begin it anew when it changed."""
    await database.fetch("select penstock.declare_schedule($1, $2, $3, $4)", name, kind, spec, first_at, retry=True)


async def take(database: Database, name: str, worker: str, span: timedelta) -> Due:
    """Take a schedule if it is due. Raises `NotFound`."""
    row = await database.fetchrow("select * from penstock.take_schedule($1, $2, $3)", name, worker, span)
    if row["due_at"] is None:
        raise NotFound(f"schedule {name} was deleted", hint="Declare it again.")
    return Due(row["taken"], row["due_at"], row["now_at"], row["due_in"])


async def extend(database: Database, name: str, worker: str, due_at: datetime, span: timedelta) -> bool:
    """Say that a worker still runs it. False when another has taken it."""
    return bool(
        await database.fetchval("select penstock.extend_schedule($1, $2, $3, $4)", name, worker, due_at, span, retry=True)
    )


async def end(database: Database, name: str, worker: str, due_at: datetime, next_at: datetime, *, ran: bool) -> bool:
    """End a run. False when another has taken it."""
    query = "select penstock.end_schedule($1, $2, $3, $4, $5)"
    return bool(await database.fetchval(query, name, worker, due_at, next_at, ran, retry=True))
