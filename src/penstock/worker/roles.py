"""What a worker needs of its executor, of which there are two: one runs handlers, the other hands jobs to the program."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol
from uuid import UUID

from penstock.pools.fetcher import PoolExecutor
from penstock.pools.worked import WorkedPool


class WorkerExecutor(PoolExecutor, Protocol):
    """Has the jobs of a worker from their claim to their result."""

    on_room: list[Callable[[], None]]
    """Called soon after places have come free."""

    @property
    def in_flight(self) -> int:
        """Claimed jobs that are not finished."""

    def runs_jobs_of(self, pool: WorkedPool) -> bool:
        """Whether it runs jobs of this pool; otherwise the pool has only standing jobs here."""

    def in_loop(self) -> str | None:
        """What the event loop works on at this moment, asked from another thread."""

    def holds(self, id: str) -> bool:
        """Whether it has a job, by its id as a text from anywhere."""

    def jobs_of(self, names: Collection[str]) -> list[UUID]:
        """The jobs of these types that are not finished."""

    def cancel(self, id: UUID, reason: str) -> None:
        """Tell a job to stop."""

    async def run(self) -> None:
        """Watch the limits of time until cancelled."""

    def release_waiting(self) -> None:
        """Hand back what did not start, and start nothing more."""

    async def finished(self, grace: float | None) -> bool:
        """Wait until all jobs are done. False when the grace period (seconds; None: any time) was too short."""

    async def stop_handlers(self) -> None:
        """Stop what still runs."""

    def close(self) -> None:
        """End threads and processes without waiting for them."""
