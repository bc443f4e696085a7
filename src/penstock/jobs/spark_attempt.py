"""The attempt of a Spark job to which a process belongs, and the fence of what it writes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from penstock.postgres.database import Database

FENCE = "PENSTOCK_SPARK_JOB"
"""Environment variable of a driver with job, attempt, lease and driver, as JSON."""


@dataclass(frozen=True, slots=True)
class SparkAttempt:
    """An attempt of a Spark job. What belongs to it counts only while the job is held as when its driver was started.

    Attributes:
        job: Id of the job.
        attempt: Number of the attempt.
        lease: Number of the lease of its claim, which extends do not change: a job that is released and claimed again is the same
            attempt under another lease.
        driver: Which driver it is.
    """

    job: UUID
    attempt: int
    lease: int
    driver: str

    @classmethod
    def here(cls) -> SparkAttempt | None:
        """That of the driver of this process; None: no worker has started it."""
        if (text := os.environ.get(FENCE)) is None:
            return None
        found = json.loads(text)
        return cls(UUID(found["job"]), found["attempt"], found["lease"], found["driver"])

    def as_json(self) -> str:
        """As the environment variable has it."""
        return json.dumps({"job": str(self.job), "attempt": self.attempt, "lease": self.lease, "driver": self.driver})

    @property
    def run_name(self) -> str:
        """The name of its writes and of its job group in Spark, which is the same in each attempt."""
        return f"job {self.job}"


def fenced(query: str, *arguments: Any, of: SparkAttempt | None) -> tuple[Any, ...]:
    """A query with its arguments, which raises `Conflict` and does nothing unless this attempt runs (None: it does in any case).

    Args:
        query: A query of the form `select ... from ...`.
        arguments: Its arguments.
        of: The attempt.
    """
    if of is None:
        return query, *arguments
    job, attempt, lease = (f"${len(arguments) + n}" for n in (1, 2, 3))
    fence = f"(select penstock.require_attempt({job}, {attempt}, {lease})) as fence"
    return query.replace(" from ", f" from {fence} cross join ", 1), *arguments, of.job, of.attempt, of.lease


async def require_attempt(database: Database, of: SparkAttempt) -> None:
    """Raise `Conflict` unless this attempt of a Spark job runs."""
    await database.fetch("select penstock.require_attempt($1, $2, $3)", of.job, of.attempt, of.lease)
