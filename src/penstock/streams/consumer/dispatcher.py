"""The dispatcher passes the events of each partition to the handler, and decides what happens to events whose handler fails.

It takes events from the partition's state and reports results to the committer. It does not know the consumer that started it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, nullcontext, suppress
from functools import partial
from typing import Any, Generic, TypeVar

from penstock.core.lending import borrowing
from penstock.core.logs import get_logger
from penstock.core.tracing import valid_traceparent
from penstock.core.user_code import check_ran, contained, in_thread, verdict_of
from penstock.errors import Conflict, Fail, PenstockError, Retry
from penstock.jobs.options import Backoff
from penstock.streams.codec import Encoding, Undecodable
from penstock.streams.consumer.batch import Batch, Events, Fence
from penstock.streams.consumer.committer import Committer
from penstock.streams.consumer.handling import Handling, Withdrawn
from penstock.streams.consumer.on_failure import OnFailure
from penstock.streams.consumer.options import ConsumerOptions
from penstock.streams.consumer.partition_state import PartitionState
from penstock.streams.consumer.suspects import Suspects

log = get_logger("penstock.consumer")
T = TypeVar("T")
_MOST_THREADS = 256
_DRAINS_WITHIN_S = 1.0
_LOOK_FOR_KEY_S = 5.0
_AFTER_HALT = "Correct the handler, or move the group past the event with seek, and start the consumer again."


class Halted(PenstockError):
    """A handler failed, and the policy of its consumer is to halt; no offset at or behind the event is committed."""

    foreign = True


class Dispatcher(Generic[T]):
    """Runs the handler of a consumer for its partitions.

    Args:
        handling: Handler with its form and middleware.
        stream: Name of the stream.
        group: Name of the group.
        member: Id of the member of the group.
        options: Options of the consumer.
        committer: Writes results to the database.
        suspects: Trials of suspect partitions.
        may_work: Whether this process may begin work on a partition at this moment.
        halt: Stops the consumer with an error.
        encoding: Encrypts why a handler failed, in an encrypted stream.
        lacks: Is told of a partition that waits for a key of encryption, and of the id of the key.

    Attributes:
        missing_keys: Ids of the keys that events at the head of partitions need and this application lacks, by partition.
    """

    def __init__(
        self,
        handling: Handling,
        stream: str,
        group: str,
        member: str,
        options: ConsumerOptions,
        committer: Committer[T],
        suspects: Suspects,
        may_work: Callable[[PartitionState[T]], bool],
        halt: Callable[[Halted], None],
        encoding: Encoding[T],
        lacks: Callable[[int, str], None],
    ) -> None:
        self._handling = handling
        self._stream = stream
        self._group = group
        self._member = member
        self._options = options
        self._committer = committer
        self._suspects = suspects
        self._may_work = may_work
        self._halt = halt
        self._encoding = encoding
        self._lacks = lacks
        self.missing_keys: dict[int, str] = {}
        self._places = None if options.concurrency is None else asyncio.Semaphore(options.concurrency)
        # Threads of its own: other consumers, and look-ups of host names, have theirs.
        self._threads = ThreadPoolExecutor(options.concurrency or _MOST_THREADS, thread_name_prefix=f"penstock-{stream}/{group}")

    async def run(self, state: PartitionState[T]) -> None:
        """Dispatch a partition's events until the partition is draining."""
        try:
            while not state.draining:
                try:
                    with contained():
                        if self._handling.form == "events":
                            await self._iterate(state)
                        else:
                            await self._dispatch(state)
                except Withdrawn:
                    await self._withdrawn(state)
                except Exception as error:
                    await self._failed(state, error)
        finally:
            self.missing_keys.pop(state.partition, None)
            if state.on_trial:
                self._suspects.release(state)

    def revoked(self, partition: int) -> None:
        """Tell the application that this process has to release a partition."""
        self._handling.revoked(partition)

    def close(self) -> None:
        """End the threads when their handlers return."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- events to the handler

    async def _dispatch(self, state: PartitionState[T]) -> None:
        linger_s = self._options.linger.total_seconds()
        while batch := await self._next(state, self._options.max_batch_size, linger_s):
            if self._handling.form == "batch":
                await self._handle(state, batch)
                continue
            events = batch.events
            for index, event in enumerate(events):
                if state.draining or state.paused:
                    state.put_back(events[index:])
                    break
                try:
                    await self._handle(state, self._batch(state, [event]))
                except BaseException:
                    state.put_back(events[index + 1 :])
                    raise

    async def _handle(self, state: PartitionState[T], batch: Batch[T]) -> None:
        state.delivered = batch
        batch.attempt = state.attempts + 1
        argument = batch[0] if self._handling.form == "event" else batch
        if self._places is None:
            await self._call(batch, argument)
        else:
            async with self._places:
                await self._call(batch, argument)
        self._done(state)

    async def _iterate(self, state: PartitionState[T]) -> None:
        tracing = self._handling.tracing
        span: Any = None

        def end_span(error: BaseException | None = None) -> None:
            nonlocal span
            if tracing is not None and span is not None:
                tracing.end(span, None if error is None else type(error).__qualname__)
                tracing.leave()
                span = None

        async def next_batch(max_batch_size: int, linger: float) -> Batch[T]:
            nonlocal span
            if state.delivered is not None:
                self._done(state)
            end_span()
            # The handler occupies a place while it works, not while it waits.
            await place.aclose()
            batch = await self._next(state, max_batch_size, linger)
            if batch is None:
                raise StopAsyncIteration
            if self._places is not None:
                try:
                    await place.enter_async_context(self._places)
                except asyncio.CancelledError:
                    # The next request gets them.
                    state.put_back(batch.events)
                    raise
            state.delivered = batch
            batch.attempt = state.attempts + 1
            if tracing is not None:
                # The handler asks in this task, which has the context of the span until it asks again.
                span = tracing.start_processing(*self._span_of(batch))
                tracing.enter(span)
            return batch

        async with AsyncExitStack() as place:
            events = Events(state.partition, next_batch)
            around = self._handling.around
            try:
                await (self._invoke(events, {}) if around is None else around(events, partial(self._invoke, events)))
            except BaseException as error:
                end_span(error)
                raise
            end_span()
        if state.delivered is not None:
            self._done(state)
        if not state.draining:
            name = getattr(self._handling.handler, "__qualname__", "?")
            log.warning("handler_returned", handler=name, partition=state.partition)
            await state.sleep(1.0)

    async def _next(self, state: PartitionState[T], max_batch_size: int, linger: float) -> Batch[T] | None:
        state.progressed()
        while True:
            if state.on_trial:
                await self._committer.flush(state)
                await self._suspects.end(state)
            suspect = state.suspect_until is not None
            events = await state.take(
                min(state.trial_size, max_batch_size) if suspect else max_batch_size, 0.0 if suspect else linger
            )
            if not events:
                return None
            if state.has_undecodable and isinstance(events[0].data, Undecodable) and events[0].data.key_id is not None:
                await self._wait_for_key(state, events)
                continue
            try:
                if self._may_work(state) and (not suspect or await self._begin_trial(state, events)):
                    break
            except asyncio.CancelledError:
                state.put_back(events)
                raise
            # The member has no contact with the database; its next heartbeat shows whether the partition is lost.
            state.put_back(events)
            await state.sleep(0.1)
        for index, event in enumerate(events if state.has_undecodable else ()):
            if isinstance(event.data, Undecodable):
                state.put_back(events[max(index, 1) :])
                events = events[: max(index, 1)]
                break
        batch = self._batch(state, events)
        if isinstance(events[0].data, Undecodable):
            state.delivered = batch
            raise Fail(events[0].data.reason)
        return batch

    async def _wait_for_key(self, state: PartitionState[T], events: list[Any]) -> None:
        """Leave an event alone that is encrypted with a key which this application lacks: no attempt is used up."""
        key = events[0].data.key_id
        if self.missing_keys.get(state.partition) != key:
            self.missing_keys[state.partition] = key
            log.warning(
                "no_key", stream=self._stream, group=self._group, partition=state.partition, offset=events[0].offset, key=key,
                hint="Give the worker the keys that the producers have: Penstock(keys=[...]), or PENSTOCK_KEYS.",
            )  # fmt: skip
        self._lacks(state.partition, key)
        state.put_back(events)
        await self._committer.record_failure(state, events[0].offset, f"KeyMissing: {events[0].data.reason}")
        await state.sleep(_LOOK_FOR_KEY_S)

    async def _begin_trial(self, state: PartitionState[T], events: list[Any]) -> bool:
        """Begin a trial of events while no other suspect runs. Raises `Fail` when the first event has crashed its workers."""
        if events[0].offset == state.crashing_offset:
            state.crashing_offset = None
            state.delivered = self._batch(state, events)
            raise Fail("it has crashed its workers, three times while no other suspect was handled")
        try:
            return await self._suspects.begin(state, len(events))
        except PenstockError as error:
            log.warning("trial_not_begun", stream=self._stream, partition=state.partition, error=error)
            return False

    def _batch(self, state: PartitionState[T], events: list[Any]) -> Batch[T]:
        fence = Fence(self._member, state.epoch, state.revision)
        return Batch(self._stream, self._group, state.partition, events, fence)

    async def _call(self, batch: Batch[Any], argument: Any) -> None:
        tracing, around = self._handling.tracing, self._handling.around
        with nullcontext() if tracing is None else tracing.processing(*self._span_of(batch)):
            if around is None:
                await self._invoke(argument, {})
            else:
                await around(batch, partial(self._invoke, argument))

    def _span_of(self, batch: Batch[Any]) -> tuple[str, list[str | None], int, dict[str, Any]]:
        """What `Tracing` needs to know of a call of the handler."""
        attributes = {
            "messaging.consumer.group.name": self._group,
            "messaging.destination.partition.id": str(batch.partition),
            "penstock.offset": batch.first_offset,
            "penstock.attempt": batch.attempt,
        }
        traceparents = [valid_traceparent(event.headers.get("traceparent")) for event in batch]
        return self._stream, traceparents, batch.attempt, attributes

    async def _invoke(self, argument: Any, dependencies: Mapping[str, Any]) -> None:
        handling = self._handling
        with borrowing(f"{self._stream}/{self._group}"):
            if handling.is_async:
                answer = await handling.handler(argument, **dependencies)
            else:
                answer = await in_thread(self._threads, partial(handling.handler, **dependencies), argument)
        check_ran(answer, f"{self._group} of {self._stream}")

    # -- results to the committer

    def _done(self, state: PartitionState[T]) -> None:
        batch = state.delivered
        assert batch is not None  # noqa: S101
        state.delivered = None
        state.attempts = 0
        state.finished(batch.next_offset)
        if batch.committed:
            state.was_committed(batch.next_offset)
        state.progressed()

    async def _withdrawn(self, state: PartitionState[T]) -> None:
        """Deliver a batch again, without a failure. The partition is about to drain: nothing is delivered before that."""
        batch, state.delivered = state.delivered, None
        if batch is not None:
            state.put_back(batch.events)
        if state.on_trial:
            with suppress(PenstockError):
                await self._suspects.end(state, failed=True)
        await state.sleep(_DRAINS_WITHIN_S)

    async def _failed(self, state: PartitionState[T], error: Exception) -> None:
        policy = self._options.on_failure
        batch, state.delivered = state.delivered, None
        state.attempts += 1
        if state.on_trial:
            with suppress(PenstockError):
                await self._suspects.end(state, failed=True)
        context = {"stream": self._stream, "group": self._group, "partition": state.partition, "attempt": state.attempts}
        reason = self._encoding.reason_of(error)
        # What a log says of an encrypted stream is the class of the error.
        shown = type(error).__name__ if self._encoding.encrypted else error
        if batch is None:
            trace = {"error": shown} if self._encoding.encrypted else {"exc_info": error}
            log.error("handler_failed", **context, **trace)
            await self._committer.record_failure(state, state.done, reason[:1_000])
            await state.sleep(delay(policy.backoff, state.attempts))
            return
        if batch.tried and await self._committer.has_committed(state, batch.next_offset):
            # The error came after the commit, or instead of its answer: the effect of these events exists, exactly once.
            log.warning("handler_failed_after_commit", **context, offset=batch.first_offset, error=shown)
            state.delivered, batch.committed = batch, True
            self._done(state)
            return
        verdict = verdict_of(error)
        retried = not isinstance(verdict, Fail) and (policy.max_attempts is None or state.attempts < policy.max_attempts)
        log.error("event_failed", **context, offset=batch.first_offset, events=len(batch), error=shown, retried=retried)
        if retried:
            after = verdict.after if isinstance(verdict, Retry) else None
            state.put_back(batch.events)
            await self._committer.record_failure(state, batch.first_offset, reason)
            await state.sleep(after.total_seconds() if after is not None else delay(policy.backoff, state.attempts))
            return
        try:
            await self._give_up(state, batch, policy, reason)
        except Conflict:
            # The partition has another owner or was moved to another offset: this task will be cancelled soon.
            await state.sleep(3600.0)

    async def _give_up(self, state: PartitionState[T], batch: Batch[T], policy: OnFailure, reason: str) -> None:
        failure = f"offset {batch.first_offset}: {reason}"
        if policy.then == "skip":
            state.delivered = batch
            self._done(state)
        elif policy.then == "dead-letter":
            try:
                await self._committer.dead_letter(state, batch.first_offset, batch.next_offset, reason)
            except Conflict:
                raise
            except PenstockError as refused:
                # The event is too large for the dead letters, or no longer in the stream: an operator has to decide.
                state.put_back(batch.events)
                await self._committer.quarantine(
                    state, f"offset {batch.first_offset} cannot be moved to the dead letters: {refused.message} ({reason})"
                )
            state.attempts = 0
        else:
            state.put_back(batch.events)
            state.attempts = 0
            if policy.then == "quarantine":
                await self._committer.quarantine(state, failure)
            else:
                self._halt(Halted(f"{self._stream}/{self._group}, partition {state.partition}, {failure}", hint=_AFTER_HALT))
                await self._committer.halt(state, failure)
                await state.sleep(3600.0)


def delay(backoff: Backoff, attempt: int) -> float:
    """Seconds before the next attempt."""
    seconds = min(backoff.base.total_seconds() * backoff.factor ** min(attempt - 1, 60), backoff.cap.total_seconds())
    return seconds * random.uniform(1 - backoff.jitter, 1 + backoff.jitter)
