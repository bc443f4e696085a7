"""A job type as a worker works it: its handler, where that runs, and the options that matter while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from penstock.handler import Group, Handler
from penstock.job import Delivery, JobTypeRecord, Options, PoolOptions
from penstock.ownership.assign import KeyAssign
from penstock.payload import Codec

StandingHandler = Callable[[Any], Any]


@dataclass(slots=True)
class WorkedPool:
    """One pool of a worker: the type of its jobs (None: it has only standing jobs here), and what makes it a pool."""

    name: str
    declared: Options
    options: PoolOptions
    type: WorkedType | None
    assign: KeyAssign | None = None
    standing: StandingHandler | None = None
    standing_codec: Codec[Any] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Held(Protocol):
    """A job in hand. Its lease gets another number whenever it is extended."""

    lease: int


class NotStarted(Exception):
    """Raised by a handler that did nothing yet: its job is handed back as if it had not been claimed."""


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
    limited: bool = False
    once: bool = False

    def refresh(self, record: JobTypeRecord) -> None:
        """Take over what the database says."""
        self.limit = record.options.time_limit
        self.keep_result = record.options.keep_result
        self.limited = record.options.concurrency is not None or record.options.rate_limit is not None
        self.once = record.options.delivery is Delivery.AT_MOST_ONCE

    def time_limit(self, lease_s: float) -> float:
        """Seconds that a handler may run, counted from before the claim: it ends before the lease does."""
        return min(self.limit.total_seconds(), lease_s) if self.limit is not None else lease_s * 0.9
