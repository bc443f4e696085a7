"""The fetcher: the loop that claims jobs from one source, in batches under load, and waits when there is nothing to claim.

The sources are the queues of a worker's job types (`worker.queue_source`), the keys of the slots that a worker owns in a pool
(`pools.key_source`), the queues of connections that receive topics (`http.topics.delivery_source`), and the type for which a
request over HTTP waits (`http.workers.claims`). A source decides how much may be claimed and hands the claimed jobs over; the
fetcher decides when the source looks.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from penstock.core import measuring
from penstock.core.logs import get_logger
from penstock.core.polling import Polling, wait_for_event
from penstock.errors import PenstockError
from penstock.jobs.claim_queries import PlacesWanted

log = get_logger("penstock.worker")
_LOOK_FOR_ROOM_S = 1.0
_GO_ON_S = 0.005
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class Look:
    """The result of one look for jobs.

    Attributes:
        claimed: Number of claimed jobs.
        full: Whether every place is taken, so that the source found none and can only wait for a place.
        partly_full: Whether some of its types had no place, so that it has to look when there is one.
        unfinished: Whether the look was cut short, so that the next one has to follow soon.
        wanted: The limited types for whose places the source waits now.
        only_wanted: Whether all types of the source wait for such places.
        due_in_s: Seconds until jobs are due; None: not known.
    """

    claimed: int = 0
    full: bool = False
    partly_full: bool = False
    unfinished: bool = False
    wanted: PlacesWanted | None = None
    only_wanted: bool = False
    due_in_s: float | None = None


class Source(Protocol):
    """Where a fetcher claims jobs. The source decides how many jobs may be claimed, and passes them on."""

    def blocked_s(self) -> float | None:
        """Seconds after which to ask again; None: the source may claim now."""

    async def look(self) -> Look:
        """Claim once."""

    async def announce(self) -> None:
        """Register this process as idle, so that new jobs notify it."""

    async def recover(self, error: PenstockError) -> None:
        """Clean up after a failed claim, see `FailedClaims`."""


S = TypeVar("S", bound=Source, covariant=True)


class Fetcher(Generic[S]):
    """The loop that claims from one source.

    Args:
        source: The source to claim from.
        polling: Decides when to look again.
        paused: Lock that the fetcher holds from before a claim until its jobs are passed on, or released after a lost answer.
            While another task holds it, the fetcher claims nothing.
    """

    def __init__(self, source: S, polling: Polling, paused: asyncio.Lock) -> None:
        self.source = source
        self.polling = polling
        self.paused = paused
        self.progressed_at = time.monotonic()
        self._room = asyncio.Event()
        self._partly_full = False

    def wake(self) -> None:
        """Look now, since jobs may have arrived."""
        self.polling.wake()

    def announce_again(self) -> None:
        """Register as idle again, and look now: what was registered has changed, or may be lost."""
        self.polling.announce_again()

    def room_made(self) -> None:
        """Look now, since a place is free."""
        self._room.set()
        if self._partly_full:
            self.polling.wake()

    async def run(self) -> None:
        """Claim until cancelled."""
        polling, looked_for_place = self.polling, False
        while True:
            self.progressed_at = time.monotonic()
            polling.begin()
            self._room.clear()
            try:
                if (blocked_s := self.source.blocked_s()) is not None:
                    await polling.wait(blocked_s)
                    continue
                look = await self._look()
                self._partly_full = look.partly_full
                new_wish = look.wanted is not None and look.wanted.is_new and not looked_for_place
                looked_for_place = new_wish
                if look.full:
                    # The loop wakes at intervals to show that it makes progress.
                    await wait_for_event(self._room, _LOOK_FOR_ROOM_S)
                elif look.claimed:
                    polling.found()
                elif new_wish:
                    # A place may have become free before the database registered the wait for it: look once more.
                    continue
                elif look.unfinished:
                    # Leave the database to others for a moment.
                    await polling.wait(_GO_ON_S)
                else:
                    await polling.rest(None if look.only_wanted else self._announce, look.due_in_s)
            except PenstockError:
                await polling.back_off()

    async def stop(self, running: asyncio.Task[None]) -> None:
        """End the task of `run`, but not during a claim: the jobs in its answer would be lost."""
        try:
            async with asyncio.timeout(_STOP_S), self.paused:
                running.cancel()
        except TimeoutError:
            running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def _look(self) -> Look:
        async with self.paused:
            began = time.monotonic()
            try:
                look = await self.source.look()
                if not look.full and (meter := measuring.meter) is not None:
                    meter.claimed(look.claimed, time.monotonic() - began)
                return look
            except PenstockError as error:
                await self.source.recover(error)
                raise

    async def _announce(self) -> None:
        try:
            await self.source.announce()
        except PenstockError as error:
            log.warning("idle_not_announced", error=error)
            raise
