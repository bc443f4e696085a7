"""The pull form of a consumer: the program asks for batches itself."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.consuming.batch import Batch
from penstock.consuming.consumer import Consumer
from penstock.consuming.delivery import Deliver
from penstock.consuming.options import ConsumerOptions
from penstock.errors import PenstockError
from penstock.logs import get_logger
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.postgres.schema_watch import left_behind

if TYPE_CHECKING:
    from penstock.streams import Stream

log = get_logger("penstock.consumer")
T = TypeVar("T")
_LEAVE_WITHIN_S = 5.0


class Consumption(Generic[T]):
    """A member of a consumer group whose batches are pulled. Made by `Stream.consume`.

    Iterate over it, inside `async with` so that it leaves the group when you are done. A batch is done when the next one is asked
    for, or `done` is called; one that is in hand when the block ends, by `break` or an error, comes again, here or elsewhere.
    Raises `OffsetGone` from the iteration when retention dropped what comes next, unless `gone` says where to go on.
    """

    def __init__(self, stream: Stream[T], group: str, options: ConsumerOptions, id: str | None) -> None:
        self._stream = stream
        self._group = group
        self._options = options
        self._id = id
        self._offered: asyncio.Queue[tuple[Batch[T], asyncio.Future[None]]] = asyncio.Queue()
        self._in_hand: asyncio.Future[None] | None = None
        self._consumer: Consumer[T] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def partitions(self) -> list[int]:
        """The partitions that are this member's at this moment."""
        return sorted(self._consumer.member.owned) if self._consumer is not None else []

    async def open(self) -> None:
        """Join the group. Iterating does it by itself."""
        if self._consumer is not None:
            return
        database = await self._stream.app.database()
        await self._stream.ready()
        consumer: Consumer[T] = Consumer(
            database,
            self._stream.name,
            self._stream.encoding,
            self._group,
            self._options,
            self._stream.app.settings,
            Deliver(self._offer, "batch", revoked=self._take_back),
            self._id,
        )
        consumer.raises_gone = True
        await consumer.declare()
        await consumer.member.join()

        def heard(payload: str) -> None:
            word, _, _ = payload.partition(" ")
            if word == "schema":
                database.schema_changed.set()
            elif word in ("slots", "moved", "events", "connected", "listening"):
                consumer.heard(word)

        self._consumer = consumer
        channels = ["penstock", f"penstock_{consumer.member.id}"]
        self._tasks = [
            asyncio.create_task(self._run(database, consumer), name="penstock-consumer"),
            asyncio.create_task(Listener(database, channels, heard).run(), name="penstock-listener"),
        ]

    def done(self) -> None:
        """The batch in hand is done, though no other one is asked for: before `break`, or before leaving."""
        if self._in_hand is not None and not self._in_hand.done():
            self._in_hand.set_result(None)

    async def _run(self, database: Database, consumer: Consumer[T]) -> None:
        """Consume until `stop`, or until a migration leaves this version behind."""
        consuming = asyncio.create_task(consumer.run(), name="penstock-consuming")
        watching = asyncio.create_task(left_behind(database), name="penstock-schema")
        try:
            await asyncio.wait([consuming, watching], return_when=asyncio.FIRST_COMPLETED)
            if consuming.done():
                consuming.result()
                return
            error = watching.result()
            log.error("schema_cannot_be_used", consumer=consumer.member.id, error=error, hint=error.hint)
            consumer.stop()
            # What it has in hand comes again elsewhere when it cannot be committed any more.
            await asyncio.wait([consuming], timeout=_LEAVE_WITHIN_S)
            raise error
        finally:
            for task in (consuming, watching):
                task.cancel()
            await asyncio.gather(consuming, watching, return_exceptions=True)

    async def close(self, *, done: bool = False) -> None:
        """Leave the group. What is in hand is not done, unless `done` says so."""
        if done:
            self.done()
        if self._in_hand is not None:
            self._in_hand.cancel()
            await asyncio.sleep(0)
        if self._consumer is None:
            return
        self._consumer.stop()
        # Batches that nobody has taken are nobody's.
        while not self._offered.empty():
            self._offered.get_nowait()[1].cancel()
        with suppress(PenstockError):
            await asyncio.wait(self._tasks[:1], timeout=15.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._consumer = None

    async def __aenter__(self) -> Consumption[T]:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def __aiter__(self) -> Consumption[T]:
        return self

    async def __anext__(self) -> Batch[T]:
        await self.open()
        self.done()
        for _ in range(3):
            # In the common case the next batch is there at once.
            if self._offered.empty():
                await asyncio.sleep(0)
                continue
            batch, self._in_hand = self._offered.get_nowait()
            if not self._in_hand.done():
                return batch
        while True:
            asking = asyncio.ensure_future(self._offered.get())
            try:
                await asyncio.wait([asking, self._tasks[0]], return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                # Whoever waits only for a while must not lose what comes at that moment.
                if asking.done():
                    self._offered.put_nowait(asking.result())
                asking.cancel()
                raise
            if not asking.done():
                asking.cancel()
                self._tasks[0].result()
                raise StopAsyncIteration
            batch, self._in_hand = asking.result()
            if not self._in_hand.done():
                return batch

    def _take_back(self, partition: int) -> None:
        """Batches of a partition that nobody has taken yet need not be waited for."""
        for _ in range(self._offered.qsize()):
            batch, taken = self._offered.get_nowait()
            if batch.partition == partition:
                taken.cancel()
            else:
                self._offered.put_nowait((batch, taken))

    async def _offer(self, batch: Any) -> None:
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offered.put_nowait((batch, taken))
        try:
            await taken
        except asyncio.CancelledError:
            # Either this partition goes away, or the program was closed: not done.
            taken.cancel()
            raise
