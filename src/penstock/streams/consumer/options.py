"""Options of consumers."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from penstock.core.checks import check_choice, check_number, check_span
from penstock.errors import InvalidInput
from penstock.settings import Settings
from penstock.streams.consumer.on_failure import OnFailure
from penstock.streams.models import OffsetReset

STARTS = ("earliest", "latest")


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """Options of a consumer.

    Attributes:
        max_batch_size: Maximum number of events in a batch.
        linger: How long to wait for more events after the first one of a batch.
        prefetch: Number of events to buffer for each partition; None: twice `max_batch_size`, at least 1,000. Large events are
            buffered in smaller numbers: the partitions of a process share 32 MiB, of which each gets at most 1 MiB.
        start: Position at which a new group starts: "earliest" or "latest".
        auto_offset_reset: Action when retention dropped the next events; "error" quarantines the partition.
        on_failure: Policy for events whose handler fails.
        concurrency: Maximum number of handlers at once in this process; None: one for each partition.
        grace: How long a handler may continue when its partition is revoked; None: until it has finished its batch, at most
            `Settings.wedged_after`.
    """

    max_batch_size: int = 1
    linger: timedelta = timedelta(0)
    prefetch: int | None = None
    start: str = "earliest"
    auto_offset_reset: OffsetReset = OffsetReset.ERROR
    on_failure: OnFailure = field(default_factory=OnFailure)
    concurrency: int | None = None
    grace: timedelta | None = None

    def __post_init__(self) -> None:
        check_number("max_batch_size", self.max_batch_size, 1, 100_000)
        check_span("linger", self.linger, zero=True)
        if self.prefetch is not None:
            check_number("prefetch", self.prefetch, 1, 1_000_000)
        check_choice("start", self.start, STARTS)
        check_choice("auto_offset_reset", self.auto_offset_reset, list(OffsetReset))
        if not isinstance(self.on_failure, OnFailure):
            raise InvalidInput(f"on_failure must be an OnFailure, not {self.on_failure!r:.100}")
        if self.concurrency is not None:
            check_number("concurrency", self.concurrency, 1, 100_000)
        if self.grace is not None:
            check_span("grace", self.grace, zero=True)

    def checked(self, settings: Settings) -> ConsumerOptions:
        """Return the options. Raises `InvalidInput` when a batch may linger for longer than a handler has to finish it."""
        grace = settings.handover_grace if self.grace is None else self.grace
        if self.linger > grace:
            raise InvalidInput(
                f"linger ({self.linger.total_seconds():g} s) must not be longer than the grace ({grace.total_seconds():g} s)",
                hint="A batch must be done within the grace: declare a longer one (grace=...), or set PENSTOCK_HANDOVER_GRACE.",
            )
        return self

    @property
    def ready(self) -> int:
        """Number of events to buffer for each partition."""
        return self.prefetch if self.prefetch is not None else max(1_000, 2 * self.max_batch_size)
