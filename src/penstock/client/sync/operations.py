"""Operations on all jobs that match a filter, over HTTP.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import UUID

from penstock.client import operation_calls as calls
from penstock.client.call import Send
from penstock.operations.models import Erasure, ErasurePreview, JobFilter, OperationKind, OperationPreview, OperationRecord


class Operations:
    """Changes of all jobs that match a filter, and erasures. See `penstock.operations.operations.Operations`."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def preview(self, kind: OperationKind, filter: JobFilter, *, priority: int | None = None) -> OperationPreview:
        """How many jobs an operation would change now, and some of them. Raises `InvalidInput`, `NotFound`."""
        return self._send(calls.preview(kind, filter, priority))

    def start(
        self, kind: OperationKind, filter: JobFilter, *, priority: int | None = None, id: UUID | str | None = None
    ) -> OperationRecord:
        """Start an operation. Raises `InvalidInput`, `NotFound`, `Conflict`."""
        return self._send(calls.start(kind, filter, priority, id))

    def preview_erasure(self, erasure: Erasure) -> ErasurePreview:
        """What an erasure would remove now. Raises `InvalidInput`."""
        return self._send(calls.preview_erasure(erasure))

    def erase(self, erasure: Erasure, *, id: UUID | str | None = None) -> OperationRecord:
        """Start an erasure. Raises `InvalidInput`, `Conflict`."""
        return self._send(calls.erase(erasure, id))

    def find(self, id: UUID | str) -> OperationRecord:
        """An operation, and how far it is. Raises `NotFound`."""
        return self._send(calls.find(id))

    def list(self, *, running: bool = False, limit: int = 50) -> list[OperationRecord]:
        """Operations that the user may see, the latest first."""
        return self._send(calls.operations(running, limit))

    def cancel(self, id: UUID | str) -> OperationRecord:
        """End an operation after its current batch. Raises `NotFound`."""
        return self._send(calls.cancel(id))

    def wait(self, id: UUID | str, *, timeout: timedelta = timedelta(minutes=1)) -> OperationRecord:
        """Wait until an operation has ended. Raises `NotFound`, `TimeoutError`."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not (record := self.find(id)).ended:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"operation {id} is {record.state}")
            time.sleep(0.2)
        return record
