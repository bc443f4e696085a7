"""The policy of a consumer for events whose handler fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, TypeAlias, get_args

from penstock.core.checks import check_number
from penstock.errors import InvalidInput
from penstock.jobs.options import Backoff

Then: TypeAlias = Literal["skip", "dead-letter", "quarantine", "halt"]


@dataclass(frozen=True, slots=True)
class OnFailure:
    """The policy of a consumer.

    Attributes:
        max_attempts: Maximum number of attempts at the same events; None: until the handler succeeds.
        then: Action after the last attempt. "skip": the group continues behind the events. "dead-letter": the events are copied
            to the stream `<name>.dead`, with the error, and the group continues. "quarantine": the partition pauses, visibly,
            until an operator resumes it; the other partitions continue. "halt": this member of the group stops with `Halted`. The
            handlers of its other partitions finish their batches, no offset at or behind the event is committed, and `lag` shows
            the reason. The other members take its partitions and meet the event in turn; other work of its worker continues.
        backoff: Delays between attempts; the partition waits meanwhile, to keep the order of its events.
    """

    max_attempts: int | None = None
    then: Then = "quarantine"
    backoff: Backoff = field(default_factory=lambda: Backoff(base=timedelta(seconds=1), cap=timedelta(minutes=1)))

    def __post_init__(self) -> None:
        if self.max_attempts is not None:
            check_number("max_attempts", self.max_attempts, 1, 2**31 - 1)
        if self.then not in get_args(Then):
            raise InvalidInput(f"unknown policy: {self.then!r:.100} (then)", hint=f"Use one of {', '.join(get_args(Then))}.")
        if not isinstance(self.backoff, Backoff):
            raise InvalidInput(
                f"backoff must be a Backoff, not {self.backoff!r:.100}", hint="For example: Backoff(base=timedelta(seconds=2))"
            )

    @classmethod
    def of(cls, given: OnFailure | str) -> OnFailure:
        """A policy by its short name: "retry" (until the handler succeeds), or a value of `then` for the first failure.

        Args:
            given: The policy, or its short name.
        """
        if isinstance(given, OnFailure):
            return given
        if given == "retry":
            return cls()
        if given not in get_args(Then):
            raise InvalidInput(
                f"unknown policy: {given!r:.100} (on_failure)", hint=f"Use retry, {', '.join(get_args(Then))}, or an OnFailure."
            )
        return cls(max_attempts=1, then=given)  # type: ignore[arg-type]
