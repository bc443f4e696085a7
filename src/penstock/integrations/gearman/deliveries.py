"""Deliveries: copies of messages that the bridge submits to gearmand.

A delivery submits its job at once and then occupies a place of the worker while it waits for the result. A Gearman function that
no worker serves, or whose workers are too slow, must not occupy the places that deliveries to other functions need. The
deliveries of one function therefore wait in at most a share of the places. A delivery beyond that share parks: its job stays with
gearmand, its copy goes back to the queue with a delay, and the copy is made due at once when the result arrives.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from datetime import timedelta
from typing import Any, Protocol
from uuid import UUID

from penstock.app import Penstock
from penstock.core.logs import get_logger
from penstock.errors import Fail, PenstockError, Retry
from penstock.integrations.gearman.wire import GearmanFailure, GearmanUnavailable, as_bytes, parsed
from penstock.jobs import queries as jobs
from penstock.jobs.handler import Job
from penstock.topics import queries as topics

log = get_logger("penstock.gearman")
_MOST_REMEMBERED = 100_000
_LONGEST_DELAY_S = 600
_LOOK_EVERY_S = 0.2
_LOOKS = 25


class Submitter(Protocol):
    """Submits jobs to gearmand: `penstock.integrations.gearman.wire.Wire`."""

    async def submit(self, function: str, arguments: bytes, unique: str) -> bytes:
        """Submit a job and wait for its result. Raises `GearmanFailure`, `GearmanUnavailable`."""
        ...


class Deliveries:
    """Submits copies to gearmand.

    Args:
        app: Application of the bridge.
        places: The number of deliveries that the worker of the copies runs at once.
        timeout: The longest time for which a delivery occupies a place while it waits for the result.
        own: Gearman functions that the bridge itself serves, which cannot be receivers.
    """

    def __init__(self, app: Penstock, places: int, timeout: timedelta, own: frozenset[str]) -> None:
        self._app = app
        self._timeout_s = timeout.total_seconds()
        self._own = own
        self._given: OrderedDict[tuple[str, str], asyncio.Task[bytes]] = OrderedDict()
        self._shares = Shares(places, self._timeout_s)
        self._unique_keys: OrderedDict[str, str | None] = OrderedDict()
        self._held: OrderedDict[UUID, asyncio.Task[bytes]] = OrderedDict()
        self._parked: OrderedDict[UUID, int] = OrderedDict()
        self._answered = asyncio.Event()
        self.submitter: Submitter | None = None

    async def deliver(self, job: Job[Any]) -> Any:
        """The handler of the copies: the result of the Gearman worker."""
        if job.key is None or job.key in self._own:
            raise Fail(
                f"{job.key!r} is no Gearman function of a receiver", hint="The key of a copy is the function to which it goes."
            )
        unique = await self._unique_of(job.id) or str(job.id)
        place = (job.key, unique)
        # A parked copy gets the result of its own submission, also when other copies with its unique key have received it.
        given = self._held.pop(job.id, None) or self._given.get(place) or self._give(place, job.data)
        try:
            result = await self._shares.wait(job.key, given)
        except TimeoutError:
            self._park(job.id, given)
            # The job stays with gearmand. The next attempt waits for it again, and submits it again if gearmand lost it.
            raise Retry(
                "no Gearman worker has done it yet", after=timedelta(seconds=min(2**job.attempt, _LONGEST_DELAY_S))
            ) from None
        except GearmanUnavailable as error:
            raise Retry(error.message, after=timedelta(seconds=1)) from None
        except GearmanFailure as error:
            raise Fail(error.message) from None
        finally:
            if given.done():
                self._given.pop(place, None)
        return parsed(result)

    async def run(self) -> None:
        """Make parked copies due when their results have come, until cancelled."""
        while True:
            await self._answered.wait()
            ids = list(self._parked)[:10_000]
            try:
                found = await jobs.run_now(await self._app.database(), ids)
            except PenstockError as error:
                log.warning("parked_copies_wait", error=error)
                found = set()
            for id in ids:
                # A copy that is not found is not back in the queue yet, or another bridge has it: try a few times, then leave it
                # to its delay.
                if id in found or self._parked[id] <= 1:
                    del self._parked[id]
                else:
                    self._parked[id] -= 1
            if not self._parked:
                self._answered.clear()
            await asyncio.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        """Stop waiting for results. gearmand keeps the jobs."""
        for given in self._given.values():
            given.cancel()

    def _give(self, place: tuple[str, str], data: Any) -> asyncio.Task[bytes]:
        """Submit a job. Its result is kept until a delivery asks for it, also while none waits."""
        if self.submitter is None:
            raise Retry("the bridge is starting", after=timedelta(seconds=1))
        submitted = self.submitter.submit(place[0], as_bytes(data), place[1])
        given = asyncio.create_task(submitted, name=f"penstock-gearman-give-{place[0]}")
        given.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._given[place] = given
        if len(self._given) > _MOST_REMEMBERED:
            self._given.popitem(last=False)
        return given

    def _park(self, id: UUID, given: asyncio.Task[bytes]) -> None:
        def answered(done: asyncio.Task[bytes]) -> None:
            if done.cancelled():
                return
            self._parked[id] = _LOOKS
            if len(self._parked) > _MOST_REMEMBERED:
                self._parked.popitem(last=False)
            self._answered.set()

        self._held[id] = given
        if len(self._held) > _MOST_REMEMBERED:
            self._held.popitem(last=False)
        given.add_done_callback(answered)

    async def _unique_of(self, job_id: UUID) -> str | None:
        """The unique key of the message of which a job is a copy; the ids of all copies begin alike."""
        message = str(job_id)[:24]
        if message not in self._unique_keys:
            found = await topics.message_of(await self._app.database(), job_id)
            self._unique_keys[message] = found["unique_key"] if found else None
            if len(self._unique_keys) > 1_000:
                self._unique_keys.popitem(last=False)
        return self._unique_keys[message]


class Shares:
    """Limits how many deliveries of each function wait in places.

    Functions whose workers answered recently share half of the places equally; each other function gets a tenth of such a share.
    No delivery waits in the other half of the places, so that a delivery to a further function always finds one.

    Args:
        places: The number of deliveries that can run at once.
        timeout_s: The longest wait of a delivery, in seconds.
    """

    def __init__(self, places: int, timeout_s: float) -> None:
        self._places = places
        self._timeout_s = timeout_s
        self._waiting: Counter[str] = Counter()
        self._served_at: OrderedDict[str, float] = OrderedDict()

    async def wait(self, function: str, given: asyncio.Task[bytes]) -> bytes:
        """The result of a submission. Raises `TimeoutError` when the function has used its share, or it takes too long."""
        if not given.done() and not self._may_wait(function):
            raise TimeoutError
        self._waiting[function] += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await asyncio.shield(given)
        finally:
            self._waiting[function] -= 1
            if not self._waiting[function]:
                del self._waiting[function]
        self._served_at[function] = time.monotonic()
        self._served_at.move_to_end(function)
        if len(self._served_at) > _MOST_REMEMBERED:
            self._served_at.popitem(last=False)
        return result

    def _may_wait(self, function: str) -> bool:
        usable = self._places // 2
        if self._waiting.total() >= usable:
            return False
        served_at = self._served_at.get(function)
        served = served_at is not None and time.monotonic() - served_at < self._timeout_s
        functions = len(self._waiting) + (function not in self._waiting)
        return self._waiting[function] < max(1, (usable if served else usable // 10) // functions)
