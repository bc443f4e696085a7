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
    from penstock.operations.models import Erasure, ErasurePreview, JobFilter, OperationKind, OperationPreview, OperationRecord


class SyncOperations:
    """The blocking half of `Operations`, for threads without an event loop: `Operations.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def preview(self, kind: OperationKind, filter: JobFilter, *, priority: int | None = None) -> OperationPreview:
        """How many jobs an operation would change now, and some of them. Nothing is changed.

        Args:
            kind: See `start`.
            filter: Which jobs.
            priority: See `start`.

        Raises:
            InvalidInput: The filter has no condition, or one that does not apply, or the priority does not.
            NotFound: There is no such job type.
        """
        return self._loop.run(self._of.preview(kind, filter, priority=priority))

    def start(
        self, kind: OperationKind, filter: JobFilter, *, priority: int | None = None, id: UUID | str | None = None
    ) -> OperationRecord:
        """Start an operation on the jobs that match now, and return at once; see `wait`.

        Args:
            kind: `cancel`: queued jobs are archived as cancelled, and the handlers of running ones are told. `replay`: finished
                jobs are enqueued again, unless a replay of them waits, runs or has succeeded. `purge`: queued jobs are archived
                as cancelled with the reason `purged`, and running ones go on. `set-priority`: jobs that wait get the priority
                `priority`, each behind those that have it already; jobs of pools have none. `run-now`: jobs that wait for their
                time, or for a further attempt, are due at once.
            filter: Which jobs.
            priority: Of `set-priority` the new priority, -100 (first) to 100 (last); otherwise None.
            id: Id of the operation, so that a repeated call starts one; None: a new UUIDv7.

        Raises:
            InvalidInput: The filter has no condition, or one that does not apply, or the priority does not.
            NotFound: There is no such job type.
            Conflict: The id is that of another operation.
        """
        return self._loop.run(self._of.start(kind, filter, priority=priority, id=id))

    def preview_erasure(self, erasure: Erasure) -> ErasurePreview:
        """What an erasure would remove now. It reads all jobs and events, and changes nothing; it does not look into lakes.

        Args:
            erasure: What is to be removed.

        Raises:
            InvalidInput: There is neither a key nor a field with its value, or both.
        """
        return self._loop.run(self._of.preview_erasure(erasure))

    def erase(self, erasure: Erasure, *, id: UUID | str | None = None) -> OperationRecord:
        """Start to remove all that belongs to a key or to a value of a field, and return at once; see `wait`.

        What is enqueued, appended or published after the start is not part of it. docs/erasure.md says what is removed.

        Args:
            erasure: What is to be removed.
            id: Id of the operation, so that a repeated call starts one; None: a new UUIDv7.

        Raises:
            InvalidInput: There is neither a key nor a field with its value, or both.
            Conflict: Payloads whose fields cannot be seen exist, and the erasure does not skip them; or the id is that of
                another operation.
        """
        return self._loop.run(self._of.erase(erasure, id=id))

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
