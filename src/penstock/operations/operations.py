"""Operations on all jobs that match a filter: `Penstock.operations`."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

from penstock.errors import InvalidInput
from penstock.jobs.models import make_id
from penstock.operations import queries
from penstock.operations.models import JobFilter, OperationKind, OperationPreview, OperationRecord
from penstock.operations.sync import SyncOperations
from penstock.postgres.context import Context


class Operations:
    """Cancels, replays and purges all jobs that match a filter. Workers do it in batches, whatever happens to this program.

    Args:
        context: Database of the application.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def sync(self) -> SyncOperations:
        """The blocking half, for threads without an event loop."""
        return SyncOperations(self, self._context.background)

    async def preview(self, kind: OperationKind, filter: JobFilter) -> OperationPreview:
        """How many jobs an operation would change now, and some of them. Nothing is changed.

        Args:
            kind: See `start`.
            filter: Which jobs.

        Raises:
            InvalidInput: The filter has no condition, or one that does not apply.
            NotFound: There is no such job type.
        """
        return await queries.preview(await self._context.database(), kind, filter)

    async def start(self, kind: OperationKind, filter: JobFilter, *, id: UUID | str | None = None) -> OperationRecord:
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
        return await queries.start(
            await self._context.database(), kind, filter, make_id() if id is None else parse_operation_id(id)
        )

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
