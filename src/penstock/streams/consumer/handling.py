"""How an application handles events: the handler, the form in which it takes them, and middleware around it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.streams.consumer.batch import Batch

Form: TypeAlias = Literal["event", "batch", "events"]
Next: TypeAlias = Callable[[Batch[Any]], Awaitable[None]]
Middleware: TypeAlias = Callable[[Batch[Any], Next], Awaitable[None]]
EventHandler: TypeAlias = Callable[[Any], Any]


def _ignore(partition: int) -> None:
    """The default of `Handling.revoked`."""


@dataclass(frozen=True, slots=True)
class Handling:
    """How a consumer handles events.

    Attributes:
        handler: Handler, async or plain; a plain one runs in a thread.
        form: Argument of the handler: one event, a batch, or the events of a partition to iterate over.
        middleware: Functions called around each batch, the first outermost; not with the form "events".
        revoked: Called with a partition that this process has to release.
    """

    handler: EventHandler
    form: Form
    middleware: Sequence[Middleware] = ()
    revoked: Callable[[int], None] = _ignore
