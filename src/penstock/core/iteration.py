"""An asynchronous iterator whose requests can be cancelled.

An async generator ends when one of its requests is cancelled, as by `asyncio.wait_for(anext(iterator), 5)`: the next request says
that there is nothing more. What users iterate over is therefore made of a function that waits for one item, or its
requests run in tasks of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

T = TypeVar("T", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")
_END: Any = object()


class Iteration(Generic[T]):
    """The items that a function returns, one for each request; after a request that was cancelled the next one goes on.

    Args:
        request: Waits for the next item. It raises `StopAsyncIteration` when there are no more, and loses no item when it is
            cancelled.
    """

    def __init__(self, request: Callable[[], Awaitable[T]]) -> None:
        self._request = request
        self._ended = False

    def __aiter__(self) -> Iteration[T]:
        return self

    async def __anext__(self) -> T:
        if self._ended:
            raise StopAsyncIteration
        try:
            return await self._request()
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._ended = True
            raise

    async def aclose(self) -> None:
        """End the iteration."""
        self._ended = True


def lasting(function: Callable[P, AsyncGenerator[R, None]]) -> Callable[P, Iteration[R]]:
    """Let the iterations of an async generator function go on after a request that was cancelled.

    For generators that hold a connection, which the cancellation would break.
    """

    @wraps(function)
    def iteration(*args: P.args, **kwargs: P.kwargs) -> Iteration[R]:
        return _Lasting(function(*args, **kwargs))

    return iteration


class _Lasting(Iteration[R]):
    """The items of an async generator, whose requests run in tasks of their own.

    A cancelled request leaves its task running, and the next one gets its item.
    """

    def __init__(self, items: AsyncGenerator[R, None]) -> None:
        super().__init__(self._next)
        self._items = items
        self._turn = asyncio.Lock()
        self._asked: asyncio.Task[R] | None = None

    async def _next(self) -> R:
        async with self._turn:
            if self._ended:
                raise StopAsyncIteration
            if self._asked is None:
                self._asked = asyncio.create_task(_item_of(self._items), name="penstock-iteration")
            asked = self._asked
            await asyncio.wait([asked])
            self._asked = None
            if asked.cancelled() and self._ended:
                raise StopAsyncIteration
            item = asked.result()
            if item is _END:
                raise StopAsyncIteration
            return item

    async def aclose(self) -> None:
        """End the iteration, and the generator with its connection."""
        await super().aclose()
        if (asked := self._asked) is not None:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        await self._items.aclose()

    def __del__(self) -> None:
        # A program that lets go of the iteration after a cancelled request must not keep the connection.
        if self._asked is not None and not self._asked.done():
            with suppress(RuntimeError):
                self._asked.get_loop().call_soon_threadsafe(self._asked.cancel)


async def _item_of(items: AsyncGenerator[R, None]) -> R:
    """The next item. It does not refer to the iteration, so that this one can be let go of meanwhile."""
    return await anext(items, _END)
