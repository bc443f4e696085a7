"""A job type as a worker works it: its handler, where that runs, and the options that matter while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from penstock.handler import Group, Handler
from penstock.job import JobTypeRecord, Options
from penstock.payload import Codec


class SettledElsewhere(Exception):
    """Raised by a handler whose job somebody else has settled, as a callback does: there is nothing left to settle."""


@dataclass(slots=True)
class WorkedType:
    """One job type of a worker. `options` are refreshed from the database while the worker runs."""

    name: str
    declared: Options
    codec: Codec[Any]
    handler: Handler
    group: Group
    limit: timedelta | None = None
    keep_result: bool = False

    def refresh(self, record: JobTypeRecord) -> None:
        """Take over what the database says."""
        self.limit = record.options.time_limit
        self.keep_result = record.options.keep_result

    def time_limit(self, lease_s: float) -> float:
        """Seconds that a handler may run, counted from before the claim: it ends before the lease does."""
        return min(self.limit.total_seconds(), lease_s) if self.limit is not None else lease_s * 0.9
