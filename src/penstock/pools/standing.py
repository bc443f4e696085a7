"""Standing jobs as their handlers see them: what a handler receives, and the forms that it can have.

A handler has a start side and a stop side: it is an async generator that yields once in between, or returns an async context
manager. A coroutine function, which runs until it is cancelled, is a handler too.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from penstock.core.iteration import Iteration
from penstock.errors import InvalidInput

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Standing(Generic[T]):
    """A standing job as its handler receives it.

    Attributes:
        key: Key of the standing job.
        data: Payload.
        state: A small JSON value, which the last run left; None at first. The next run receives the value that this run sets.
        stopping: Set when the run has to stop.
    """

    key: str
    data: T
    state: Any
    stopping: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    _messages: asyncio.Queue[Any] = field(default_factory=asyncio.Queue, repr=False)
    _save: Callable[[Any], Any] | None = field(default=None, repr=False)
    _all_read: Callable[[], None] | None = field(default=None, repr=False)

    async def save(self, state: Any) -> None:
        """Set the state and write it now, so that it survives a crash of this worker.

        Args:
            state: Any JSON value.

        Raises:
            Conflict: The run no longer belongs to this worker; stop.
        """
        self.state = state
        if self._save is not None:
            await self._save(state)

    def messages(self) -> AsyncIterator[Any]:
        """The messages that `Pool.notify` sends, as they arrive. It goes on after a request that was cancelled."""
        taken = False

        async def message() -> Any:
            nonlocal taken
            if taken and self._all_read is not None and self._messages.empty():
                self._all_read()
            message = await self._messages.get()
            taken = True
            return message

        return Iteration(message)


Sides = Callable[[Standing[Any]], AbstractAsyncContextManager[Any]]


def two_sides(handler: Callable[[Any], Any]) -> Sides:
    """Convert a handler of any form to a function that returns an async context manager."""
    if inspect.isasyncgenfunction(handler):
        return asynccontextmanager(handler)
    if inspect.iscoroutinefunction(handler):

        @asynccontextmanager
        async def until_cancelled(job: Standing[Any]) -> AsyncIterator[asyncio.Task[Any]]:
            running = asyncio.create_task(handler(job), name=f"penstock-standing-{job.key}")
            try:
                yield running
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        return until_cancelled

    def made(job: Standing[Any]) -> AbstractAsyncContextManager[Any]:
        manager = handler(job)
        if not isinstance(manager, AbstractAsyncContextManager):
            raise InvalidInput(
                f"{handler.__qualname__} returned no async context manager",
                hint="Write an async generator that yields once, or an async function that runs until it is cancelled.",
            )
        return manager

    return made
