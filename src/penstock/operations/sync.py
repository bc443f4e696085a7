"""The blocking half of penstock.operations.operations.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any
    from uuid import UUID

    from penstock.core.blocking import BackgroundLoop
    from penstock.operations.models import JobFilter, OperationKind, OperationPreview, OperationRecord


class SyncOperations:
    """The blocking half of `Operations`, for threads without an event loop: `Operations.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def preview(self, kind: OperationKind, filter: JobFilter) -> OperationPreview:
        """How many jobs an operation would change now, and some of them. Nothing is changed.

        Args:
            kind: See `start`.
            filter: Which jobs.

        Raises:
            InvalidInput: The filter has no condition, or one that does not apply.
            NotFound: There is no such job type.
        """
        return self._loop.run(self._of.preview(kind, filter))

    def start(self, kind: OperationKind, filter: JobFilter, *, id: UUID | str | None = None) -> OperationRecord:
        """Start an operation on the jobs that match now, and return at once; see `wait`.

        Args:
            kind: `cancel`: queued jobs are archived as cancelled, and the handlers of running ones are told. `replay`: finished
                jobs are enqueued again, unless a replay of them waits, runs or has succeeded. `purge`: queued jobs are archived
                as cancelled with the reason `purged`, and running ones go on.
            filter: Which jobs.
            id: Id of the operation, so that a repeated call starts one; None: a new UUIDv7.

        Raises:
            InvalidInput: The filter has no condition, or one that does not apply.
            NotFound: There is no such job type.
            Conflict: The id is that of another operation.
        """
        return self._loop.run(self._of.start(kind, filter, id=id))

    def find(self, id: UUID | str) -> OperationRecord:
        """An operation, and how far it is.

        Args:
            id: Id of the operation.

        Raises:
            NotFound: There is no such operation.
        """
        return self._loop.run(self._of.find(id))

    def list(self, *, running: bool = False, limit: int = 50) -> list[OperationRecord]:
        """Operations, the latest first.

        Args:
            running: Only those that have not ended.
            limit: Maximum number.
        """
        return self._loop.run(self._of.list(running=running, limit=limit))

    def cancel(self, id: UUID | str) -> OperationRecord:
        """End an operation after its current batch. What it has changed stays so.

        Args:
            id: Id of the operation.

        Raises:
            NotFound: There is no such operation.
        """
        return self._loop.run(self._of.cancel(id))

    def wait(self, id: UUID | str, *, timeout: timedelta = timedelta(minutes=1)) -> OperationRecord:
        """Wait until an operation has ended, and return it with its counts. A worker has to run.

        Args:
            id: Id of the operation.
            timeout: Longest wait.

        Raises:
            NotFound: There is no such operation.
            TimeoutError: It did not end in time; it goes on.
        """
        return self._loop.run(self._of.wait(id, timeout=timeout), wait=timeout)
