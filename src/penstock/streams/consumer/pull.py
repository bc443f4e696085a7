"""The pull form of a consumer: the program requests batches itself."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, TypeVar

from penstock.core.encryption import no_key
from penstock.core.logs import get_logger
from penstock.core.polling import IdleLimit, idle_seconds
from penstock.errors import PenstockError
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.postgres.notifications import Kind, Notifications
from penstock.postgres.schema_watch import left_behind
from penstock.streams.consumer.batch import Batch
from penstock.streams.consumer.consumer import Consumer
from penstock.streams.consumer.handling import Handling, Withdrawn
from penstock.streams.consumer.options import ConsumerOptions
from penstock.streams.consumer.sync import SyncConsumption
from penstock.streams.declared_stream import DeclaredStream

log = get_logger("penstock.consumer")
T = TypeVar("T")
_LEAVE_WITHIN_S = 5.0


class Consumption(Generic[T]):
    """A member of a consumer group whose batches the program pulls. `Stream.consume` makes it.

    Iterate over it inside `async with`, so that it leaves the group at the end, and in one task or thread: each further one needs
    its own, since its requests would mark the batches of the others as done. A batch is done when the program requests the next
    one or calls `done`. A batch that is not done when the block ends, by `break` or an error, is delivered again, to this or
    another member. The iteration raises `OffsetGone` when retention dropped the next events, unless `auto_offset_reset` says
    where to continue.

    Attributes:
        consumer: The consumer, while it is a member of the group; None before and after.
    """

    def __init__(
        self, stream: DeclaredStream[T], group: str, options: ConsumerOptions, id: str | None, idle_timeout: timedelta | None
    ) -> None:
        self._stream = stream
        self._group = group
        self._options = options
        self._id = id
        self._idle = IdleLimit(idle_seconds(idle_timeout))
        self._offered: asyncio.Queue[tuple[Batch[T], asyncio.Future[None]]] = asyncio.Queue()
        self._delivered: asyncio.Future[None] | None = None
        self.consumer: Consumer[T] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._opening: asyncio.Task[None] | None = None

    @property
    def sync(self) -> SyncConsumption[T]:
        """The blocking half, for threads without an event loop."""
        return SyncConsumption(self, self._stream.context.background)

    @property
    def partitions(self) -> list[int]:
        """Partitions that this member owns at this moment."""
        return sorted(self.consumer.member.owned) if self.consumer is not None else []

    async def open(self) -> None:
        """Join the group. The iteration does so implicitly."""
        if self.consumer is not None:
            return
        # A request that is cancelled meanwhile must not leave a member behind that nothing runs.
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name="penstock-join")
            self._opening.add_done_callback(self._opened)
        await asyncio.shield(self._opening)

    def _opened(self, opening: asyncio.Task[None]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # the caller that waits gets it

    async def _open(self) -> None:
        database = await self._stream.context.database()
        await self._stream.ready()
        if self._stream.encoding.locked:
            raise no_key(f"stream {self._stream.name}")
        consumer: Consumer[T] = Consumer(
            database,
            self._stream.name,
            self._stream.encoding,
            self._group,
            self._options,
            self._stream.context.settings,
            Handling(self._offer, "batch", revoked=self._withdraw),
            self._id,
            idle=self._idle,
        )
        consumer.raises_gone = True
        await consumer.declare()
        await consumer.member.join()

        notifications = Notifications()
        consumer.subscribe(notifications)
        notifications.wake(database.schema_changed.set, Kind.SCHEMA)
        self.consumer = consumer
        channels = ["penstock", f"penstock_{consumer.member.id}"]
        self._tasks = [
            asyncio.create_task(self._run(database, consumer), name="penstock-consumer"),
            asyncio.create_task(Listener(database, channels, notifications.dispatch).run(), name="penstock-listener"),
        ]

    def done(self) -> None:
        """Mark the current batch as done without a request for another one: before `break`, or before leaving."""
        if self._delivered is not None and not self._delivered.done():
            self._delivered.set_result(None)

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
            # A batch that can no longer be committed is delivered again to another member.
            await asyncio.wait([consuming], timeout=_LEAVE_WITHIN_S)
            raise error
        finally:
            for task in (consuming, watching):
                task.cancel()
            await asyncio.gather(consuming, watching, return_exceptions=True)

    async def close(self, *, done: bool = False) -> None:
        """Leave the group. The current batch is not done, unless `done` is True."""
        if done:
            self.done()
        if (opening := self._opening) is not None:
            await asyncio.gather(opening, return_exceptions=True)
        if self._delivered is not None:
            self._delivered.cancel()
            await asyncio.sleep(0)
        if self.consumer is None:
            return
        self.consumer.stop()
        # Batches that the program has not taken are not done.
        while not self._offered.empty():
            self._offered.get_nowait()[1].cancel()
        with suppress(PenstockError):
            await asyncio.wait(self._tasks[:1], timeout=15.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.consumer = None

    async def __aenter__(self) -> Consumption[T]:
        try:
            await self.open()
        except asyncio.CancelledError:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def __aiter__(self) -> Consumption[T]:
        return self

    async def __anext__(self) -> Batch[T]:
        return await self._idle.next(self._next)

    async def _next(self) -> Batch[T]:
        await self.open()
        self.done()
        for _ in range(3):
            # Usually the next batch is available at once.
            if self._offered.empty():
                await asyncio.sleep(0)
                continue
            batch, self._delivered = self._offered.get_nowait()
            if not self._delivered.done():
                return batch
        while True:
            asking = asyncio.ensure_future(self._offered.get())
            try:
                await asyncio.wait([asking, self._tasks[0]], return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                # A caller that waits with a time limit must not lose a batch that arrives at that moment.
                if asking.done():
                    self._offered.put_nowait(asking.result())
                asking.cancel()
                raise
            if not asking.done():
                asking.cancel()
                self._tasks[0].result()
                raise StopAsyncIteration
            batch, self._delivered = asking.result()
            if not self._delivered.done():
                return batch

    def _withdraw(self, partition: int) -> None:
        """Withdraw batches of a partition that the program has not taken, so that its release need not wait for them."""
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
            # The partition was revoked, or the consumption was closed: the batch is not done.
            taken.cancel()
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Withdrawn from None
