"""Many items in one call: group commit, and what follows when the database refuses a call because of one of its items.

Group commit: requests that arrive while a batch is under way form the next batch. One transaction for each batch instead of one
for each request makes thousands of single requests a second possible. Each request gets its own outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from penstock.core.lending import work_for_process
from penstock.errors import DatabaseUnavailable, NotFound, PenstockError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
R = TypeVar("R")


async def in_halves(
    items: Sequence[T],
    write: Callable[[Sequence[T]], Awaitable[R]],
    refused: Callable[[Sequence[T], PenstockError], Awaitable[R]],
    undivided: type[PenstockError] | tuple[type[PenstockError], ...] = (),
) -> list[R]:
    """Write items in one call, and when it is refused, in halves, until the invalid items are alone and fail no valid ones.

    Args:
        items: At least one item.
        write: Writes some of the items, or none of them when it raises a `PenstockError`.
        refused: Called with an item that is refused alone, or with items that are refused by one of the errors `undivided`.
        undivided: Errors that are not about an item, after which halves would be refused too.

    Returns:
        What the calls of `write` and `refused` returned, in the order of the items.
    """
    try:
        return [await write(items)]
    except PenstockError as error:
        if len(items) == 1 or isinstance(error, undivided):
            return [await refused(items, error)]
    middle = len(items) // 2
    return [written for half in (items[:middle], items[middle:]) for written in await in_halves(half, write, refused, undivided)]


class GroupCommit(Generic[K, T, R]):
    """Gathers items by key, such as the job type of an enqueue. Each key has one batch under way at a time.

    Args:
        commit: Commits a batch of one key and returns one result for each item, in order.
        most: Largest number of items in one batch.
        identity: Identity of an item, unique within a batch; an item whose identity is in the batch already waits for the next
            batch. None: items may repeat.
    """

    def __init__(
        self,
        commit: Callable[[K, list[T]], Awaitable[list[R]]],
        *,
        most: int = 1_000,
        identity: Callable[[T], Hashable] | None = None,
    ) -> None:
        self._commit = commit
        self._most = most
        self._identity = identity
        self._waiting: dict[K, list[tuple[T, asyncio.Future[R]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, key: K, item: T) -> R:
        """Return the outcome of one item when its batch is committed. Raises the error that the item caused in its batch."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.append((item, future))
        else:
            self._waiting[key] = [(item, future)]
            task = asyncio.create_task(self._run(key), name="penstock-group-commit")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _run(self, key: K) -> None:
        work_for_process()
        while waiting := self._waiting[key]:
            batch, later = self._next(waiting)
            self._waiting[key] = later
            await self._settle(key, batch)
        del self._waiting[key]

    def _next(
        self, waiting: list[tuple[T, asyncio.Future[R]]]
    ) -> tuple[list[tuple[T, asyncio.Future[R]]], list[tuple[T, asyncio.Future[R]]]]:
        batch, later = waiting[: self._most], waiting[self._most :]
        if self._identity is None:
            return batch, later
        seen: set[Hashable] = set()
        again: list[tuple[T, asyncio.Future[R]]] = []
        chosen: list[tuple[T, asyncio.Future[R]]] = []
        for entry in batch:
            identity = self._identity(entry[0])
            (again if identity in seen else chosen).append(entry)
            seen.add(identity)
        return chosen, again + later

    async def _settle(self, key: K, batch: list[tuple[T, asyncio.Future[R]]]) -> None:
        async def commit(part: Sequence[tuple[T, asyncio.Future[R]]]) -> None:
            results = await self._commit_with_retry(key, [item for item, _ in part])
            for (_, future), result in zip(part, results, strict=True):
                if not future.done():
                    future.set_result(result)

        async def refused(part: Sequence[tuple[T, asyncio.Future[R]]], error: PenstockError) -> None:
            for _, future in part:
                _fail(future, error)

        try:
            await in_halves(batch, commit, refused, (NotFound, DatabaseUnavailable))
        except BaseException as error:
            for _, future in batch:
                _fail(future, error)
            if not isinstance(error, Exception):
                raise

    async def _commit_with_retry(self, key: K, items: list[T]) -> list[R]:
        """Commit, and try once more at once: a pooled connection shows only in use that the server has closed it."""
        try:
            return await self._commit(key, items)
        except DatabaseUnavailable:
            return await self._commit(key, items)


def _fail(future: asyncio.Future[R], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error if isinstance(error, Exception) else RuntimeError("the server is stopping"))
        # A request whose client has disconnected never reads its exception; asyncio would log it as never retrieved.
        future.exception()
