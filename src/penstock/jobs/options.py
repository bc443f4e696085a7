"""The options of job types and pools, as an application declares them: plain data, no input or output."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from penstock.settings import Keep


class Delivery(enum.StrEnum):
    """How often a job may be started.

    Attributes:
        AT_LEAST_ONCE: A job is retried until it ends.
        AT_MOST_ONCE: A job starts at most once, whatever crashes.
    """

    AT_LEAST_ONCE = "at_least_once"
    AT_MOST_ONCE = "at_most_once"


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays between attempts: `base * factor ** n`, at most `cap`, with a random jitter of the share `jitter`.

    Attributes:
        base: Delay before the second attempt.
        factor: By how much each further delay is longer.
        cap: Longest delay.
        jitter: Share of the delay that is random, 0 to 1.
    """

    base: timedelta = timedelta(seconds=2)
    factor: float = 2.0
    cap: timedelta = timedelta(hours=1)
    jitter: float = 0.1


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most `limit` starts within any `period`, over all workers.

    Attributes:
        limit: Number of starts.
        period: Length of the period.
    """

    limit: int
    period: timedelta


@dataclass(frozen=True, slots=True)
class Options:
    """How the jobs of a type are delivered, retried and limited.

    Attributes:
        delivery: `at_least_once` retries a job; `at_most_once` starts it at most once, whatever crashes.
        max_attempts: Maximum number of attempts before a job counts as failed; None: 5, or 1 for `at_most_once`.
        concurrency: Maximum number of jobs in flight over all workers; None: no limit, 0: paused.
        visibility_timeout: How long a claimed job belongs to its worker.
        time_limit: How long a handler may run; None: nine tenths of the visibility timeout.
        backoff: Delays between attempts.
        rate_limit: Maximum number of starts in a period; None: no limit.
        keep: How long its finished jobs are kept; with `Keep`, by their outcome. None: as the settings of the application say.
        keep_result: Whether the value that the handler returns is kept.
        encrypted: Whether payloads, results, progress and errors are stored encrypted, with the keys of the application.
        max_waiting: Maximum number of jobs that wait, ready or deferred; an enqueue beyond it raises `QueueFull`. None: no limit.
        max_crashes: How many workers may be lost while they run nothing but a job before it counts as failed, with the reason
            `quarantined`; None: any number. What merely ran beside it never counts.
        docs_url: Address of the documentation of the type, for people who look at its jobs: `https://...`.
        owner: Who answers for the type: a team, an address.
    """

    delivery: Delivery = Delivery.AT_LEAST_ONCE
    max_attempts: int | None = None
    concurrency: int | None = None
    visibility_timeout: timedelta = timedelta(minutes=5)
    time_limit: timedelta | None = None
    backoff: Backoff = field(default_factory=Backoff)
    rate_limit: RateLimit | None = None
    keep: Keep | timedelta | None = None
    keep_result: bool = False
    encrypted: bool = False
    max_waiting: int | None = None
    max_crashes: int | None = 3
    docs_url: str | None = None
    owner: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The options in the form that the SQL functions accept."""
        once = self.delivery == Delivery.AT_MOST_ONCE
        keep = self.keep if isinstance(self.keep, Keep) else Keep(self.keep, self.keep)
        return {
            "delivery_strategy": str(self.delivery),
            "max_attempts": self.max_attempts if self.max_attempts is not None else (1 if once else 5),
            "concurrency": self.concurrency,
            "visibility_timeout": _interval(self.visibility_timeout),
            "time_limit": _interval(self.time_limit),
            "backoff_base": _interval(self.backoff.base),
            "backoff_factor": self.backoff.factor,
            "backoff_cap": _interval(self.backoff.cap),
            "backoff_jitter": self.backoff.jitter,
            "rate_limit": self.rate_limit.limit if self.rate_limit else None,
            "rate_period": _interval(self.rate_limit.period) if self.rate_limit else None,
            "keep_succeeded": _interval(keep.succeeded),
            "keep_failed": _interval(keep.failed),
            "keep_result": self.keep_result,
            "max_waiting": self.max_waiting,
            "max_crashes": self.max_crashes,
            # A declaration turns encryption on, and never off.
            **({"encrypted": True} if self.encrypted else {}),
        }


def _interval(span: timedelta | None) -> str | None:
    return None if span is None else f"{span.total_seconds():.6f} seconds"


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of a pool beyond those of its job type.

    Attributes:
        slots: Number of parts into which the keys are divided, and of the workers that a pool can keep busy. It can grow later.
        assignor: "sticky" moves the fewest slots; "jump" orders the workers by age; "custom" applies a rule of the application.
        on_retry: "block": a job that waits for its retry blocks its key; "skip": later jobs of the key run before it.
        key_concurrency: Maximum number of jobs of one key at once; more than 1 means no order among them.
        key_rate: Maximum number of starts of one key in a period; None: no limit.
        weights: Quantum of each key that gets more than one job in its turn.
        key_max_waiting: Maximum number of jobs of one key that wait, ready or deferred; an enqueue beyond it raises `QueueFull`.
            None: no limit.
        prefetch_per_key: Maximum number of jobs of one key that a worker claims at once. After a crash, jobs whose results were
            not written run again, in order; with 1, a job starts only when the result of the one before it is written.
    """

    slots: int = 256
    assignor: Literal["sticky", "jump", "custom"] = "sticky"
    on_retry: Literal["block", "skip"] = "block"
    key_concurrency: int = 1
    key_rate: RateLimit | None = None
    weights: Mapping[str, int] = field(default_factory=dict)
    prefetch_per_key: int = 500
    key_max_waiting: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The options in the form that the SQL function accepts."""
        return {
            "slots": self.slots,
            "assignor": self.assignor,
            "on_retry": self.on_retry,
            "key_concurrency": self.key_concurrency,
            "key_rate_limit": self.key_rate.limit if self.key_rate else None,
            "key_rate_period": _interval(self.key_rate.period) if self.key_rate else None,
            "key_max_waiting": self.key_max_waiting,
            "weights": dict(self.weights),
        }
