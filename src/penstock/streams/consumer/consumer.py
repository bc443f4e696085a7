"""A consumer: one member of a consumer group in one process, which takes part in the group and fetches events.

Three loops serve all partitions that this process owns: one fetches events for partitions whose buffer has room, one commits what
is done (see `committer`), and the membership keeps the ownership (see `penstock.groups.membership`). Each partition has a task in
which the dispatcher runs its handler, so a slow event delays its own partition and no other. The walk of an event is one way:
consumer, partition state, dispatcher, committer. What the later ones report back goes through callbacks given at construction.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from penstock.core.logs import get_logger
from penstock.core.polling import IdleLimit
from penstock.core.user_code import message_of
from penstock.errors import Conflict, DatabaseUnavailable, NotFound, OffsetGone, PenstockError
from penstock.groups.draining import DrainingTasks
from penstock.groups.membership import Membership
from penstock.postgres.database import Database
from penstock.postgres.notifications import Kind, Notifications
from penstock.settings import Settings
from penstock.streams import group_queries
from penstock.streams import queries as streams
from penstock.streams.codec import Encoding
from penstock.streams.consumer.committer import Committer
from penstock.streams.consumer.dispatcher import Dispatcher, Halted
from penstock.streams.consumer.handling import Handling
from penstock.streams.consumer.options import ConsumerOptions
from penstock.streams.consumer.partition_state import PartitionState
from penstock.streams.consumer.suspects import Suspects
from penstock.streams.group_models import held_back
from penstock.streams.group_queries import Begun
from penstock.streams.models import OffsetReset, gone_at
from penstock.streams.waiting import polling_for_events

log = get_logger("penstock.consumer")
T = TypeVar("T")

_LOOK_AGAIN_S = 0.2
_MOST_BYTES = 1_048_576
_READY_BYTES = 32 * 1_048_576
_LEAST_BYTES = 65_536
_EXPLAIN_EVERY_S, _LOOK_FOR_REASONS_EVERY_S = 60.0, 5.0


class Consumer(Generic[T]):
    """A member of a consumer group. A `SlotUser`: its slots are the partitions.

    Args:
        database: Database of the stream.
        stream: Name of an existing stream.
        encoding: Decodes its events.
        group: Name of the group.
        options: Options of the consumer.
        settings: Intervals and grace periods.
        handling: Handler with its form and middleware.
        id: Id of the member in the group; None: a new one.
        idle: Limit of the iteration, which is told when a look at all partitions that the member is to have has found no events.
    """

    def __init__(
        self,
        database: Database,
        stream: str,
        encoding: Encoding[T],
        group: str,
        options: ConsumerOptions,
        settings: Settings,
        handling: Handling,
        id: str | None = None,
        idle: IdleLimit | None = None,
    ) -> None:
        self.stream = stream
        self.group = group
        self.options = options
        self.settings = settings
        self.name = f"{stream}/{group}"
        self.database = database
        self.member = Membership(
            database, self.name, id or f"consumer.{secrets.token_hex(8)}", self, settings, key_ids=encoding.key_ids
        )
        self.partitions: dict[int, PartitionState[T]] = {}
        self._draining = DrainingTasks()
        self._encoding = encoding
        self._polling = polling_for_events(settings.poll_interval.total_seconds())
        self._idle = idle
        self._look = False
        self._explain_at = 0.0
        self.raises_gone = False  # whether dropped events end the consumer, instead of quarantining their partition
        self._halted: PenstockError | None = None
        self._stops_at: float | None = None
        self._stopping = asyncio.Event()
        self.committer = Committer(
            database, stream, group, self.member.id, self.partitions, outdated=self._look_again, stale=self._check_ownership
        )
        self._dispatcher: Dispatcher[T] = Dispatcher(
            handling,
            stream,
            group,
            self.member.id,
            options,
            self.committer,
            Suspects(database, stream, group),
            may_work=self._may_work,
            halt=self._halt,
            encoding=encoding,
            lacks=lambda partition, key_id: self.member.lacks([(partition, key_id)]),
        )

    @property
    def missing(self) -> dict[str, str | None]:
        """What it cannot work on for want of a key, by its name: the id of the key, or None when it has no key at all."""
        if self._encoding.locked:
            return {self.name: None}
        keys = set(self._dispatcher.missing_keys.values())
        return {self.name: min(keys)} if keys else {}

    async def declare(self) -> None:
        """Declare the group; waits while the database is unreachable."""
        await group_queries.declare_group(self.database, self.stream, self.group, self.options.start, retry=True)

    async def run(self) -> None:
        """Take part in the group until `stop`. Without a key of an encrypted stream the member does not join.

        Raises:
            Conflict: A live member has this id.
            Halted: A handler failed, and the policy is to halt. The other handlers have finished, and the member has left.
            OffsetGone: Retention dropped the next events, when `raises_gone`.
            NotFound: The stream or the group was dropped.
        """
        if self._encoding.locked:
            # The partitions go to members that have one.
            await self._stopping.wait()
            return
        loops = [
            asyncio.create_task(self._fetch(), name="penstock-fetcher"),
            asyncio.create_task(self.committer.run(), name="penstock-committer"),
        ]
        taking_part = asyncio.create_task(self.member.run(), name="penstock-member")
        try:
            done, _ = await asyncio.wait([taking_part, *loops], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # the loops end by themselves only with an error
            if self._halted is not None:
                raise self._halted
        except NotFound as error:
            raise NotFound(
                f"{self.name} can no longer be consumed: {error.message}",
                hint="The stream or the group was dropped; start its consumers again when it exists again.",
            ) from error
        finally:
            for state in list(self.partitions.values()):
                self._cancel(state)
            for task in [taking_part, *loops]:
                task.cancel()
            await asyncio.gather(taking_part, *loops, return_exceptions=True)
            self._dispatcher.close()

    def stop(self) -> None:
        """Let the handlers finish, release the partitions and leave the group; `run` ends then."""
        if self._stops_at is None:
            self._stops_at = time.monotonic() + self.settings.shutdown_grace.total_seconds()
        self._stopping.set()
        self.member.stop()

    def subscribe(self, notifications: Notifications) -> None:
        """Subscribe to the notifications of this group on the member's channel."""
        notifications.wake(self.member.wake, Kind.SLOTS, Kind.CONNECTED, subject=self.name)
        notifications.wake(self._look_again, Kind.MOVED, Kind.CONNECTED, subject=self.name)
        notifications.wake(self._polling.wake, Kind.EVENTS)

    def _look_again(self) -> None:
        """Read the state of the partitions from the database, because it has changed there."""
        self._look = True
        self._polling.wake()

    def _check_ownership(self) -> None:
        """Find out which partitions this member still owns, because the database has refused a commit."""
        self._look_again()
        self.member.wake()

    # -- ownership

    def gained(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        self.partitions[slot] = PartitionState(slot, epoch, self._encoding, self.options.ready, self.group, self._progressed)
        self._look_again()

    async def revoke(self, slot: int, epoch: int) -> bool:
        """See `SlotUser`: let the handler finish its batch.

        While this member is alive, no other member needs the partition urgently enough to cut off a handler. The consumer waits
        for it as long as a process may keep its partitions without making progress, unless it was declared with a `grace`. A
        member that stops cancels the handler at the end of its own grace period.
        """
        state = self.partitions.get(slot)
        if state is None or state.epoch != epoch:
            return True
        state.draining = True
        state.changed()
        self._dispatcher.revoked(slot)
        if state.task is not None:
            longest = self.settings.wedged_after if self.options.grace is None else self.options.grace
            ends_at = time.monotonic() + longest.total_seconds()
            while not state.task.done():
                left = (ends_at if self._stops_at is None else self._stops_at) - time.monotonic()
                if left <= 0:
                    break
                # `stop` may shorten the wait meanwhile.
                await asyncio.wait([state.task], timeout=min(left, _LOOK_AGAIN_S))
            if not state.task.done():
                log.warning("handler_did_not_finish", stream=self.stream, group=self.group, partition=slot)
                state.task.cancel()
                await asyncio.wait([state.task], timeout=1.0)
        await self.committer.flush(state)
        if self.partitions.get(slot) is state:
            del self.partitions[slot]
        return True

    def lost(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        state = self.partitions.get(slot)
        if state is not None and state.epoch == epoch:
            del self.partitions[slot]
            self._cancel(state)
            if state.task is not None and not state.task.done():
                self._draining.add(state.task, slot, (self.options.grace or self.settings.handover_grace).total_seconds())

    def draining(self, slot: int) -> bool:
        """See `SlotUser`."""
        return self._draining.holds(slot)

    def _cancel(self, state: PartitionState[T]) -> None:
        state.begun = False
        state.draining = True
        state.changed()
        if state.task is not None:
            state.task.cancel()

    # -- fetching

    async def _fetch(self) -> None:
        announce = partial(streams.wait_for_events, self.database, self.stream, f"penstock_{self.member.id}")
        loop = asyncio.get_running_loop()
        look_at = 0.0
        while True:
            self._polling.begin()
            try:
                if self._look or loop.time() >= look_at or any(not state.begun for state in self.partitions.values()):
                    self._look = False
                    waiting = await self._begin()
                    look_at = loop.time() + (_LOOK_AGAIN_S if waiting else self.settings.heartbeat_interval.total_seconds())
                share = min(max(_READY_BYTES // max(len(self.partitions), 1), _LEAST_BYTES), _MOST_BYTES)
                wanted = {state.partition: state for state in self.partitions.values() if state.room > 0 and state.bytes < share}
                if not wanted:
                    await self._looked()
                    await self._polling.wait(min(look_at - loop.time(), 1.0))
                    continue
                chunks = await self._read(wanted, share)
                for chunk in chunks:
                    if self.partitions.get(chunk.partition) is wanted[chunk.partition]:
                        wanted[chunk.partition].add(chunk)
                if chunks:
                    self._polling.found()
                    # Handlers begin before the next fetch.
                    await asyncio.sleep(0)
                else:
                    await self._looked()
                    await self._polling.rest(announce, at_most_s=max(look_at - loop.time(), 0.001))
            except DatabaseUnavailable as error:
                log.warning("fetch_failed", stream=self.stream, group=self.group, error=error)
                await self._polling.back_off()

    async def _looked(self) -> None:
        """A look found nothing; say so unless this member is to have further partitions, or to begin them."""
        if self._idle is None or not self._idle.asked or not self.member.settled or self._look:
            return
        if not await self.member.lacks_slots():
            self._idle.found_nothing()

    async def _begin(self) -> bool:
        """Begin new partitions, and apply pauses and moves of the others. Returns whether a partition has to wait."""
        asked = dict(self.partitions)
        if not asked:
            return False
        begun = await group_queries.begin_partitions(
            self.database, self.stream, self.group, self.member.id, {state.partition: state.epoch for state in asked.values()}
        )
        waiting = False
        for partition, state in asked.items():
            found = begun.get(partition)
            if found is None or self.partitions.get(partition) is not state or state.draining:
                # This member no longer owns it, which its next heartbeat shows.
                continue
            if state.begun and state.revision == found.revision:
                if state.paused != found.paused:
                    state.paused = found.paused
                    state.changed()
                continue
            if state.task is not None:
                # The group was moved to other offsets: the batch of the handler is not done.
                state.begun = False
                state.task.cancel()
                await asyncio.wait([state.task])
                state.task = None
            waiting = waiting or found.waits
            if not found.waits and self.partitions.get(partition) is state and not state.draining:
                self._start(state, found)
        if waiting:
            await self._explain_waiting()
        return waiting

    async def _explain_waiting(self) -> None:
        """Log, at intervals, which partitions wait for something that needs an operator."""
        now = asyncio.get_running_loop().time()
        if now < self._explain_at:
            return
        found = held_back(await group_queries.lag(self.database, self.stream, self.group))
        self._explain_at = now + (_EXPLAIN_EVERY_S if found else _LOOK_FOR_REASONS_EVERY_S)
        for held in found:
            log.warning(
                "growth_held_back", stream=self.stream, group=self.group, partition=held.partition, holds=held.holds,
                quarantined=held.quarantined, reason=held.pause_reason,
                hint="The new partitions wait for this paused one: resume it, or move the group past its events with seek.",
            )  # fmt: skip

    def _start(self, state: PartitionState[T], begun: Begun) -> None:
        state.begin(begun)
        state.task = asyncio.create_task(self._dispatcher.run(state), name=f"penstock-{self.name}-{state.partition}")
        state.task.add_done_callback(self._ended)

    async def _read(self, wanted: dict[int, PartitionState[T]], most_bytes: int) -> list[Any]:
        room = max(state.room for state in wanted.values())
        try:
            return await streams.read_chunks(
                self.database, self.stream, {at: state.fetched for at, state in wanted.items()}, max(room, 1), most_bytes
            )
        except OffsetGone:
            bounds = await streams.bounds(self.database, self.stream)
            for partition, state in wanted.items():
                if state.fetched >= bounds[partition].first:
                    continue
                if self.options.auto_offset_reset is OffsetReset.ERROR:
                    reason = gone_at(self.stream, partition, state.fetched, bounds[partition])
                    if self.raises_gone:
                        self._halt(
                            OffsetGone(
                                reason, hint='Move the group with seek, or consume with auto_offset_reset="earliest" or "latest".'
                            )
                        )
                        continue
                    with suppress(Conflict):
                        await self.committer.quarantine(state, reason)
                else:
                    first = (
                        bounds[partition].first
                        if self.options.auto_offset_reset is OffsetReset.EARLIEST
                        else bounds[partition].next
                    )
                    log.warning("events_skipped", stream=self.stream, group=self.group, partition=partition, at=first)
                    state.skip(first)
                    state.progressed()
            return []

    # -- callbacks of the partitions and the dispatcher

    def _may_work(self, state: PartitionState[T]) -> bool:
        """Whether this process may begin work on a partition at this moment."""
        return self.partitions.get(state.partition) is state and self.member.may_work(state.partition)

    def _progressed(self, state: PartitionState[T]) -> None:
        """Commit what is done of a partition, and fetch when its buffer has room."""
        if state.done > state.committed:
            self.committer.request()
        if state.room > 0:
            self._polling.wake()

    def _halt(self, error: PenstockError) -> None:
        """Stop the consumer with an error."""
        if self._halted is None:
            self._halted = error
            log.error("consumer_halted", stream=self.stream, group=self.group, error=error)
            self.stop()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, NotFound):
                # The stream was dropped meanwhile: the next read of the partitions ends the consumer.
                self._look_again()
                return
            log.error("delivery_failed", stream=self.stream, group=self.group, exc_info=error)
            self._halt(Halted(f"consuming {self.name} failed: {type(error).__name__}: {message_of(error)}"))
