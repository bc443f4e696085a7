"""Jobs, for threads without an event loop."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from penstock.batches import make_batch, receipts_of
from penstock.callers import enqueue_through_blocking
from penstock.declaring import JobType
from penstock.job import Enqueued, JobCounts, JobRecord, NewJob, Options, Status, Why
from penstock.pools import Pool
from penstock.schedule import ScheduleRecord
from penstock.sync.loop import OnLoop

T = TypeVar("T")


class SyncJobs(OnLoop):
    """Enqueue, look, steer."""

    def enqueue(
        self,
        type: JobType[T] | Pool[T] | str,
        data: T | None = None,
        *,
        id: UUID | str | None = None,
        key: str | None = None,
        priority: int = 0,
        run_after: datetime | timedelta | None = None,
        expires_at: datetime | timedelta | None = None,
        unique: str | None = None,
        connection: Any = None,
    ) -> Enqueued:
        """Enqueue one job. See `Penstock.enqueue`."""
        new = NewJob({} if data is None else data, id, key, priority, run_after, expires_at, unique)
        return self.enqueue_many(type, [new], connection=connection)[0]

    def enqueue_many(
        self, type: JobType[T] | Pool[T] | str, new: Iterable[NewJob | T], *, connection: Any = None
    ) -> list[Enqueued]:
        """Enqueue many jobs; into a pool as `NewJob` with a key. See `Penstock.enqueue_many`."""
        if isinstance(type, Pool):
            type = type.name
        if connection is None:
            return self._call(self._app.enqueue_many(type, new))
        declared = self._app.types.get(type) if isinstance(type, str) else type
        if declared is None:
            declared = JobType(self._app, str(type), Any, Options(), None, "async")
        batch = make_batch(declared.name, declared.codec, list(new))
        return receipts_of(batch, enqueue_through_blocking(connection, batch))

    def find(self, id: UUID | str) -> JobRecord:
        """Everything known of a job. See `Penstock.find`."""
        return self._call(self._app.find(id))

    def why(self, id: UUID | str) -> Why:
        """Why a job waits. See `Penstock.why`."""
        return self._call(self._app.why(id))

    def find_many(
        self,
        *,
        name: str | None = None,
        status: Status | str | None = None,
        key: str | None = None,
        reason: str | None = None,
        limit: int = 50,
    ) -> list[JobRecord]:
        """Jobs, latest first. See `Penstock.find_many`."""
        return self._call(self._app.find_many(name=name, status=status, key=key, reason=reason, limit=limit))

    def wait(self, id: UUID | str, *, timeout: timedelta = timedelta(minutes=1)) -> JobRecord:
        """Wait until a job is finished. See `Penstock.wait`."""
        return self._call(self._app.wait(id, timeout=timeout), timeout + self._timeout)

    def cancel(self, id: UUID | str) -> str:
        """Cancel a job. See `Penstock.cancel`."""
        return self._call(self._app.cancel(id))

    def replay(self, id: UUID | str, *, new_id: UUID | str | None = None, data: Any = None, force: bool = False) -> Enqueued:
        """Enqueue a copy of a job. See `Penstock.replay`."""
        return self._call(self._app.replay(id, new_id=new_id, data=data, force=force))

    def pause(self, name: str) -> None:
        """Pause a job type. See `Penstock.pause`."""
        self._call(self._app.pause(name))

    def resume(self, name: str) -> None:
        """Resume a job type. See `Penstock.resume`."""
        self._call(self._app.resume(name))

    def list_schedules(self) -> list[ScheduleRecord]:
        """All schedules, with their last runs. See `Penstock.list_schedules`."""
        return self._call(self._app.list_schedules())

    def drop_schedule(self, name: str) -> None:
        """Forget a schedule that left the code. See `Penstock.drop_schedule`."""
        self._call(self._app.drop_schedule(name))

    def counts(self) -> list[JobCounts]:
        """How each job type is doing. See `Penstock.counts`."""
        return self._call(self._app.counts())
