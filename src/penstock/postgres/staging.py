"""One typed function for each SQL function of the staged write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.postgres.database import Database

SCHEMA = "penstock"
TABLE = "staged_jobs"
EVENTS = "staged_events"


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit enqueued, and how many of its jobs there were already. Both 0 when the epoch was committed before."""

    queued: int
    known: int


async def commit(database: Database, writer: str, epoch: int, parts: Sequence[str], rows: int) -> Committed:
    """Enqueue what the parts have staged, once for each epoch of a writer."""
    found = await database.fetch("select * from penstock.commit_staged($1, $2, $3, $4)", writer, epoch, parts, rows, timeout=3600)
    return Committed(found[0]["queued"], found[0]["known"])


async def commit_events(database: Database, writer: str, epoch: int, parts: Sequence[str], rows: int) -> bool:
    """Append what the parts have staged, once for each epoch of a writer. Returns False when it was before."""
    query = "select penstock.commit_staged_events($1, $2, $3, $4) as done"
    return bool((await database.fetch(query, writer, epoch, parts, rows, timeout=3600))[0]["done"])


async def discard(database: Database, writer: str, epoch: int) -> None:
    """Drop what was staged for an epoch."""
    await database.fetch("select penstock.discard_staged($1, $2)", writer, epoch)


async def sweep(database: Database) -> int:
    """Drop what writers that never came back have staged. Returns how many rows."""
    return int(await database.fetchval("select penstock.sweep_staged()"))


async def writers(database: Database, prefix: str) -> list[tuple[str, int]]:
    """The writers whose names begin so, and the last epoch that each has committed."""
    rows = await database.fetch(
        "select writer, epoch from penstock.sink_epochs where starts_with(writer, $1) order by committed_at desc", prefix
    )
    return [(row["writer"], row["epoch"]) for row in rows]


async def written(database: Database, writer: str) -> int:
    """How many rows the last epoch of a writer had."""
    return int(await database.fetchval("select jobs from penstock.sink_epochs where writer = $1", writer) or 0)
