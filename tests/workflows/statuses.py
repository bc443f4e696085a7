"""The status of a job."""

from __future__ import annotations

from uuid import UUID

from penstock import Enqueued, Penstock


async def status(app: Penstock, job: Enqueued | UUID) -> str:
    """The status of a job."""
    return str((await app.find(job.id if isinstance(job, Enqueued) else job)).status)
