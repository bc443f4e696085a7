"""How a group consumes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta

from penstock.checks import check_choice, check_number, check_span
from penstock.consuming.failure import OnFailure
from penstock.errors import InvalidInput
from penstock.event import Gone
from penstock.settings import Settings

STARTS = ("earliest", "latest")


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
        grace: How long a handler may go on when its partition goes to another member; None: until it is done with what it has in
            hand, for `Settings.wedged_after` at most.
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
        check_number("size", self.size, 1, 100_000)
        if isinstance(self.within, bool) or not isinstance(self.within, (int, float)) or not 0 <= self.within < math.inf:
            raise InvalidInput(f"within must be a number of seconds, 0 or more, not {self.within!r:.100}")
        if self.prefetch is not None:
            check_number("prefetch", self.prefetch, 1, 1_000_000)
        check_choice("start", self.start, STARTS)
        check_choice("gone", self.gone, list(Gone))
        if not isinstance(self.on_failure, OnFailure):
            raise InvalidInput(f"on_failure must be an OnFailure, not {self.on_failure!r:.100}")
        if self.concurrency is not None:
            check_number("concurrency", self.concurrency, 1, 100_000)
        if self.grace is not None:
            check_span("grace", self.grace, zero=True)

    def checked(self, settings: Settings) -> ConsumerOptions:
        """The same options. Raises `InvalidInput` when a batch would be gathered for longer than a handler gets to finish it."""
        grace = settings.handover_grace if self.grace is None else self.grace
        if self.within > grace.total_seconds():
            raise InvalidInput(
                f"within ({self.within:g} s) must not be longer than the grace ({grace.total_seconds():g} s)",
                hint="A batch is to be done within the grace: declare a longer one (grace=...), or set PENSTOCK_HANDOVER_GRACE.",
            )
        return self

    @property
    def ready(self) -> int:
        """How many events to have ready for each partition."""
        return self.prefetch if self.prefetch is not None else max(1_000, 2 * self.size)
