"""What fills the queue: the job types or the keys with most ready jobs, the oldest ones, or most finished ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from penstock.core.checks import check_choice, check_number, check_text
from penstock.core.records import example
from penstock.postgres.database import Database

BY = ("types", "keys")
ORDERS = ("ready", "oldest", "busy")
MOST = 1_000


@dataclass(frozen=True, slots=True)
class TopRecord:
    """How much of the queue belongs to a job type, or to a key of a job type.

    Attributes:
        name: Name of the job type.
        key: The key; None where the top is that of types.
        ready: Number of jobs that could start now.
        deferred: Number of jobs that wait for their time; an estimate where there are more than 50,000 of them.
        in_progress: Number of jobs that belong to a worker.
        oldest_ready_s: Seconds since the oldest ready job could start; None: no job is ready.
        finished: Number of jobs that finished in the last hour, of the last 10,000 jobs of all types that finished.
        looked_at: Share of the ready and running jobs that were looked at. 1: all of them, and their numbers are exact. Below 1:
            a random sample, the numbers are estimates, and the age is that of the oldest job in the sample.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "name": "invoices", "key": "acme", "ready": 9120, "deferred": 12, "in_progress": 1, "oldest_ready_s": 412.5,
        "finished": 840, "looked_at": 1.0,
    })  # fmt: skip

    name: str
    key: str | None
    ready: int
    deferred: int
    in_progress: int
    oldest_ready_s: float | None
    finished: int
    looked_at: float


def check_top(by: str, order: str, name: str | None, limit: int) -> None:
    """Raise `InvalidInput` unless these can be the arguments of `Penstock.top`."""
    check_choice("by", by, BY)
    check_choice("order", order, ORDERS)
    if name is not None:
        check_text("name", name)
    check_number("limit", limit, 1, MOST)


async def top(
    database: Database, by: str, *, order: str = "ready", names: Sequence[str] | None = None, limit: int = 20
) -> list[TopRecord]:
    """The top of the types or keys; of these types only, or of all."""
    rows = await database.fetch("select * from penstock.top($1, $2, $3, $4)", by, order, names, limit)
    return [TopRecord(*tuple(row)) for row in rows]


async def top_types(database: Database, names: Sequence[str] | None, limit: int) -> list[TopRecord]:
    """The types with most ready jobs; of these only, or of all."""
    return await top(database, "types", names=names, limit=limit)


async def top_keys(database: Database, name: str, limit: int) -> list[TopRecord]:
    """The keys of a type with most ready jobs."""
    return await top(database, "keys", names=[name], limit=limit)


async def largest_keys(database: Database) -> dict[str, int]:
    """The number of ready jobs of the fullest key of each job type that has one of the 1,000 fullest keys."""
    largest: dict[str, int] = {}
    for record in await top(database, "keys", limit=MOST):
        if record.ready:
            largest.setdefault(record.name, record.ready)
    return largest
