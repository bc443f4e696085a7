"""One typed function for each SQL function of the staged write."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from penstock.jobs.spark_attempt import SparkAttempt, fenced
from penstock.postgres.database import Database

SCHEMA = "penstock"
TABLE = "staged_jobs"
EVENTS = "staged_events"


@dataclass(frozen=True, slots=True)
class Committed:
    """The numbers of jobs that a commit enqueued, and that existed before. Both are 0 when the epoch was committed before."""

    queued: int
    known: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The number of rows that are staged for a job type or a stream, and the id of the stream."""

    rows: int
    id: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of a writer.

    Attributes:
        writer: Name of the writer.
        target: What it writes, see `penstock.sink_epochs`.
        epoch: Number of the batch. This number and all below are written once.
        query: Id of the streaming query; None: the write is not part of a streaming query.
    """

    writer: str
    target: str
    epoch: int
    query: str | None = None

    def part(self) -> str:
        """A new name for the rows that one attempt of a task stages, of the form of `penstock.parts_of`."""
        digest = hashlib.md5(self.target.encode(), usedforsecurity=False).hexdigest()
        return f"{self.epoch}.{digest[:8]}.{secrets.token_hex(10)}"


async def commit(
    database: Database,
    batch: Batch,
    parts: Sequence[str],
    named: Mapping[str, Rows],
    offsets: str | None = None,
    of: SparkAttempt | None = None,
) -> Committed:
    """Enqueue the staged rows of the parts, once for each epoch of a writer and a job type. Raises `Conflict`."""
    query = "select done.* from penstock.commit_staged($1, $2, $3, $4, $5, $6, $7::jsonb, $8::jsonb) as done"
    found = await database.fetch(*fenced(query, *_call(batch, parts, named, offsets), of=of), timeout=3600)
    return Committed(found[0]["queued"], found[0]["known"])


async def commit_events(
    database: Database,
    batch: Batch,
    parts: Sequence[str],
    named: Mapping[str, Rows],
    offsets: str | None = None,
    of: SparkAttempt | None = None,
) -> bool:
    """Append the staged rows of the parts, once for each epoch of a writer and a stream. Returns False when they were before.

    Raises:
        Conflict: The name of the writer belongs to another query, or a stream was dropped and created again since.
    """
    query = "select done from penstock.commit_staged_events($1, $2, $3, $4, $5, $6, $7::jsonb, $8::jsonb) as done"
    found = await database.fetch(*fenced(query, *_call(batch, parts, named, offsets), of=of), timeout=3600)
    return bool(found[0]["done"])


def _call(batch: Batch, parts: Sequence[str], named: Mapping[str, Rows], offsets: str | None) -> tuple[Any, ...]:
    rows = sum(one.rows for one in named.values())
    targets = orjson.dumps(named).decode() if named or batch.target in ("jobs", "streams") else None
    return batch.writer, batch.epoch, parts, rows, batch.target, batch.query, offsets, targets


async def discard(database: Database, batch: Batch) -> None:
    """Drop the staged rows of a batch."""
    await database.fetch("select penstock.discard_staged($1, $2, $3)", batch.writer, batch.epoch, batch.target)


@dataclass(frozen=True, slots=True)
class Writer:
    """What a writer has committed to one of its targets last, see `penstock.sink_epochs`.

    Attributes:
        writer: Name of the writer.
        target: What it writes.
        query: Id of the streaming query; None: batch writes.
        epoch: Number of the batch.
        rows: Rows of the batch.
        committed_at: Time of the commit.
        offsets: How far the batch had read each source of the query; None: not known.
        by_column: Whether a column of the rows names the target.
        handed_over: Whether the next query that writes under the name takes it.
    """

    writer: str
    target: str
    query: str | None
    epoch: int
    rows: int
    committed_at: datetime
    offsets: list[Any] | None
    by_column: bool
    handed_over: bool


async def known_writers(database: Database, writer: str | None = None) -> list[Writer]:
    """The writers of this role by name, or the one of a name: a record for each target."""
    rows = await database.fetch(
        "select writer, target, query, epoch, jobs, committed_at, offsets, by_column, handed_over from penstock.sink_epochs"
        " where role = session_user and (writer = $1 or $1 is null) order by writer, target limit 10000",
        writer,
    )
    return [
        Writer(
            writer=row["writer"],
            target=row["target"],
            query=row["query"],
            epoch=row["epoch"],
            rows=row["jobs"],
            committed_at=row["committed_at"],
            offsets=None if row["offsets"] is None else orjson.loads(row["offsets"]),
            by_column=row["by_column"],
            handed_over=row["handed_over"],
        )
        for row in rows
    ]


async def hand_over(database: Database, writer: str, epochs: Mapping[str, int]) -> int:
    """Refuse the query of a writer from now on, and give its name to the next query that writes under it.

    Args:
        database: The database.
        writer: Name of the writer.
        epochs: The number of the last batch of each target.

    Returns:
        The number of targets.

    Raises:
        Conflict: The query has written meanwhile, or the name is that of batch writes.
        NotFound: No query of this role writes under the name.
    """
    return int(
        await database.fetchval("select penstock.hand_over_writer($1, $2::jsonb)", writer, orjson.dumps(dict(epochs)).decode())
    )


async def forget(database: Database, writer: str) -> int:
    """Forget what was written under a name. Returns the number of its targets."""
    return int(await database.fetchval("select penstock.forget_writer($1)", writer))


async def writers(database: Database, prefix: str, target: str) -> list[tuple[str, int]]:
    """The writers of this role and target whose names begin with `prefix`, and the last epoch that each has committed."""
    rows = await database.fetch(
        "select writer, epoch from penstock.sink_epochs where starts_with(writer, $1) and target in ($2, '')"
        " and role in (session_user, '') order by committed_at desc",
        prefix,
        target,
    )
    return [(row["writer"], row["epoch"]) for row in rows]


async def written(database: Database, writer: str, target: str) -> int:
    """The number of rows in the last epoch of a writer to a target."""
    query = "select jobs from penstock.sink_epochs where writer = $1 and target = $2 and role = session_user"
    return int(await database.fetchval(query, writer, target) or 0)
