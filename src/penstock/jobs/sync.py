"""The blocking half of penstock.jobs.job_type.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime, timedelta
    from typing import Any
    from uuid import UUID

    from penstock.core.blocking import BackgroundLoop
    from penstock.jobs.job_type import JobType
    from penstock.jobs.models import Enqueued, NewJob
T = TypeVar("T")


class SyncJobType(Generic[T]):
    """The blocking half of `JobType`, for threads without an event loop: `JobType.sync`."""

    def __init__(self, of: JobType[T], loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def declare(self) -> None:
        """Write the job type with its options into the database, with its pool or its subscription where it has one.

        This happens once for each database; an enqueue without `connection=` does it implicitly.

        Raises:
            InvalidInput: An option is not valid.
            Conflict: The name is in use for something else.
        """
        self._loop.run(self._of.declare())

    def enqueue(
        self,
        data: T | None = None,
        *,
        id: UUID | str | None = None,
        key: str | None = None,
        priority: int = 0,
        run_after: datetime | timedelta | None = None,
        expires_at: datetime | timedelta | None = None,
        unique: str | None = None,
        connection: Any = None,
    ) -> Enqueued:
        """Enqueue one job. See `Penstock.enqueue`."""
        return self._loop.run(
            self._of.enqueue(
                data,
                id=id,
                key=key,
                priority=priority,
                run_after=run_after,
                expires_at=expires_at,
                unique=unique,
                connection=connection,
            ),
            connection=connection,
        )

    def enqueue_many(self, new: Iterable[NewJob | T], *, connection: Any = None) -> list[Enqueued]:
        """Enqueue many jobs. See `Penstock.enqueue_many`."""
        return self._loop.run(self._of.enqueue_many(new, connection=connection), connection=connection)
