"""The blocking half of penstock.worker.receiver.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime, timedelta
    from typing import Any
    from uuid import UUID

    from penstock.core.blocking import BackgroundLoop
    from penstock.worker.receiver import PoolWorker, PulledJob
T = TypeVar("T")


class SyncPoolWorker(Generic[T]):
    """The blocking half of `PoolWorker`, for threads without an event loop: `PoolWorker.sync`."""

    def __init__(self, of: PoolWorker[T], loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def __enter__(self) -> Self:
        self._loop.run(self._of.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._loop.run(self._of.__aexit__(*error))

    @property
    def slots(self) -> list[int]:
        """The slots that this worker owns at this moment."""
        return self._loop.call(lambda: self._of.slots)

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Publish other metadata of this worker; a pool with its own `assign` places its keys again.

        Args:
            metadata: A JSON object, which `assign` gets.
        """
        self._loop.run(self._of.set_metadata(metadata))

    def jobs(self) -> Iterator[SyncPulledJob[T]]:
        """The jobs of the keys that this worker owns, as they arrive, one of each key at a time.

        Raises:
            Conflict: This worker was declared dead, and another one has its id now.
            SchemaMismatch: A migration has changed the schema so that this version cannot work with it.
        """
        for item in self._loop.each(self._of.jobs()):
            yield item.sync

    @property
    def id(self) -> str:
        """See `PoolWorker`."""
        return self._of.id


class SyncPulledJob(Generic[T]):
    """The blocking half of `PulledJob`, for threads without an event loop: `PulledJob.sync`."""

    def __init__(self, of: PulledJob[T], loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def ack(self, result: Any = None) -> None:
        """Settle the job as succeeded. Returns when that is written.

        Args:
            result: Result of the job, kept when its type has `keep_result`.

        Raises:
            Conflict: The job no longer belongs to this worker; another one runs it, or will run it.
        """
        self._loop.run(self._of.ack(result))

    def fail(self, error: str | BaseException, *, retry: bool = True, after: timedelta | None = None) -> None:
        """Settle the attempt as failed. The job is retried, `after` a delay or the backoff of the pool, while attempts are left.

        Args:
            error: Error of the attempt, as an exception or a text.
            retry: Whether the job may be retried.
            after: Delay before the next attempt; None: the backoff of the pool.

        Raises:
            Conflict: The job no longer belongs to this worker.
        """
        self._loop.run(self._of.fail(error, retry=retry, after=after))

    def snooze(self, duration: timedelta) -> None:
        """Put the job off without using up an attempt: it comes again after this time. See `Snooze`.

        Args:
            duration: How long the job waits.

        Raises:
            InvalidInput: The duration is not more than nothing, or too long.
            Conflict: The job no longer belongs to this worker.
        """
        self._loop.run(self._of.snooze(duration))

    def release(self) -> None:
        """Release the job as if it had not been pulled."""
        self._loop.run(self._of.release())

    def extend(self, duration: timedelta | None = None) -> None:
        """Extend the job's lease to `duration` from now (None: the visibility timeout).

        Args:
            duration: Length of the lease from now; None: the visibility timeout.

        Raises:
            Conflict: The job no longer belongs to this worker; stop working on it.
        """
        self._loop.run(self._of.extend(duration))

    def progress(self, value: Any) -> None:
        """Report the job's progress as any JSON value, shown beside the job. The last value is written about once a second.

        Args:
            value: Any JSON value.
        """
        self._loop.call(lambda: self._of.progress(value))

    def log(self, line: str) -> None:
        """Log a line with the job, where `find` and `penstock jobs show` show it, also when the job is finished.

        Lines are written about once a second. The newest 100 are kept, of each the first 1,000 characters.

        Args:
            line: Text of the line.

        Raises:
            InvalidInput: The line is not text.
        """
        self._loop.call(lambda: self._of.log(line))

    def finish(self, connection: Any, *, result: Any = None) -> None:
        """End the job as succeeded in your own transaction: exactly once, together with what the transaction does.

        The job is finished when the transaction commits. When it is rolled back, the job is not finished, and is retried. After
        the commit it does not matter how the handler ends. Call it last: while the transaction is open, `extend` is refused.

        Args:
            connection: Connection or session of asyncpg, psycopg, SQLAlchemy or Django with a transaction, in this database.
            result: Result of the job, any JSON, which is kept.

        Raises:
            Conflict: The job no longer belongs to this worker, or it runs in a process: do not commit.
            InvalidInput: The connection is of no supported kind, or has no transaction open.
        """
        self._loop.run(self._of.finish(connection, result=result), connection=connection)

    @property
    def cancelled(self) -> bool:
        """Whether to stop: the job was cancelled, or its time limit has passed. A plain handler checks this in its loops."""
        return self._loop.call(lambda: self._of.cancelled)

    @property
    def id(self) -> UUID:
        """See `PulledJob`."""
        return self._of.id

    @property
    def name(self) -> str:
        """See `PulledJob`."""
        return self._of.name

    @property
    def key(self) -> str | None:
        """See `PulledJob`."""
        return self._of.key

    @property
    def attempt(self) -> int:
        """See `PulledJob`."""
        return self._of.attempt

    @property
    def max_attempts(self) -> int:
        """See `PulledJob`."""
        return self._of.max_attempts

    @property
    def data(self) -> T:
        """See `PulledJob`."""
        return self._of.data

    @property
    def created_at(self) -> datetime:
        """See `PulledJob`."""
        return self._of.created_at

    @property
    def snoozes(self) -> int:
        """See `PulledJob`."""
        return self._of.snoozes
