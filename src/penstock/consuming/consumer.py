"""One consumer group in one process: takes part in the group, fetches, lets handlers run, commits.

Three loops serve all partitions that this process owns: one fetches what has room, one commits what is done (see `outcomes`), and
the member keeps the ownership (see `penstock.ownership.member`). Each partition has a task in which its handler runs, so a slow
event holds up its own partition and no other.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, Generic, TypeVar

from penstock.consuming.caution import Caution
from penstock.consuming.delivery import Deliver, Halted
from penstock.consuming.options import ConsumerOptions
from penstock.consuming.outcomes import Outcomes
from penstock.consuming.part import Part
from penstock.contained import in_thread, message_of
from penstock.encoding import Encoding
from penstock.errors import Conflict, DatabaseUnavailable, NotFound, OffsetGone, PenstockError
from penstock.event import Gone, gone_at, held_back
from penstock.logs import get_logger
from penstock.ownership.ending import Ending
from penstock.ownership.member import Member
from penstock.postgres import streams
from penstock.postgres.database import Database
from penstock.postgres.streams import Begun
from penstock.settings import Settings
from penstock.waiting import happens

log = get_logger("penstock.consumer")
T = TypeVar("T")
_MOST_THREADS = 256
_LOOK_AGAIN_S = 0.2
_MOST_BYTES = 1_048_576
_READY_BYTES = 32 * 1_048_576
_LEAST_BYTES = 65_536
_EXPLAIN_EVERY_S, _LOOK_FOR_REASONS_EVERY_S = 60.0, 5.0
_AFTER_HALT = "Mend the handler, or move the group past the event with seek, and start the consumer again."


class Consumer(Generic[T]):
    """A member of a consumer group. A `SlotUser`: its slots are the partitions.

    Args:
        database: Where.
        stream: Name of the stream, which exists.
        encoding: Decodes its events.
        group: Name of the group.
        options: How to consume.
        settings: Intervals and grace periods.
        deliver: Runs the handlers.
        id: Its id in the group; None: a new one.
    """

    def __init__(
        self,
        database: Database,
        stream: str,
        encoding: Encoding[T],
        group: str,
        options: ConsumerOptions,
        settings: Settings,
        deliver: Deliver[T],
        id: str | None = None,
    ) -> None:
        self.stream = stream
        self.group = group
        self.options = options
        self.settings = settings
        self.name = f"{stream}/{group}"
        self.database = database
        self.member = Member(database, self.name, id or f"consumer.{secrets.token_hex(8)}", self, settings)
        self.parts: dict[int, Part[T]] = {}
        self._ending = Ending()
        self._encoding = encoding
        self._deliver = deliver
        self.outcomes = Outcomes(database, stream, group, self.member, self.parts, self._look_again)
        self.caution = Caution(database, stream, group)
        self._came = asyncio.Event()
        self._look = False
        self._explain_at = 0.0
        self.raises_gone = False  # instead of quarantining a partition of which retention dropped what comes next
        self._halted: PenstockError | None = None
        self._places = None if options.concurrency is None else asyncio.Semaphore(options.concurrency)
        self._threads = ThreadPoolExecutor(options.concurrency or _MOST_THREADS, thread_name_prefix=f"penstock-{self.name}")
        self._stops_at: float | None = None
        deliver.belongs_to(self)

    async def declare(self) -> None:
        """Declare the group; waits while the database is away."""
        await streams.declare_group(self.database, self.stream, self.group, self.options.start, retry=True)

    async def run(self) -> None:
        """Take part until `stop`.

        Raises:
            Conflict: A live member has this id.
            Halted: A handler failed, and the policy is to halt. What others had in hand was finished, the member left.
            OffsetGone: Retention dropped what comes next, when `raises_gone`.
            NotFound: Somebody dropped the stream, or the group.
        """
        loops = [
            asyncio.create_task(self._fetch(), name="penstock-fetcher"),
            asyncio.create_task(self.outcomes.run(), name="penstock-committer"),
        ]
        taking_part = asyncio.create_task(self.member.run(), name="penstock-member")
        try:
            done, _ = await asyncio.wait([taking_part, *loops], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # the loops never end by themselves but with an error
            if self._halted is not None:
                raise self._halted
        except NotFound as error:
            raise NotFound(
                f"{self.name} cannot be consumed any more: {error.message}",
                hint="The stream or the group was dropped meanwhile; start its consumers anew when it is there again.",
            ) from error
        finally:
            for part in list(self.parts.values()):
                self._cancel(part)
            for task in [taking_part, *loops]:
                task.cancel()
            await asyncio.gather(taking_part, *loops, return_exceptions=True)
            self._threads.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Finish what handlers have in hand, hand the partitions over and leave; `run` ends then."""
        if self._stops_at is None:
            self._stops_at = time.monotonic() + self.settings.shutdown_grace.total_seconds()
        self.member.stop()

    def heard(self, word: str) -> None:
        """Something was said on the member's channel about this group, or listening began (anew)."""
        if word in ("slots", "connected"):
            self.member.wake()
        if word in ("moved", "connected"):
            self._look = True
        self._came.set()

    def _look_again(self) -> None:
        """The database has another view of the partitions: ask it."""
        self._look = True
        self._came.set()

    # -- ownership

    def gained(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        self.parts[slot] = Part(slot, epoch, self._encoding, self.options.ready, self.group, self.progressed)
        self._look_again()

    async def revoke(self, slot: int, epoch: int) -> bool:
        """See `SlotUser`: let the handler finish what it has in hand.

        While this member lives nobody needs the partition so much that a handler had to be cut off: it is waited for, as long as
        a process may keep its partitions without making progress, unless the consumer was declared with a `grace`. A member that
        stops cancels it at the end of its own grace period.
        """
        part = self.parts.get(slot)
        if part is None or part.epoch != epoch:
            return True
        part.draining = True
        part.changed()
        self._deliver.revoked(slot)
        if part.task is not None:
            longest = self.settings.wedged_after if self.options.grace is None else self.options.grace
            ends_at = time.monotonic() + longest.total_seconds()
            while not part.task.done():
                left = (ends_at if self._stops_at is None else self._stops_at) - time.monotonic()
                if left <= 0:
                    break
                # It may be told to stop meanwhile.
                await asyncio.wait([part.task], timeout=min(left, _LOOK_AGAIN_S))
            if not part.task.done():
                log.warning("handler_did_not_finish", stream=self.stream, group=self.group, partition=slot)
                part.task.cancel()
                await asyncio.wait([part.task], timeout=1.0)
        await self.outcomes.flushed(part)
        if self.parts.get(slot) is part:
            del self.parts[slot]
        return True

    def lost(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        part = self.parts.get(slot)
        if part is not None and part.epoch == epoch:
            del self.parts[slot]
            self._cancel(part)
            if part.task is not None and not part.task.done():
                self._ending.add(part.task, slot, (self.options.grace or self.settings.handover_grace).total_seconds())

    def ending(self, slot: int) -> bool:
        """See `SlotUser`."""
        return self._ending.holds(slot)

    def _cancel(self, part: Part[T]) -> None:
        part.begun = False
        part.draining = True
        part.changed()
        if part.task is not None:
            part.task.cancel()

    # -- fetching

    async def _fetch(self) -> None:
        channel = f"penstock_{self.member.id}"
        loop = asyncio.get_running_loop()
        idle, look_at = 0, 0.0
        while True:
            self._came.clear()
            try:
                if self._look or loop.time() >= look_at or any(not part.begun for part in self.parts.values()):
                    self._look = False
                    waiting = await self._begin()
                    look_at = loop.time() + (_LOOK_AGAIN_S if waiting else self.settings.heartbeat_interval.total_seconds())
                share = min(max(_READY_BYTES // max(len(self.parts), 1), _LEAST_BYTES), _MOST_BYTES)
                wanted = {part.partition: part for part in self.parts.values() if part.room > 0 and part.bytes < share}
                if not wanted:
                    await happens(self._came, min(look_at - loop.time(), 1.0))
                    continue
                chunks = await self._read(wanted, share)
                for chunk in chunks:
                    if self.parts.get(chunk.partition) is wanted[chunk.partition]:
                        wanted[chunk.partition].feed(chunk)
                if chunks:
                    idle = 0
                    # Let handlers begin before looking for more.
                    await asyncio.sleep(0)
                    continue
                # Looks again at once after it said that it waits, and soon after: what is committed just now notified nobody.
                if idle == 0:
                    await streams.wait_for_events(self.database, self.stream, channel)
                    idle = 1
                    continue
                pause = (
                    (0.005, 0.05)[idle - 1]
                    if idle < 3
                    else self.settings.poll_interval.total_seconds() * random.uniform(0.7, 1.0)
                )
                heard = await happens(self._came, min(pause, max(look_at - loop.time(), 0.001)))
                # Says so again now and then, since the word is only good for a while.
                idle = 0 if heard or idle > 15 else idle + 1
            except DatabaseUnavailable as error:
                idle = 0
                log.warning("fetch_failed", stream=self.stream, group=self.group, error=error)
                await asyncio.sleep(random.uniform(0.2, 0.6))

    async def _begin(self) -> bool:
        """Begin the partitions that are new, and learn which were paused, resumed or moved. Returns whether some have to wait."""
        asked = dict(self.parts)
        if not asked:
            return False
        begun = await streams.begin_partitions(
            self.database, self.stream, self.group, self.member.id, {part.partition: part.epoch for part in asked.values()}
        )
        waiting = False
        for partition, part in asked.items():
            found = begun.get(partition)
            if found is None or self.parts.get(partition) is not part or part.draining:
                # Not this member's any more: the member hears of it.
                continue
            if part.begun and part.revision == found.revision:
                if part.paused != found.paused:
                    part.paused = found.paused
                    part.changed()
                continue
            if part.task is not None:
                # Somebody moved the group: what is in hand is not done.
                part.begun = False
                part.task.cancel()
                await asyncio.wait([part.task])
                part.task = None
            waiting = waiting or found.waits
            if not found.waits and self.parts.get(partition) is part and not part.draining:
                self._start(part, found)
        if waiting:
            await self._explain_waiting()
        return waiting

    async def _explain_waiting(self) -> None:
        """Say, now and then, when what partitions wait for will not come by itself."""
        now = asyncio.get_running_loop().time()
        if now < self._explain_at:
            return
        found = held_back(await streams.lag(self.database, self.stream, self.group))
        self._explain_at = now + (_EXPLAIN_EVERY_S if found else _LOOK_FOR_REASONS_EVERY_S)
        for held in found:
            log.warning(
                "growth_held_back", stream=self.stream, group=self.group, partition=held.partition, holds=held.holds,
                quarantined=held.quarantined, because=held.paused_because,
                hint="The new partitions wait for this paused one: resume it, or move the group past what is there (seek).",
            )  # fmt: skip

    def _start(self, part: Part[T], begun: Begun) -> None:
        part.begin(begun)
        part.task = asyncio.create_task(self._deliver.run(part), name=f"penstock-{self.name}-{part.partition}")
        part.task.add_done_callback(self._ended)

    async def _read(self, wanted: dict[int, Part[T]], most_bytes: int) -> list[Any]:
        room = max(part.room for part in wanted.values())
        try:
            return await streams.read_chunks(
                self.database, self.stream, {at: part.fetched for at, part in wanted.items()}, max(room, 1), most_bytes
            )
        except OffsetGone:
            bounds = await streams.bounds(self.database, self.stream)
            for partition, part in wanted.items():
                if part.fetched >= bounds[partition].first:
                    continue
                if self.options.gone is Gone.ERROR:
                    reason = gone_at(self.stream, partition, part.fetched, bounds[partition])
                    if self.raises_gone:
                        self._halt(
                            OffsetGone(reason, hint='Move the group with seek, or consume with gone="earliest" or "latest".')
                        )
                        continue
                    with suppress(Conflict):
                        await self.outcomes.quarantine(part, reason)
                else:
                    first = bounds[partition].first if self.options.gone is Gone.EARLIEST else bounds[partition].next
                    log.warning("events_skipped", stream=self.stream, group=self.group, partition=partition, at=first)
                    part.skip(first)
                    self.progressed(part)
            return []

    # -- what deliveries say

    @property
    def suspects(self) -> bool:
        """Whether some payload did not fit its type, so that it has to be looked for."""
        return self._encoding.suspect

    def may_work(self, part: Part[T]) -> bool:
        """Whether a partition is this process's to begin work on at this moment."""
        return self.parts.get(part.partition) is part and self.member.may_work(part.partition)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place for a handler to run; waits until there is one."""
        async with self._places or nullcontext():
            yield

    async def in_thread(self, call: Callable[[Any], Any], argument: Any) -> None:
        """Call a plain handler in a thread of this consumer: those of others, and look-ups of names, have their own."""
        await in_thread(self._threads, call, argument)

    def progressed(self, part: Part[T]) -> None:
        """Something of a partition was taken or is done."""
        if part.done > part.committed:
            self.outcomes.done()
        if part.room > 0:
            self._came.set()

    async def halt(self, part: Part[T], offset: int, reason: str) -> None:
        """A handler failed, and the policy is to halt: stop, and note in the database why."""
        self._halt(Halted(f"{self.name}, partition {part.partition}, offset {offset}: {reason}", hint=_AFTER_HALT))
        await self.outcomes.halt(part, f"offset {offset}: {reason}")

    def _halt(self, error: PenstockError) -> None:
        if self._halted is None:
            self._halted = error
            log.error("consumer_halted", stream=self.stream, group=self.group, error=error)
            self.stop()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, NotFound):
                # Dropped meanwhile: the next look ends the consumer.
                self._look_again()
                return
            log.error("delivery_failed", stream=self.stream, group=self.group, exc_info=error)
            self._halt(Halted(f"consuming {self.name} failed: {type(error).__name__}: {message_of(error)}"))
