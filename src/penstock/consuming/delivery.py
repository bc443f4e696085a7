"""From a partition's events to its handler, again and again, and what becomes of events whose handler fails."""

from __future__ import annotations

import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from penstock.consuming.batch import Batch, Events, Fence
from penstock.consuming.failure import OnFailure
from penstock.contained import contained, message_of
from penstock.encoding import Undecodable
from penstock.errors import Conflict, Fail, PenstockError, Retry
from penstock.job import Backoff
from penstock.logs import get_logger

if TYPE_CHECKING:
    from penstock.consuming.consumer import Consumer
    from penstock.consuming.part import Part

log = get_logger("penstock.consumer")
T = TypeVar("T")
Form: TypeAlias = Literal["event", "batch", "events"]
Next: TypeAlias = Callable[[Batch[Any]], Awaitable[None]]
Middleware: TypeAlias = Callable[[Batch[Any], Next], Awaitable[None]]
EventHandler: TypeAlias = Callable[[Any], Any]


class Halted(PenstockError):
    """A handler failed, and its consumer was told to halt then; nothing at or behind the event is committed in its partition."""

    foreign = True


class Deliver(Generic[T]):
    """Runs the handler of a consumer for its partitions.

    Args:
        handler: The handler, async or plain (in a thread).
        form: What it takes: one event, a batch, or the events of a partition to iterate over.
        middleware: Called around each batch, the first outermost; not with the form "events".
        revoked: Called when a partition is to be given up.
    """

    def __init__(
        self,
        handler: EventHandler,
        form: Form,
        middleware: Sequence[Middleware] = (),
        revoked: Callable[[int], None] = lambda partition: None,
    ) -> None:
        self.revoked = revoked
        self._handler = handler
        self._form = form
        self._async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004
        self._call: Next = self._one if form == "event" else self._whole
        for outer in reversed(middleware):
            self._call = _around(outer, self._call)
        self._consumer: Consumer[T] | None = None

    def belongs_to(self, consumer: Consumer[T]) -> None:
        """Whose handler this is."""
        self._consumer = consumer

    async def run(self, part: Part[T]) -> None:
        """Deliver a partition's events until it is to be drained."""
        try:
            while not part.draining:
                try:
                    with contained():
                        if self._form == "events":
                            await self._iterate(part)
                        else:
                            await self._deliver(part)
                except Exception as error:
                    await self._failed(part, error)
        finally:
            if part.alone:
                self._owner().caution.release(part)

    async def _deliver(self, part: Part[T]) -> None:
        consumer = self._owner()
        options = consumer.options
        while batch := await self._next(part, options.size, options.within):
            if self._form == "batch":
                await self._hand(part, batch)
                continue
            events = batch.events
            for place, event in enumerate(events):
                if part.draining or part.paused:
                    part.give_back(events[place:])
                    break
                try:
                    await self._hand(part, self._batch(part, [event]))
                except BaseException:
                    part.give_back(events[place + 1 :])
                    raise

    async def _hand(self, part: Part[T], batch: Batch[T]) -> None:
        part.in_hand = batch
        batch.attempt = part.attempts + 1
        async with self._owner().place():
            await self._call(batch)
        self._done(part)

    async def _iterate(self, part: Part[T]) -> None:
        async def batches(size: int, within: float) -> AsyncIterator[Batch[T]]:
            while True:
                if part.in_hand is not None:
                    self._done(part)
                # It has a place while it works, not while it waits.
                await place.aclose()
                batch = await self._next(part, size, within)
                if batch is None:
                    return
                await place.enter_async_context(self._owner().place())
                part.in_hand = batch
                batch.attempt = part.attempts + 1
                yield batch

        async with AsyncExitStack() as place:
            await self._handler(Events(part.partition, batches))
        if part.in_hand is not None:
            self._done(part)
        if not part.draining:
            log.warning("handler_returned", handler=getattr(self._handler, "__qualname__", "?"), partition=part.partition)
            await part.nap(1.0)

    async def _next(self, part: Part[T], size: int, within: float) -> Batch[T] | None:
        consumer = self._owner()
        consumer.progressed(part)
        while True:
            if part.alone:
                await consumer.outcomes.flushed(part)
                await consumer.caution.end(part)
            careful = part.suspect_until is not None
            events = await part.take(min(part.trial_size, size) if careful else size, 0.0 if careful else within)
            if not events:
                return None
            if consumer.may_work(part) and (not careful or await self._alone(part, events)):
                break
            # Out of touch: the member will say that the partition is lost, or that all is well.
            part.give_back(events)
            await part.nap(0.1)
        for place, event in enumerate(events if consumer.suspects else ()):
            if isinstance(event.data, Undecodable):
                part.give_back(events[max(place, 1) :])
                events = events[: max(place, 1)]
                break
        batch = self._batch(part, events)
        if isinstance(events[0].data, Undecodable):
            part.in_hand = batch
            raise Fail(events[0].data.reason)
        return batch

    async def _alone(self, part: Part[T], events: list[Any]) -> bool:
        """See to it that events are handled while no other suspect is. Raises `Fail` when the first has ended its workers."""
        if events[0].offset == part.condemned:
            part.condemned = None
            part.in_hand = self._batch(part, events)
            raise Fail("it has ended its workers, twice while no other suspect was handled")
        try:
            return await self._owner().caution.begin(part, len(events))
        except PenstockError as error:
            log.warning("trial_not_begun", stream=self._owner().stream, partition=part.partition, error=error)
            return False

    def _batch(self, part: Part[T], events: list[Any]) -> Batch[T]:
        consumer = self._owner()
        fence = Fence(consumer.member.id, part.epoch, part.revision)
        return Batch(consumer.stream, consumer.group, part.partition, events, fence)

    def _done(self, part: Part[T]) -> None:
        batch = part.in_hand
        assert batch is not None  # noqa: S101
        part.in_hand = None
        part.attempts = 0
        part.finished(batch.next_offset)
        if batch.committed:
            part.was_committed(batch.next_offset)
        self._owner().progressed(part)

    async def _one(self, batch: Batch[Any]) -> None:
        await self._invoke(batch[0])

    async def _whole(self, batch: Batch[Any]) -> None:
        await self._invoke(batch)

    async def _invoke(self, argument: Any) -> None:
        if self._async:
            await self._handler(argument)
        else:
            await self._owner().in_thread(self._handler, argument)

    async def _failed(self, part: Part[T], error: Exception) -> None:
        consumer = self._owner()
        policy = consumer.options.on_failure
        batch, part.in_hand = part.in_hand, None
        part.attempts += 1
        if part.alone:
            with suppress(PenstockError):
                await consumer.caution.end(part, failed=True)
        context = {"stream": consumer.stream, "group": consumer.group, "partition": part.partition, "attempt": part.attempts}
        if batch is None:
            log.error("handler_failed", **context, exc_info=error)
            await consumer.outcomes.note(part, part.done, f"{type(error).__name__}: {message_of(error)}"[:1_000])
            await part.nap(delay(policy.backoff, part.attempts))
            return
        reason = f"{type(error).__name__}: {message_of(error)}"
        if batch.tried and await consumer.outcomes.has_committed(part, batch.next_offset):
            # The error came after the commit, or instead of its answer: what these events do is done, exactly once.
            log.warning("handler_failed_after_commit", **context, offset=batch.first_offset, error=error)
            part.in_hand, batch.committed = batch, True
            self._done(part)
            return
        retried = not isinstance(error, Fail) and (policy.attempts is None or part.attempts < policy.attempts)
        log.error("event_failed", **context, offset=batch.first_offset, events=len(batch), error=error, retried=retried)
        if retried:
            after = error.after if isinstance(error, Retry) else None
            part.give_back(batch.events)
            await consumer.outcomes.note(part, batch.first_offset, reason)
            await part.nap(after.total_seconds() if after is not None else delay(policy.backoff, part.attempts))
            return
        try:
            await self._give_up(part, batch, policy, reason)
        except Conflict:
            # Not this process's any more, or moved to another offset: then this task is cancelled soon.
            await part.nap(3600.0)

    async def _give_up(self, part: Part[T], batch: Batch[T], policy: OnFailure, reason: str) -> None:
        consumer = self._owner()
        if policy.then == "skip":
            part.in_hand = batch
            self._done(part)
        elif policy.then == "dead-letter":
            try:
                await consumer.outcomes.dead_letter(part, batch.first_offset, batch.next_offset, reason)
            except Conflict:
                raise
            except PenstockError as refused:
                # Too large for the dead letters, or gone from the stream: somebody has to look.
                part.give_back(batch.events)
                await consumer.outcomes.quarantine(
                    part, f"offset {batch.first_offset} cannot be put aside: {refused.message} ({reason})"
                )
            part.attempts = 0
        else:
            part.give_back(batch.events)
            part.attempts = 0
            if policy.then == "quarantine":
                await consumer.outcomes.quarantine(part, f"offset {batch.first_offset}: {reason}")
            else:
                await consumer.halt(part, batch.first_offset, reason)
                await part.nap(3600.0)

    def _owner(self) -> Consumer[T]:
        assert self._consumer is not None  # noqa: S101
        return self._consumer


def delay(backoff: Backoff, attempt: int) -> float:
    """Seconds before the next attempt."""
    seconds = min(backoff.base.total_seconds() * backoff.factor ** min(attempt - 1, 60), backoff.cap.total_seconds())
    return seconds * random.uniform(1 - backoff.jitter, 1 + backoff.jitter)


def _around(outer: Middleware, inner: Next) -> Next:
    async def call(batch: Batch[Any]) -> None:
        await outer(batch, inner)

    return call
