"""Children: the jobs that a running job enqueues, and for which it waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.jobs.models import Enqueued, NewJob


class ChildType(Protocol):
    """What the job type of a child does for the worker that enqueues it. A `JobType` is one."""

    @property
    def name(self) -> str:
        """Name of the job type."""

    async def enqueue_many(self, new: Iterable[NewJob | Any]) -> list[Enqueued]:
        """See `JobType.enqueue_many`."""


@dataclass(frozen=True, slots=True)
class ChildJob:
    """A job that `Job.gather` enqueues. `JobType.child` makes it.

    Attributes:
        type: Its job type.
        new: Its payload and options.
    """

    type: ChildType
    new: NewJob
