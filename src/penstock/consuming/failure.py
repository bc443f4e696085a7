"""What a consumer does with an event, or a batch, whose handler fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, TypeAlias, get_args

from penstock.checks import check_number
from penstock.errors import InvalidInput
from penstock.job import Backoff

Then: TypeAlias = Literal["skip", "dead-letter", "quarantine", "halt"]


@dataclass(frozen=True, slots=True)
class OnFailure:
    """The policy of a consumer.

    Attributes:
        attempts: How often a handler is called with the same events; None: until it succeeds.
        then: What happens after the last attempt. "skip": the group goes on. "dead-letter": the events go to the stream
            `<name>.dead`, with the error, and the group goes on. "quarantine": that partition pauses, visibly, until somebody
            resumes it; the others go on. "halt": this member of the group stops with `Halted`. The handlers of its other
            partitions finish what they have in hand, nothing at or behind the event is committed, and `lag` shows why. Its
            partitions go to the other members, who come upon the event in turn; other work of its worker goes on.
        backoff: Delays between attempts; meanwhile the partition waits, for the order of its events.
    """

    attempts: int | None = None
    then: Then = "quarantine"
    backoff: Backoff = field(default_factory=lambda: Backoff(base=timedelta(seconds=1), cap=timedelta(minutes=1)))

    def __post_init__(self) -> None:
        if self.attempts is not None:
            check_number("attempts", self.attempts, 1, 2**31 - 1)
        if self.then not in get_args(Then):
            raise InvalidInput(f"unknown policy: {self.then!r:.100}", hint=f"Use one of {', '.join(get_args(Then))}.")
        if not isinstance(self.backoff, Backoff):
            raise InvalidInput(
                f"backoff must be a Backoff, not {self.backoff!r:.100}", hint="For example: Backoff(base=timedelta(seconds=2))"
            )

    @classmethod
    def of(cls, given: OnFailure | str) -> OnFailure:
        """A policy by its short name: "retry" (until it succeeds), or what `then` says at the first failure."""
        if isinstance(given, OnFailure):
            return given
        if given == "retry":
            return cls()
        if given not in get_args(Then):
            raise InvalidInput(
                f"unknown policy: {given!r:.100}", hint=f"Use retry, {', '.join(get_args(Then))}, or an OnFailure."
            )
        return cls(attempts=1, then=given)  # type: ignore[arg-type]
