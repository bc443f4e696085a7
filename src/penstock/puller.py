"""The pull form of a pool's worker: the program asks for jobs and says what became of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from uuid import UUID

import orjson

from penstock.checks import check_mapping
from penstock.contained import message_of
from penstock.errors import Conflict, InvalidInput, PenstockError
from penstock.handler import Job
from penstock.job import ClaimedJob, Delivery, Outcome, Settlement
from penstock.payload import Codec, dump_json, plain_text
from penstock.postgres import jobs
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.worker.care import SharedCare
from penstock.worker.isolation import Isolation
from penstock.worker.pool import PoolPart, new_member_id
from penstock.worker.settler import Settler
from penstock.worker.types import WorkedPool

if TYPE_CHECKING:
    from penstock.app import Penstock

T = TypeVar("T")
# A job that nobody asked for in this share of its lease is handed back: it would not have the time to run.
_LONGEST_WAIT = 0.5
_LOOK_FOR_LATE_S = 0.2
_OF_THE_POOL = ("slots", "keys", "standing", "connected", "cancel")


class PulledJob(Job[T], Generic[T]):
    """A job that a program pulled. It has to be settled: `ack`, `fail` or `release`; until then its key waits."""

    __slots__ = ("_hand",)
    _hand: _InHand

    async def ack(self, result: Any = None) -> None:
        """The job is done. Returns when that is written.

        Raises:
            Conflict: The job no longer belongs to this worker; another runs it, or will.
        """
        detail = None if result is None else dump_json(result, f"the result of {self.name}")
        await self._hand.settle(Outcome.SUCCEEDED, detail)

    async def fail(self, error: str | BaseException, *, retry: bool = True, after: timedelta | None = None) -> None:
        """The attempt failed: it is retried (`after` a while, or the backoff of the pool) while attempts are left.

        Raises:
            Conflict: The job no longer belongs to this worker.
        """
        kind = type(error).__qualname__ if isinstance(error, BaseException) else "Failed"
        detail = orjson.dumps(
            {"type": kind, "message": message_of(error) if isinstance(error, BaseException) else plain_text(error[:2_000])}
        ).decode()
        await self._hand.settle(Outcome.FAILED if retry else Outcome.FAILED_FOR_GOOD, detail, after)

    async def release(self) -> None:
        """Hand the job back as if it had not been pulled."""
        await self._hand.settle(Outcome.RELEASED, None)


class _InHand:
    """What a worker knows of a job that it gave out. The `JobControl` of the job."""

    def __init__(self, puller: _Puller, job: ClaimedJob, claimed_at: float, may_start: Callable[[], bool]) -> None:
        self.job = job
        self.may_start = may_start
        self.too_late_at = claimed_at + job.lease_s * _LONGEST_WAIT
        self.lease = job.lease
        self.reason: str | None = None
        self.settled: asyncio.Future[str | None] | None = None
        self._puller = puller

    @property
    def cancelled(self) -> bool:
        """See `JobControl`."""
        return self.reason is not None

    async def extend(self, span: timedelta | None) -> None:
        """See `JobControl`."""
        lease = await jobs.extend(self._puller.database, self.job, self.lease, span)
        if lease is None:
            raise Conflict(f"job {self.job.id} no longer belongs to this worker", hint="Stop: another worker may be running it.")
        self.lease = lease

    def extend_blocking(self, span: timedelta | None) -> None:
        """See `JobControl`."""
        asyncio.run_coroutine_threadsafe(self.extend(span), self._puller.loop).result(timeout=60)

    def progress(self, value: Any) -> None:
        """See `JobControl`."""
        text = dump_json(value, f"the progress of {self.job.name}")
        self._puller.loop.call_soon_threadsafe(self._puller.settler.progress, self.job.id, self, text)

    async def settle(self, outcome: Outcome, detail: str | None, after: timedelta | None = None) -> None:
        """Settle the job, and wait until that is written."""
        if self.settled is not None:
            raise Conflict(f"job {self.job.id} was settled already", hint="Call ack, fail or release once.")
        self.settled = asyncio.get_running_loop().create_future()
        self._puller.finish(self, Settlement(self.job.id, self.job.attempts, self.lease, outcome, detail, after))
        if await self.settled == "stale":
            raise Conflict(
                f"job {self.job.id} no longer belongs to this worker",
                hint="Its slot moved or its visibility timeout ended: another worker runs it, or will.",
            )


class _Puller:
    """Keeps claimed jobs until they are asked for. A `Runs`."""

    def __init__(self, database: Database, settler: Settler, prefetch: int) -> None:
        self.database = database
        self.settler = settler
        self.loop = asyncio.get_running_loop()
        self.part: PoolPart | None = None
        self.arrived = asyncio.Event()
        self.waiting: deque[_InHand] = deque()
        self.in_hand: dict[UUID, _InHand] = {}
        # By result: a job that was lost while its result is on its way may be in hand anew.
        self._settling: dict[Settlement, _InHand] = {}
        self._prefetch = prefetch

    def room(self) -> int:
        """See `Runs`."""
        return self._prefetch - len(self.in_hand)

    def start(self, job: ClaimedJob, claimed_at: float, may_start: Callable[[], bool], ahead: bool) -> None:
        """See `Runs`."""
        hand = self.in_hand[job.id] = _InHand(self, job, claimed_at, may_start)
        if ahead:
            self.waiting.appendleft(hand)
        else:
            self.waiting.append(hand)
        self.arrived.set()

    def next(self) -> _InHand | None:
        """The next job to give out, if at this moment it still may start: the process may have been stopped at any point."""
        while self.waiting:
            hand = self.waiting[0]
            if hand.may_start() and time.monotonic() < hand.too_late_at:
                return self.waiting.popleft()
            self.give_back([hand.job.id])
        return None

    def give_back(self, ids: Iterable[UUID]) -> None:
        """See `Runs`."""
        for id in ids:
            if self.in_hand.get(id) in self.waiting:
                self.cancel(id, "moved")

    def give_back_late(self) -> None:
        """Hand back what nobody asked for in time."""
        now = time.monotonic()
        self.give_back([hand.job.id for hand in list(self.waiting) if hand.too_late_at <= now])

    def cancel(self, id: UUID, reason: str) -> None:
        """See `Runs`. What was not given out yet is settled; otherwise the program has to look at `job.cancelled`."""
        hand = self.in_hand.get(id)
        if hand is None:
            return
        hand.reason = reason
        if hand in self.waiting:
            self.waiting.remove(hand)
            outcome = Outcome.CANCELLED if reason == "cancelled" else Outcome.RELEASED
            self.finish(hand, Settlement(id, hand.job.attempts, hand.lease, outcome))

    def abandon(self, lost: Iterable[UUID]) -> list[asyncio.Task[Any]]:
        """See `Runs`. The program cannot be stopped; `job.cancelled` tells it, and `ack` is refused."""
        for id in lost:
            if (hand := self.in_hand.pop(id, None)) is not None:
                hand.reason = "lost"
                if hand in self.waiting:
                    self.waiting.remove(hand)
                if hand.settled is not None and not hand.settled.done():
                    hand.settled.set_result("stale")
        return []

    def leases(self) -> Iterable[int]:
        """See `Runs`."""
        return [hand.lease for hand in self.in_hand.values()]

    def finish(self, hand: _InHand, result: Settlement) -> None:
        """A job is settled by the program."""
        claimer = self.part.claimer if self.part is not None else None
        if claimer is None or self.in_hand.get(result.id) is not hand or not claimer.lines.holds(result.id):
            if hand.settled is not None and not hand.settled.done():
                hand.settled.set_result("stale")
            return
        self._settling[result] = hand
        claimer.lines.finished(result)
        claimer.room_made()

    def written(self, results: Sequence[Settlement], outcomes: Mapping[UUID, str]) -> None:
        """Results are in the database."""
        for result in results:
            hand = self._settling.pop(result, None)
            if hand is None:
                continue
            if self.in_hand.get(result.id) is hand:
                del self.in_hand[result.id]
            if hand.settled is not None and not hand.settled.done():
                hand.settled.set_result(outcomes.get(result.id))
        if self.part is not None and self.part.claimer is not None:
            self.part.claimer.lines.written(results, outcomes)
            self.part.claimer.room_made()

    def release_all(self) -> None:
        """Hand back everything in hand."""
        for hand in list(self.in_hand.values()):
            if hand.settled is None:
                hand.reason = "shutdown"
                self.finish(hand, Settlement(hand.job.id, hand.job.attempts, hand.lease, Outcome.RELEASED))
        self.waiting.clear()

    def end(self) -> None:
        """Nothing is written any more: whoever waits for that is told."""
        for hand in self._settling.values():
            if hand.settled is not None and not hand.settled.done():
                hand.settled.set_result("stale")


class PoolWorker(Generic[T]):
    """A worker of a pool whose jobs are pulled. Made by `Pool.worker`; use it as an async context manager."""

    def __init__(self, app: Penstock, pool: WorkedPool, codec: Codec[T], id: str | None, prefetch: int) -> None:
        if prefetch < 1:
            raise InvalidInput(f"prefetch must be at least 1, not {prefetch}")
        self.id = id or new_member_id()
        self._app = app
        self._pool = pool
        self._codec = codec
        self._prefetch = prefetch
        self._puller: _Puller | None = None
        self._part: PoolPart | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._taking_part: asyncio.Task[None] | None = None
        self._shared_care: SharedCare | None = None

    async def __aenter__(self) -> Self:
        """Join the pool. Raises `Conflict` when a live worker has this id."""
        database = await self._app.database()
        # Puts due jobs into their lines and takes back lost ones, also when no other worker runs.
        care = self._shared_care = SharedCare.of(database, self._app.settings)
        settler = Settler(database, care.look, lambda results, outcomes: puller.written(results, outcomes))
        puller = self._puller = _Puller(database, settler, self._prefetch)
        part = self._part = puller.part = PoolPart(
            database, self._pool, self._app.settings, puller, settler.settle, lambda: settler.leases, self.id
        )
        fetchers = [part.claimer] if part.claimer is not None else []
        isolation = Isolation(database, fetchers, self._app.settings, settler.drained)
        await part.declare()
        await part.member.join()

        def heard(payload: str) -> None:
            word, _, rest = payload.partition(" ")
            if word == "cancel" and rest not in map(str, puller.in_hand):
                return
            # Whoever may connect can send notifications: what they say of a job is looked up.
            part.heard(word)
            if word not in _OF_THE_POOL:
                care.look()

        self._tasks = [
            asyncio.create_task(settler.run(), name="penstock-settler"),
            asyncio.create_task(settler.run_progress(), name="penstock-progress"),
            asyncio.create_task(self._give_back_late(puller), name="penstock-late"),
            asyncio.create_task(isolation.run(), name="penstock-isolation"),
            asyncio.create_task(Listener(database, [f"penstock_{self.id}"], heard).run(), name="penstock-listener"),
        ]
        care.join(self._wake, lambda: part.member.members)
        self._taking_part = asyncio.create_task(part.run(), name=f"penstock-pool-{self._pool.name}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._part is not None and self._puller is not None and self._taking_part is not None  # noqa: S101
        self._part.stop(self._app.settings.shutdown_grace.total_seconds())
        self._puller.release_all()
        # If the database is away now, the others evict this worker.
        with suppress(PenstockError, ExceptionGroup):
            await asyncio.wait([self._taking_part], timeout=15.0)
        for task in [*self._tasks, self._taking_part]:
            task.cancel()
        await asyncio.gather(*self._tasks, self._taking_part, return_exceptions=True)
        if self._shared_care is not None:
            await self._shared_care.leave(self._wake)
        self._puller.end()

    def _wake(self) -> None:
        if self._part is not None:
            self._part.heard("keys")

    @property
    def slots(self) -> list[int]:
        """The slots that are this worker's at this moment."""
        return sorted(self._part.member.owned) if self._part is not None else []

    async def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Say something else of this worker; a pool with a rule of its own assigns its keys anew."""
        check_mapping("metadata", metadata, '{"clients": ["ada"]}')
        if self._part is not None:
            await self._part.member.set_metadata(metadata)

    async def jobs(self) -> AsyncIterator[PulledJob[T]]:
        """The jobs of this worker's keys, as they come, one of a key at a time.

        Raises:
            Conflict: This worker was taken for dead, and meanwhile another has its id.
        """
        puller, taking_part = self._puller, self._taking_part
        if puller is None or taking_part is None:
            raise InvalidInput(f"worker {self.id} is not in its pool", hint="Use it in: async with pool.worker(...) as worker:")
        while True:
            while (hand := puller.next()) is not None:
                if not await self._begun(puller, hand):
                    continue
                try:
                    job = self._given(hand)
                except Exception as error:
                    # As with a handler; its key is not to wait for it.
                    detail = jobs.quarantined(f"its payload cannot be read: {getattr(error, 'message', error)}")
                    puller.finish(hand, Settlement(hand.job.id, hand.job.attempts, hand.lease, Outcome.QUARANTINED, detail))
                    continue
                yield job
            puller.arrived.clear()
            arrival = asyncio.create_task(puller.arrived.wait())
            try:
                await asyncio.wait([arrival, taking_part], return_when=asyncio.FIRST_COMPLETED)
            finally:
                arrival.cancel()
            if taking_part.done():
                taking_part.result()
                return

    async def _begun(self, puller: _Puller, hand: _InHand) -> bool:
        """Mark a job that may be started only once as begun. Whether it may be given out; otherwise it is handed back."""
        if self._pool.declared.delivery is not Delivery.AT_MOST_ONCE:
            return True
        begun = False
        try:
            begun = bool(await jobs.begin(puller.database, [hand.job.id], [hand.lease])) and hand.may_start()
        finally:
            if not begun:
                puller.finish(hand, Settlement(hand.job.id, hand.job.attempts, hand.lease, Outcome.RELEASED))
        return begun

    def _given(self, hand: _InHand) -> PulledJob[T]:
        claimed = hand.job
        job = PulledJob(
            claimed.id,
            claimed.name,
            claimed.key,
            claimed.max_attempts - claimed.attempts + 1,
            claimed.attempts,
            self._codec.load(claimed.data),
            claimed.created_at,
            hand,
        )
        job._hand = hand
        return job

    async def _give_back_late(self, puller: _Puller) -> None:
        """Hand back what was not asked for."""
        while True:
            puller.give_back_late()
            await asyncio.sleep(_LOOK_FOR_LATE_S)
