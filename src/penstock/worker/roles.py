"""The role of an executor in a worker: `Executor` runs handlers, and `ExternalExecutor` gives the jobs to a program."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol
from uuid import UUID

from penstock.pools.key_source import PoolExecutor
from penstock.pools.worked import WorkedPool


class WorkerExecutor(PoolExecutor, Protocol):
    """Keeps the jobs of a worker from their claim to their result."""

    on_room: list[Callable[[], None]]
    """Called soon after places have become free."""

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Of each kind of place those that are taken, and all. May be read from another thread."""

    @property
    def in_flight(self) -> int:
        """Claimed jobs that are not finished."""

    def runs_jobs_of(self, pool: WorkedPool) -> bool:
        """Whether it runs jobs of this pool; otherwise the pool has only standing jobs here."""

    def in_loop(self) -> str | None:
        """What the event loop runs at this moment. Called from another thread."""

    def holds(self, id: str) -> bool:
        """Whether it has a job. The id is any text, since it comes from a notification."""

    def jobs_of(self, names: Collection[str]) -> list[UUID]:
        """The jobs of these types that are not finished."""

    def cancel(self, id: UUID, reason: str) -> None:
        """Tell a job to stop."""

    async def run(self) -> None:
        """Watch the time limits until cancelled."""

    def release_waiting(self) -> None:
        """Release the jobs that have not started, and start no more."""

    async def finished(self, grace: float | None) -> bool:
        """Wait until all jobs are done. False when the grace period (seconds; None: any time) was too short."""

    async def stop_handlers(self) -> None:
        """Stop the jobs that still run."""

    def close(self) -> None:
        """End threads and processes without waiting for them."""
