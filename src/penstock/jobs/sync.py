"""The blocking half of penstock.jobs.job_type.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, ParamSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime, timedelta
    from typing import Any
    from uuid import UUID

    from penstock.core.blocking import BackgroundLoop
    from penstock.jobs.job_type import JobCall, JobType
    from penstock.jobs.models import Enqueued, NewJob
P = ParamSpec("P")


class SyncJobType(Generic[P]):
    """The blocking half of `JobType`, for threads without an event loop: `JobType.sync`."""

    def __init__(self, of: JobType[P], loop: BackgroundLoop) -> None:
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

    def options(
        self,
        *,
        id: UUID | str | None = None,
        key: str | None = None,
        priority: int = 0,
        run_after: datetime | timedelta | None = None,
        expires_at: datetime | timedelta | None = None,
        unique: str | None = None,
        max_attempts: int | None = None,
        time_limit: timedelta | None = None,
        connection: Any = None,
    ) -> SyncJobCall[P]:
        """Options of one job, which come before its arguments: `resize.options(key="u1").enqueue(path="a.png")`.

        Args:
            id: See `NewJob`.
            key: Key of the job; None: the declared one.
            priority: See `NewJob`.
            run_after: See `NewJob`.
            expires_at: See `NewJob`.
            unique: See `NewJob`.
            max_attempts: See `NewJob`.
            time_limit: See `NewJob`.
            connection: Connection of the caller, in whose transaction to enqueue; see `Penstock.enqueue`.
        """
        return self._of.options(
            id=id,
            key=key,
            priority=priority,
            run_after=run_after,
            expires_at=expires_at,
            unique=unique,
            max_attempts=max_attempts,
            time_limit=time_limit,
            connection=connection,
        ).sync

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Enqueued:
        """Enqueue one job with these arguments. See `Penstock.enqueue`, and `options` for its options.

        Args:
            args: Arguments of the handler by position: its payload, or the fields of its payload.
            kwargs: Arguments of the handler by name.
        """
        return self._loop.run(self._of.enqueue(*args, **kwargs))

    def enqueue_many(self, new: Iterable[NewJob | Any], *, connection: Any = None) -> list[Enqueued]:
        """Enqueue many jobs: `NewJob`s, as `new` makes them, or payloads. See `Penstock.enqueue_many`."""
        return self._loop.run(self._of.enqueue_many(new, connection=connection), connection=connection)


class SyncJobCall(Generic[P]):
    """The blocking half of `JobCall`, for threads without an event loop: `JobCall.sync`."""

    def __init__(self, of: JobCall[P], loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Enqueued:
        """Enqueue one job with these arguments. See `Penstock.enqueue`."""
        return self._loop.run(self._of.enqueue(*args, **kwargs), connection=self._of.connection)
