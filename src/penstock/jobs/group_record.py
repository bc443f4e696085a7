"""The record of a job group, which the handler of a job gets too (`Job.group`)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar
from uuid import UUID

from pydantic import ConfigDict

from penstock.core.records import example
from penstock.jobs.records import JobId

_AT = "2026-01-11T18:26:26Z"
_ID = "0199f7c2-6a40-7cc1-a3c5-0f3f3c0ad0b5"


@dataclass(frozen=True, slots=True)
class JobGroupRecord:
    """A job group as it is stored.

    Attributes:
        id: Id of the group.
        name: Name of the group.
        parent: Id of the group of which it is a child, or None.
        created_at: Time at which it was opened.
        sealed_at: Time from which it ends with the last of its children; None: more are to come.
        cancelled_at: Time at which its children began to be cancelled, or None.
        finished_at: Time of its end, or None.
        status: `open` (not sealed), `running`, or how it ended: `succeeded` when each child succeeded, otherwise `failed`,
            `cancelled` or `expired`.
        on_failure: `cancel`: the first child that fails or expires cancels the others; `continue`: they go on.
        then_job: Id of the job that runs when the group has ended, or None.
        added: Number of its children so far.
        succeeded: Number of children that succeeded.
        failed: Number of children that failed.
        cancelled: Number of children that were cancelled.
        expired: Number of children that expired.
        changed_at: Time at which these numbers changed last.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "id": _ID, "name": "import-2026-01-11", "parent": None, "created_at": _AT, "sealed_at": _AT, "cancelled_at": None,
        "finished_at": None, "status": "running", "on_failure": "cancel",
        "then_job": "job_282227eb-3c76-4ef7-af7e-25dff933077f", "added": 100000, "succeeded": 5120, "failed": 0, "cancelled": 0,
        "expired": 0, "changed_at": _AT,
    })  # fmt: skip

    id: UUID
    name: str
    parent: UUID | None
    created_at: datetime
    sealed_at: datetime | None
    cancelled_at: datetime | None
    finished_at: datetime | None
    status: str
    on_failure: str
    then_job: JobId | None
    added: int
    succeeded: int
    failed: int
    cancelled: int
    expired: int
    changed_at: datetime

    @property
    def ended(self) -> int:
        """Number of children that have ended, in whatever way."""
        return self.succeeded + self.failed + self.cancelled + self.expired
