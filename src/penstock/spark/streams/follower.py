"""Waits for events. It lives in the process of a streaming query, over a connection that stays with the query."""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from penstock.core.polling import wait_for_event
from penstock.spark.blocking import Blocking
from penstock.spark.streams.log import StreamLog
from penstock.spark.streams.offsets import Offsets
from penstock.streams import queries as streams

_REGISTERED_S = 20.0  # the database removes a registration after 30 s


class StreamFollower:
    """The registration of one streaming reader for notifications of all streams that it reads.

    A registration outlasts a batch that finds nothing, so an idle query does not register each time that Spark asks.

    Args:
        database: A database that the reader keeps.
    """

    def __init__(self, database: Blocking) -> None:
        self._database = database
        self._channel = f"penstock_spark_{secrets.token_hex(6)}"
        self._registered_until = 0.0

    async def next(
        self, log: StreamLog, start: Offsets, limit: int | None, until: Offsets | None, wait: timedelta, least: int = 1
    ) -> Offsets:
        """The end of the next batch. While there are fewer than `least` events, it waits for notifications, at most `wait`."""

        async def found() -> Offsets:
            enough = least <= 1 or await log.lag(start) >= least
            return await log.next(start, limit, until) if enough else start

        deadline = time.monotonic() + wait.total_seconds()
        while True:
            # A registered reader listens before it reads, so that later events notify it.
            notified = self._database.listen(self._channel) if self._registered_until > 0 else None
            end = await found()
            left = deadline - time.monotonic()
            if (
                until is not None
                or left <= 0
                or log.was_recreated
                or any(offset > start.get(place, 0) for place, offset in end.items())
            ):
                return end
            now = time.monotonic()
            if notified is None or now > self._registered_until:
                # One statement registers this reader for all streams; then it reads once more, for events that came in between.
                await streams.wait_for_events_of(self._database.database, [name for name, _ in log.seen], self._channel)
                self._registered_until = now + _REGISTERED_S
            elif not await wait_for_event(notified, min(left, self._registered_until - now)) and time.monotonic() >= deadline:
                return end

    async def stop_waiting(self) -> None:
        """Remove the registration: while the reader has a batch to read, notifications would be needless."""
        if self._registered_until > 0:
            self._registered_until = 0.0
            await streams.stop_waiting(self._database.database, self._channel)
