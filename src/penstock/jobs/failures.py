"""The jobs that failed last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from penstock.postgres.database import Database


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that failed, with the type and the beginning of the message of its last error."""

    id: UUID
    name: str
    finished_at: datetime
    reason: str | None
    type: str | None
    message: str | None


async def recent_failures(
    database: Database,
    names: Sequence[str] | None = None,
    since: datetime | None = None,
    limit: int = 2_000,
    *,
    muted: bool = True,
) -> list[Failure]:
    """The jobs that failed last, latest first, with or without those whose failures are muted."""
    rows = await database.fetch("select * from penstock.recent_failures($1, $2, $3, $4)", names, since, limit, muted)
    return [Failure(*tuple(row)) for row in rows]
