"""The worker's executor as a pool uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from penstock.jobs.handler import Group
from penstock.jobs.models import ClaimedJob

if TYPE_CHECKING:
    from penstock.worker.executor import Executor


class ExecutorOfPool:
    """The worker's executor as a pool uses it, with the places of one group. A `PoolExecutor`."""

    def __init__(self, executor: Executor, group: Group) -> None:
        self._executor = executor
        self._group = group

    def room(self) -> int:
        """See `PoolExecutor`."""
        return self._executor.room(self._group)

    def start(self, job: ClaimedJob, claimed_at: float, may_start: Callable[[], bool], ahead: bool) -> None:
        """See `PoolExecutor`."""
        self._executor.start(job, claimed_at, may_start, ahead)

    def cancel(self, id: UUID, reason: str) -> None:
        """See `PoolExecutor`."""
        self._executor.cancel(id, reason)

    def give_back(self, ids: Iterable[UUID]) -> None:
        """See `PoolExecutor`."""
        self._executor.give_back(ids)

    def abandon(self, lost: Iterable[UUID]) -> list[asyncio.Task[Any]]:
        """See `PoolExecutor`."""
        return self._executor.abandon(lost)

    def leases(self) -> Iterable[int]:
        """See `PoolExecutor`."""
        return self._executor.leases()
