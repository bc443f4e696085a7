"""The blocking half of penstock.streams.consumer.pull.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    from typing import Any

    from penstock.core.blocking import BackgroundLoop
    from penstock.streams.consumer.batch import Batch
T = TypeVar("T")


class SyncConsumption(Generic[T]):
    """The blocking half of `Consumption`, for threads without an event loop: `Consumption.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop
        self._items = loop.each(of, lambda item: item)

    @property
    def partitions(self) -> list[int]:
        """Partitions that this member owns at this moment."""
        return self._loop.call(lambda: self._of.partitions)

    def open(self) -> None:
        """Join the group. The iteration does so implicitly."""
        self._loop.run(self._of.open())

    def done(self) -> None:
        """Mark the current batch as done without a request for another one: before `break`, or before leaving."""
        self._loop.call(lambda: self._of.done())

    def close(self, *, done: bool = False) -> None:
        """Leave the group. The current batch is not done, unless `done` is True."""
        self._loop.run(self._of.close(done=done))

    def __enter__(self) -> Self:
        self._loop.run(self._of.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._loop.run(self._of.__aexit__(*error))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch[T]:
        return next(self._items)
