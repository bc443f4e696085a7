"""Operations on all jobs that match a filter: `Penstock.operations`."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

from penstock.errors import InvalidInput
from penstock.jobs.models import make_id
from penstock.operations import queries
from penstock.operations.models import (
    Erasure,
    ErasurePreview,
    JobFilter,
    OperationKind,
    OperationPreview,
    OperationRecord,
    check_priority_of,
)
from penstock.operations.sync import SyncOperations
from penstock.postgres.context import Context


class Operations:
    """Cancels, replays, purges, reorders or runs now all jobs that match a filter, and erases. Workers do it.

    Args:
        context: Database of the application.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def sync(self) -> SyncOperations:
        """The blocking half, for threads without an event loop."""
        return SyncOperations(self, self._context.background)

    async def preview(self, kind: OperationKind, filter: JobFilter, *, priority: int | None = None) -> OperationPreview:
        """How many jobs an operation would change now, and some of them. Nothing is changed.

        Args:
            kind: See `start`.
            filter: Which jobs.
            priority: See `start`.

        Raises:
            InvalidInput: The filter has no condition, or one that does not apply, or the priority does not.
            NotFound: There is no such job type.
        """
        check_priority_of(kind, priority)
        return await queries.preview(await self._context.database(), kind, filter, priority)

    async def start(
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
        check_priority_of(kind, priority)
        return await queries.start(
            await self._context.database(), kind, filter, make_id() if id is None else parse_operation_id(id), priority
        )

    async def preview_erasure(self, erasure: Erasure) -> ErasurePreview:
        """What an erasure would remove now. It reads all jobs and events, and changes nothing; it does not look into lakes.

        Args:
            erasure: What is to be removed.

        Raises:
            InvalidInput: There is neither a key nor a field with its value, or both.
        """
        return await queries.preview_erasure(await self._context.database(), erasure)

    async def erase(self, erasure: Erasure, *, id: UUID | str | None = None) -> OperationRecord:
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
        return await queries.erase(await self._context.database(), erasure, make_id() if id is None else parse_operation_id(id))

    async def find(self, id: UUID | str) -> OperationRecord:
        """An operation, and how far it is.

        Args:
            id: Id of the operation.

        Raises:
            NotFound: There is no such operation.
        """
        return await queries.find(await self._context.database(), parse_operation_id(id))

    async def list(self, *, running: bool = False, limit: int = 50) -> list[OperationRecord]:
        """Operations, the latest first.

        Args:
            running: Only those that have not ended.
            limit: Maximum number.
        """
        return await queries.operations(await self._context.database(), limit, running)

    async def cancel(self, id: UUID | str) -> OperationRecord:
        """End an operation after its current batch. What it has changed stays so.

        Args:
            id: Id of the operation.

        Raises:
            NotFound: There is no such operation.
        """
        return await queries.cancel(await self._context.database(), parse_operation_id(id))

    async def wait(self, id: UUID | str, *, timeout: timedelta = timedelta(minutes=1)) -> OperationRecord:
        """Wait until an operation has ended, and return it with its counts. A worker has to run.

        Args:
            id: Id of the operation.
            timeout: Longest wait.

        Raises:
            NotFound: There is no such operation.
            TimeoutError: It did not end in time; it goes on.
        """
        pause = 0.02
        async with asyncio.timeout(timeout.total_seconds()):
            while not (record := await self.find(id)).ended:
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, 1.0)
        return record


def parse_operation_id(id: UUID | str) -> UUID:
    """The id of an operation. Raises `InvalidInput`."""
    if isinstance(id, UUID):
        return id
    try:
        return UUID(id)
    except (ValueError, AttributeError):
        raise InvalidInput(f"invalid id of an operation: {str(id)[:100]!r}", hint="It is a UUID.") from None
