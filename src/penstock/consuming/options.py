"""How a group consumes."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from penstock.consuming.failure import OnFailure
from penstock.errors import InvalidInput
from penstock.event import Gone


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """How a group consumes.

    Attributes:
        size: Most events in a batch.
        within: Seconds to wait after the first event for more.
        prefetch: Events to have ready for each partition; None: twice `size`, at least 1,000. Fewer when they are large: the
            partitions of a process share 32 MiB, of which each gets 1 MiB at most.
        start: Where a new group starts: "earliest" or "latest".
        gone: What to do when retention dropped what comes next; "error": quarantine the partition.
        on_failure: What to do when a handler fails.
        concurrency: Most handlers at once in this process; None: one for each partition.
        grace: How long a handler may go on when its partition goes to another member; None: as the settings say.
    """

    size: int = 1
    within: float = 0.0
    prefetch: int | None = None
    start: str = "earliest"
    gone: Gone = Gone.ERROR
    on_failure: OnFailure = field(default_factory=OnFailure)
    concurrency: int | None = None
    grace: timedelta | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or self.within < 0 or (self.prefetch is not None and self.prefetch < 1):
            raise InvalidInput("size and prefetch must be at least 1, and within not negative")
        if self.within > 0 and self.grace is not None and self.within > self.grace.total_seconds():
            raise InvalidInput(
                f"within ({self.within} s) must not be longer than grace", hint="A batch is to be done within the grace."
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidInput(f"concurrency must be at least 1, not {self.concurrency}")

    @property
    def ready(self) -> int:
        """How many events to have ready for each partition."""
        return self.prefetch if self.prefetch is not None else max(1_000, 2 * self.size)
