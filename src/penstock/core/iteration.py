"""An asynchronous iterator whose requests can be cancelled.

An async generator ends when one of its requests is cancelled, as by `asyncio.wait_for(anext(iterator), 5)`: the next request says
that there is nothing more. What users iterate over is therefore made of a function that waits for one item.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T", covariant=True)


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
