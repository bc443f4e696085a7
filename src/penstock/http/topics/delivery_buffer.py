"""The copies that are claimed for a connection that receives a topic: `deliveries` adds them, the connection takes them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice
from uuid import UUID

import orjson

from penstock.core.polling import wait_for_event
from penstock.core.tally import OTHERS
from penstock.errors import PenstockError
from penstock.jobs.models import ClaimedJob
from penstock.postgres.database import Database
from penstock.topics import queries as topics

_MOST_REMEMBERED = 10_000
_MOST_MISSED = 1_000
_MOST_LATE = 1_000
_MOST_BYTES = 1 << 20
"""Of messages that wait for one connection: while there are so many, no more are claimed for it, nor taken at once."""
_SMALL_BYTES = 1_024


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a message, claimed for a connection; `body` is the message as JSON, shared by all copies of it.

    Attributes:
        job: Id of the copy.
        name: Job type under which it is counted.
        lease: Under which it was claimed.
        attempt: Which delivery this is, from 1.
        run_after, created_at: Times from which it waited.
        since: When it was claimed, by the monotonic clock.
        late: Whether it comes out of turn: it was put off, or is tried again.
        seq: Sequence number of the message.
        id: Id of the message.
        body: The message as JSON.
    """

    job: UUID
    name: str
    lease: int
    attempt: int
    run_after: datetime
    created_at: datetime
    since: float
    late: bool
    seq: int
    id: UUID
    body: bytes

    def written(self) -> Copy:
        """The copy as it is kept until it is settled: without its body, unless that is small."""
        return self if len(self.body) <= _SMALL_BYTES else replace(self, body=b"")

    @classmethod
    def of(cls, job: ClaimedJob, name: str, seq: int, id: UUID, published_at: datetime, *, like: Copy | None) -> Copy:
        """A claimed copy, which is counted under a name; `like`: another one of the same message, whose body it shares."""
        body = like.body if like is not None else body_of(seq, id, published_at, job.data, job.key)
        late = job.attempt > 1 or job.run_after > job.created_at
        times = (job.run_after, job.created_at, time.monotonic())
        return cls(job.id, name, job.lease, job.attempt, *times, late, seq, id, body)


def body_of(seq: int, id: UUID, published_at: datetime, data: str, key: str | None) -> bytes:
    """A message as JSON; `key` is there when it has one."""
    fields = {"seq": seq, "id": str(id), "published_at": published_at, "data": orjson.Fragment(data)}
    if key is not None:
        fields["key"] = key
    return orjson.dumps(fields, option=orjson.OPT_UTC_Z)


class DeliveryBuffer:
    """One connection.

    Args:
        topic: What it receives.
        client_id: As whom; None: a new name for this connection.
        ttl: How long the subscription outlives what renews it; None: it stays.
        filter: Only messages that contain this JSON, as text.
        stays: Whether the subscription is there when the connection has ended.
        window: The largest number of copies in the buffer and unacknowledged.
        alone: Whether it takes the place of another connection with this client id, instead of sharing the copies with it.
    """

    def __init__(
        self,
        topic: str,
        client_id: str | None,
        *,
        ttl: timedelta | None,
        filter: str | None,
        stays: bool,
        window: int,
        alone: bool,
    ) -> None:
        self.id = secrets.token_hex(8)
        self.topic = topic
        self.client_id = client_id or f"live-{self.id}"
        self.queue = f"{topic}_{self.client_id}"
        # A name that is new with each connection would crowd out those of job types.
        self.counted_as = self.queue if client_id else OTHERS
        self.ttl = ttl
        self.filter = filter
        self.stays = stays
        self.alone = alone
        self.last_seq = 0
        self.ended: str | None = None
        self.error: PenstockError | None = None
        self.event = asyncio.Event()
        self.late: deque[UUID] = deque(maxlen=_MOST_LATE)
        self._window = window
        self._since = 0
        self._last = 0
        self._came_back = False
        self._waiting: deque[Copy] = deque()
        self._bytes = 0  # of the bodies of these
        self._handed: dict[UUID, Copy] = {}
        self._missed: deque[int] = deque()
        self._missed_after: int | None = None
        self._recent: OrderedDict[UUID, None] = OrderedDict()
        self._expected: OrderedDict[UUID, None] = OrderedDict()

    # -- filling

    @property
    def at_hand(self) -> int:
        """How many copies are not settled."""
        return len(self._waiting) + len(self._handed)

    @property
    def room(self) -> int:
        """How many more it may have."""
        return 0 if self.ended or self.crowded else self._window - self.at_hand

    @property
    def crowded(self) -> bool:
        """Whether so many bytes wait to be written that it may have no more copies before."""
        return self._bytes >= _MOST_BYTES

    @property
    def leases(self) -> Iterable[int]:
        """Of the copies that are not settled."""
        return [copy.lease for copy in (*self._waiting, *self._handed.values())]

    def put(self, copy: Copy) -> None:
        """A copy came."""
        self._waiting.append(copy)
        self._bytes += len(copy.body)
        self.event.set()

    def begins(self, seq: int) -> None:
        """The receiver is new: it gets what is in its queue, and what comes after this message."""
        self._since = self._last = self.last_seq = seq

    def comes_back(self, since: int, last: int | None = None) -> None:
        """The receiver has what was handed out up to message `since`, and of what came late what was up to `last`."""
        self.begins(since)
        self._last = since if last is None else last
        self._came_back = True

    def end(self, reason: str) -> None:
        """End the connection."""
        if self.ended is None:
            self.ended = reason
            self.event.set()

    def fail(self, error: PenstockError) -> None:
        """End the connection with an error."""
        self.error = error
        self.end(error.message)

    def came_too_late(self, job: UUID) -> None:
        """A copy that was settled was no longer this connection's."""
        if job in self._expected:
            self.late.append(job)
            self.event.set()

    def expect(self, job: UUID) -> None:
        """Note the receiver's outcome of a copy; the receiver is told when it came too late."""
        self._expected[job] = None
        if len(self._expected) > _MOST_LATE:
            self._expected.popitem(last=False)

    async def look_for_missed(self, database: Database) -> None:
        """Find what was handed out and may have been lost on the way, since the message that the receiver saw last."""
        # First what is late: while it is missing, an id with a higher number would hide it.
        late = await topics.late(database, self.topic, self.client_id, self._since, self._last, _MOST_MISSED)
        self._missed += [seq for seq, id in late if id not in self._recent]
        self._missed_after = self._since
        await self._find_missed(database, _MOST_REMEMBERED)

    async def _find_missed(self, database: Database, most: int) -> None:
        """Find the numbers of further messages that were lost on the way, until `most` are known, or there are no more."""
        while self._missed_after is not None and len(self._missed) < most:
            found = await topics.missed(database, self.topic, self.client_id, self._missed_after, _MOST_MISSED)
            self._missed += [seq for seq, id in found if id not in self._recent]
            self._missed_after = found[-1][0] if len(found) == _MOST_MISSED else None

    # -- emptying

    async def wait(self, within: float) -> bool:
        """Wait until something is there, or the connection is to end. False: nothing came in time."""
        if self._has_missed or self._waiting or self.late or self.ended:
            return True
        self.event.clear()
        return await wait_for_event(self.event, within)

    async def missed(self, database: Database) -> list[tuple[int, bytes]]:
        """The next messages that were lost on the way, number and JSON: as many as `_MOST_BYTES` hold, and at least one.

        They belong to no connection any more. While there are some, `take` gives nothing: with the number of a later message
        the receiver would say that it has them. When the database does not answer, the connection ends with the error.
        """
        try:
            return await self._read_missed(database)
        except PenstockError as error:
            self.fail(error)
            return []

    async def _read_missed(self, database: Database) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        while not found and self._has_missed:
            await self._find_missed(database, 1)
            asked = list(islice(self._missed, _MOST_MISSED))
            messages = await topics.messages_at(database, self.topic, asked, _MOST_BYTES)
            # Those that are not there were pruned, or have expired.
            through = asked.index(messages[-1].seq) + 1 if messages else len(asked)
            for _ in range(through):
                self._missed.popleft()
            for message in messages:
                if self._remember(message.id):
                    self.last_seq = max(self.last_seq, message.seq)
                    body = body_of(message.seq, message.id, message.published_at, message.data, message.key)
                    found.append((message.seq, body))
        return found

    @property
    def _has_missed(self) -> bool:
        return bool(self._missed) or self._missed_after is not None

    def take(self, most: int) -> list[Copy]:
        """Copies to be handed out; each is to be settled, or given back. See `settled`."""
        taken: list[Copy] = []
        if self._has_missed:
            return taken
        size = 0
        while self._waiting and len(taken) < most and size < _MOST_BYTES:
            copy = self._waiting.popleft()
            size += len(copy.body)
            self._handed[copy.job] = copy.written()
            self.last_seq = max(self.last_seq, copy.seq)
            taken.append(copy)
        self._bytes -= size
        return taken

    def was_seen(self, copy: Copy) -> bool:
        """Whether it is the message that a receiver which came back saw last: a crash brought it back to the queue.

        Of any other message a number below that says nothing: what is in the queue was never handed out, since it was put off,
        or held by another connection when later ones came; or a crash brought it back, and then it rather comes twice than never.
        """
        return self._came_back and copy.seq == self._last

    def is_new(self, copy: Copy) -> bool:
        """Whether the message was not handed out to this connection before."""
        return self._remember(copy.id)

    def settled(self, job: UUID) -> Copy | None:
        """Settle a copy with the receiver's outcome; it comes without its body. None: the buffer does not have the copy."""
        return self._handed.pop(job, None)

    def give_back(self) -> list[Copy]:
        """Everything that is not settled."""
        copies = [*self._handed.values(), *self._waiting]
        self._handed.clear()
        self._waiting.clear()
        self._bytes = 0
        return copies

    def _remember(self, id: UUID) -> bool:
        if id in self._recent:
            return False
        self._recent[id] = None
        if len(self._recent) > _MOST_REMEMBERED:
            self._recent.popitem(last=False)
        return True
