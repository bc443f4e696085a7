"""How an application handles events: the handler, the form in which it takes them, and what is around it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.core.hooks import Around
from penstock.core.tracing import Tracing
from penstock.streams.consumer.batch import Batch

Form: TypeAlias = Literal["event", "batch", "events"]
Next: TypeAlias = Callable[[Batch[Any]], Awaitable[None]]
Middleware: TypeAlias = Callable[[Batch[Any], Next], Awaitable[None]]
EventHandler: TypeAlias = Callable[..., Any]


class Withdrawn(Exception):
    """The program has not finished a batch that it pulled or could have pulled; its events are delivered again."""


def _ignore(partition: int) -> None:
    """The default of `Handling.revoked`."""


@dataclass(frozen=True, slots=True)
class Handling:
    """How a consumer handles events.

    Attributes:
        handler: Handler, async or plain, called with its argument and its dependencies; a plain one runs in a thread.
        form: Argument of the handler: one event, a batch, or the events of a partition to iterate over.
        is_async: Whether the handler is async.
        around: How the handler is called for a batch: middleware and dependencies; None: it has none.
        revoked: Called with a partition that this process has to release.
        tracing: Makes a span of each call; None: there are none.
    """

    handler: EventHandler
    form: Form
    is_async: bool = True
    around: Around | None = None
    revoked: Callable[[int], None] = _ignore
    tracing: Tracing | None = None
