"""The blocking half of penstock.jobs.job_type.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, ParamSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Unpack

    from penstock.core.blocking import BackgroundLoop
    from penstock.jobs.models import Enqueued, NewJob, NewJobOptions
P = ParamSpec("P")


class SyncJobType(Generic[P]):
    """The blocking half of `JobType`, for threads without an event loop: `JobType.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def declare(self) -> None:
        """Write the job type with its options into the database, with its pool or its subscription where it has one.

        It creates a type again that was dropped, which an enqueue does not do.

        Raises:
            InvalidInput: An option is not valid.
            Conflict: The name is in use for something else.
        """
        self._loop.run(self._of.declare())

    def options(self, *, connection: Any = None, **options: Unpack[NewJobOptions]) -> SyncJobCall[P]:
        """Options of one job, which come before its arguments: `resize.options(key="u1").enqueue(path="a.png")`.

        Args:
            connection: Connection of the caller, in whose transaction to enqueue; see `Penstock.enqueue`.
            options: Fields of `NewJob`: `id`, `key` (instead of the declared one), `priority`, `run_after`, ...
        """
        return self._of.options(connection=connection, **options).sync

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

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def enqueue_many(self, payloads: Iterable[Any]) -> list[Enqueued]:
        """Enqueue many jobs with these options: a job for each payload. See `Penstock.enqueue_many`.

        Args:
            payloads: Their payloads.
        """
        return self._loop.run(self._of.enqueue_many(payloads), connection=self._of.connection)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Enqueued:
        """Enqueue one job with these arguments. See `Penstock.enqueue`."""
        return self._loop.run(self._of.enqueue(*args, **kwargs), connection=self._of.connection)
