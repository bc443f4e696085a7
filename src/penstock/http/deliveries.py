"""Deliveries: subscribers of topics that are connections.

Each connection is a subscriber with a queue of its own, like any other, so filters, `unique`, `run_after` and publishers that
wait for outcomes work as ever. This process is one worker for all of its connections: one claim for whatever came for any of
them, one settle for whatever was handed out, one renewal for all subscriptions. When the process dies its claims go back to the
queues like those of any dead worker, and the subscriptions that nobody renews end by themselves.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from uuid import UUID

from penstock.errors import Conflict, DatabaseUnavailable, NotFound, PenstockError
from penstock.http.inbox import Copy, Inbox
from penstock.job import ClaimedJob, Outcome, Settlement
from penstock.logs import get_logger
from penstock.message import Subscribed
from penstock.postgres import jobs, topics
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.settings import Settings
from penstock.waiting import happens
from penstock.worker.marks import Marks
from penstock.worker.settler import Settler

log = get_logger("penstock.http")
LIVING = timedelta(seconds=30)
"""Time to live of a subscription that ends with its connection, for when nobody can end it."""
_RENEWALS_IN_A_TTL = 4
_MOST_CLAIMED, _FEWEST_CLAIMED = 1_000, 100
_MOST_AT_HAND = 5_000
_POLL_S = 1.0
_NAMES_AT_FULL_PACE = 100
_MOST_FORGOTTEN = 1_000
_NO_MESSAGE = '{"type": "InvalidInput", "message": "the job is not a copy of a message"}'


class Deliveries:
    """Claims for the connections of this process.

    Args:
        database: Where.
        listener: Listens for this process.
        settings: Intervals.
    """

    def __init__(self, database: Database, listener: Listener, settings: Settings) -> None:
        self.id = f"deliver.{os.getpid()}.{secrets.token_hex(4)}"
        self._database = database
        self._listener = listener
        self._settings = settings
        self._settler = Settler(database, lambda: None, self._written)
        self._inboxes: dict[str, list[Inbox]] = {}
        self._marks = Marks()
        self._forgotten = 0
        self._named: set[str] = set()
        self._others_came = asyncio.Event()
        self._came = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connections(self) -> int:
        """How many there are."""
        return sum(map(len, self._inboxes.values()))

    # -- connections

    async def open(self, inbox: Inbox, since: int | None, last: int | None = None) -> Subscribed:
        """Subscribe a connection. From now on copies come to its inbox.

        Args:
            inbox: Of the connection.
            since: The latest message that it saw; None: begin with what comes, and what the topic keeps.
            last: The one that it saw last, when that is an older one that came late.

        Raises:
            NotFound: There is no such topic.
            Conflict: The name is taken, or messages after `since` are gone.
        """
        await self._start()
        if inbox.alone:
            await self._take_over(inbox.queue, "")
        receipt = await self._subscribe(inbox, since)
        inbox.queue = receipt.queue
        inbox.seen(receipt.seq if since is None else since, last)
        if inbox.alone:
            await topics.take_over(self._database, inbox.queue, inbox.id)
        if since is not None and not receipt.created:
            await inbox.look_for_missed(self._database)
        self._inboxes.setdefault(inbox.queue, []).append(inbox)
        # It may have been in the queue for long.
        self._marks.sweep()
        self._came.set()
        return receipt

    async def close(self, inbox: Inbox) -> None:
        """End a connection: give back what it did not hand out, and end its subscription unless that stays."""
        there = self._inboxes.get(inbox.queue, [])
        if inbox in there:
            there.remove(inbox)
            if not there:
                del self._inboxes[inbox.queue]
                self._forgotten += 1
                if self._forgotten > _MOST_FORGOTTEN:
                    # Marks of queues that are gone.
                    self._marks, self._forgotten = Marks(), 0
        for copy in inbox.give_back():
            self._settler.settle(_settlement(copy, Outcome.RELEASED))
        inbox.end("closed")
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._settler.drained()
        if not inbox.stays and not there:
            # When the database is away now, the time to live ends it.
            with suppress(PenstockError):
                await topics.unsubscribe(self._database, inbox.topic, inbox.client_id, True)
        inbox.closed.set()
        self._came.set()

    def done(self, copy: Copy, outcome: Outcome = Outcome.SUCCEEDED, detail: str | None = None) -> None:
        """A copy was handed out, or its receiver says what became of it."""
        self._settler.settle(_settlement(copy, outcome, detail))

    def room_made(self) -> None:
        """An inbox was emptied."""
        self._came.set()

    def heard(self, word: str, rest: str) -> None:
        """A notification came."""
        if word == "sweep":
            self._marks.sweep()
        elif word == "taken":
            # Whoever may connect to the database can send notifications: `_look_for_others` asks it.
            if any(inbox.alone for inbox in self._inboxes.get(rest, [])):
                self._named.add(rest)
                self._others_came.set()
            return
        self._came.set()

    def stop(self, reason: str) -> None:
        """End all connections."""
        for inboxes in self._inboxes.values():
            for inbox in inboxes:
                inbox.end(reason)

    async def aclose(self) -> None:
        """Settle what was handed out, and take leave."""
        if not self._tasks:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._settler.drained()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.remove(f"penstock_{self.id}")
        with suppress(PenstockError):
            await jobs.unregister_worker(self._database, self.id)

    async def _take_over(self, queue: str, id: str) -> None:
        """End connections of this process that have the queue, and wait until what they had is written or given back."""
        before = [inbox for inbox in self._inboxes.get(queue, []) if inbox.alone and inbox.id != id]
        for inbox in before:
            inbox.end("another connection has this client id now")
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                for inbox in before:
                    await inbox.closed.wait()

    async def _subscribe(self, inbox: Inbox, since: int | None) -> Subscribed:
        receipts = await topics.subscribe_many(
            self._database, inbox.topic, [inbox.client_id], ttl=inbox.ttl, filter=inbox.filter, since=since
        )
        return receipts[0]

    # -- the loops

    async def _start(self) -> None:
        if self._tasks:
            return
        self._tasks = [
            asyncio.create_task(loop, name=f"penstock-deliveries-{name}")
            for name, loop in (
                ("claim", self._claim()), ("settle", self._settler.run()), ("beat", self._beat()), ("renew", self._renew()),
                ("others", self._look_for_others()),
            )
        ]  # fmt: skip
        self._listener.add(f"penstock_{self.id}")
        await self._register()

    async def _register(self) -> None:
        with suppress(Conflict):
            await jobs.register_worker(
                self._database, self.id, [], socket.gethostname(), os.getpid(), _MOST_AT_HAND, self._settings.dead_after
            )

    async def _look_for_others(self) -> None:
        """End connections whose client id another connection has now."""
        while True:
            await self._others_came.wait()
            self._others_came.clear()
            named, self._named = self._named, set()
            try:
                receiving = await topics.connections_of(self._database, list(named))
            except PenstockError as error:
                log.warning("connections_unknown", error=error)
                self._named |= named
                self._others_came.set()
                await asyncio.sleep(_POLL_S)
                continue
            for queue, id in receiving.items():
                for inbox in self._inboxes.get(queue, []):
                    if inbox.alone and inbox.id != id:
                        inbox.end("another connection has this client id now")

    async def _claim(self) -> None:
        said: frozenset[str] = frozenset()
        while True:
            self._came.clear()
            names = [name for name, inboxes in self._inboxes.items() if any(inbox.room > 0 for inbox in inboxes)]
            room = _MOST_AT_HAND - sum(inbox.at_hand for inboxes in self._inboxes.values() for inbox in inboxes)
            if not names or room <= 0:
                await self._came.wait()
                continue
            try:
                if await self._claim_once(names, min(room, max(_FEWEST_CLAIMED, min(len(names), _MOST_CLAIMED)))):
                    said = frozenset()
                elif not said.issuperset(names):
                    # And once more: something may have come in between.
                    await jobs.wait_for_jobs(self._database, self.id, names)
                    said = frozenset(names)
                elif not await happens(self._came, max(_POLL_S, len(names) / _NAMES_AT_FULL_PACE) * random.uniform(0.7, 1.0)):
                    # Say so again, since the word is only good for a while.
                    said = frozenset()
            except DatabaseUnavailable as error:
                said = frozenset()
                log.warning("claim_failed", error=error)
                await self._recover_claim()
            except PenstockError as error:
                said = frozenset()
                log.error("claim_refused", error=error)
                with suppress(PenstockError):
                    await jobs.quarantine_unreadable(self._database, self.id, names, self._known_leases)
                await self._recover_claim()
                await asyncio.sleep(_POLL_S)

    async def _claim_once(self, names: list[str], limit: int) -> int:
        # Another comes first each time, so that a deep queue does not keep the others waiting.
        turn = random.randrange(len(names))
        names = names[turn:] + names[:turn]
        now = asyncio.get_running_loop().time()
        marks = self._marks.for_claim(now)
        claim = await jobs.claim(self._database, self.id, names, limit, marks)
        if claim.jobs:
            self._marks.claimed(claim.jobs, claim.horizon, claim.ceiling, now)
            self._hand_out(claim.jobs, await topics.messages_of(self._database, [job.id for job in claim.jobs]))
        if not marks:
            took = asyncio.get_running_loop().time() - now
            self._marks.swept(now + took, took if len(claim.jobs) < limit else 0.0)
        return len(claim.jobs)

    def _hand_out(self, claimed: Sequence[ClaimedJob], messages: Mapping[UUID, tuple[int, UUID, object]]) -> None:
        frames: dict[UUID, Copy] = {}
        copies: list[tuple[Copy, Inbox]] = []
        for job in claimed:
            message = messages.get(job.id)
            inboxes = [inbox for inbox in self._inboxes.get(job.name, ()) if not inbox.ended]
            if message is None or not inboxes:
                # Nobody is there any more; or an ordinary job somebody put there, which is not for a connection.
                outcome = Outcome.RELEASED if message is not None else Outcome.FAILED_FOR_GOOD
                detail = None if message is not None else _NO_MESSAGE
                self._settler.settle(Settlement(job.id, job.attempts, job.lease, outcome, detail))
                continue
            copy = Copy.of(job, *message, like=frames.get(message[1]))  # type: ignore[arg-type]
            frames.setdefault(copy.id, copy)
            copies.append((copy, max(inboxes, key=lambda inbox: inbox.room)))
        # In this order `penstock.late_messages` knows what a client has that saw one of them.
        for copy, inbox in sorted(copies, key=lambda one: (one[0].late, one[0].seq)):
            inbox.put(copy)

    async def _recover_claim(self) -> None:
        """The answer to a claim was lost: hand back what it may have taken."""
        with suppress(PenstockError):
            await jobs.release_unknown(self._database, self.id, self._known_leases)

    def _known_leases(self) -> list[int]:
        held = [lease for inboxes in self._inboxes.values() for inbox in inboxes for lease in inbox.leases]
        return [*held, *self._settler.leases]

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_interval.total_seconds())
            try:
                at_hand = sum(inbox.at_hand for inboxes in self._inboxes.values() for inbox in inboxes)
                if not (await jobs.heartbeat(self._database, self.id, at_hand, "running")).known:
                    log.warning("deliveries_taken_for_dead", worker=self.id)
                    # What was claimed is others' by now.
                    for inboxes in self._inboxes.values():
                        for inbox in inboxes:
                            inbox.give_back()
                    await self._register()
                    self._came.set()
            except PenstockError as error:
                log.warning("heartbeat_failed", error=error)

    async def _renew(self) -> None:
        while True:
            living = {(i.topic, i.client_id): i for inboxes in self._inboxes.values() for i in inboxes if i.ttl is not None}
            shortest = min([LIVING, *(inbox.ttl for inbox in living.values() if inbox.ttl is not None)])
            await asyncio.sleep(shortest.total_seconds() / _RENEWALS_IN_A_TTL)
            if not living:
                continue
            try:
                for missing in living.keys() - (await topics.renew(self._database, list(living))).keys():
                    await self._begin_anew(living[missing])
            except PenstockError as error:
                log.warning("renewal_failed", error=error)

    async def _begin_anew(self, inbox: Inbox) -> None:
        """The subscription ended under a living connection, such as after a long outage: go on where it was."""
        if inbox.ended or inbox not in self._inboxes.get(inbox.queue, ()):
            return
        log.warning("subscription_lapsed", topic=inbox.topic, client_id=inbox.client_id)
        try:
            await self._subscribe(inbox, inbox.last_seq)
        except (Conflict, NotFound) as error:
            inbox.fail(error)
        self._came.set()

    def _written(self, results: Sequence[Settlement], outcomes: Mapping[UUID, str]) -> None:
        """Tell receivers that acknowledge what came too late."""
        for result in results:
            if outcomes.get(result.id) == "stale":
                for inboxes in self._inboxes.values():
                    for inbox in inboxes:
                        inbox.came_too_late(result.id)


def _settlement(copy: Copy, outcome: Outcome, detail: str | None = None) -> Settlement:
    return Settlement(copy.job, copy.attempts, copy.lease, outcome, detail)
