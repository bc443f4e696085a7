"""What all routes of a server process share, and nothing of any capability: the database, settings, who comes in, metrics.

What a capability needs beside that (group commits, waits, live connections) is a part: an object that stands in the folder of
its capability, is made by `assembly.py`, and is found here by its class. So the routes know this module, this module knows no
route, and neither knows how the parts are put together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from penstock.app import Penstock
from penstock.core.bounded import Bounded, seen
from penstock.core.cached import Kept
from penstock.errors import DatabaseUnavailable
from penstock.http.auth import Authenticator
from penstock.http.errors import ApiError
from penstock.http.live_access import LiveAccess
from penstock.http.metrics import Metrics
from penstock.http.origin import Origins
from penstock.http.proxies import Proxies
from penstock.http.scaling import Scaling
from penstock.http.settings import HttpSettings
from penstock.jobs import http_queries as http
from penstock.jobs.records import JobCounts
from penstock.postgres.database import Database
from penstock.worker.doctor import examine
from penstock.worker.exposition import ANSWER_S, DatabaseGauges

_CALL_TIMEOUT_S = 10.0
R = TypeVar("R")
P = TypeVar("P")


class Service:
    """One server process.

    Args:
        app: An open app.
        database: Its database.
        authenticator: Decides who comes in.
        settings: Settings of the server.
        metrics: Counters.
    """

    def __init__(
        self, app: Penstock, database: Database, authenticator: Authenticator, settings: HttpSettings, metrics: Metrics
    ) -> None:
        self.app = app
        self.database = database
        self.authenticator = authenticator
        self.settings = settings
        self.metrics = metrics
        self.origins = Origins(settings.allowed_hosts, settings.trusted_origins)
        self.proxies = Proxies(settings.trusted_proxies)
        self.stopping = asyncio.Event()
        self.scaling = Scaling(database)
        self.access = LiveAccess(authenticator)
        self._parts: dict[type, Any] = {}
        self._live = 0
        metrics.places.set(settings.max_live)
        self._counts = Kept(app.counts)
        self.gauges = DatabaseGauges(database)
        self.answering = Bounded(lambda: database.fetch("select 1", timeout=ANSWER_S), ANSWER_S)
        self.examination = Kept(lambda: examine(database))
        self._rates = Kept(lambda: http.job_rates(database))

    def add(self, part: P) -> P:
        """Let routes find a part by its class."""
        self._parts[type(part)] = part
        return part

    def part(self, kind: type[P]) -> P:
        """The part of that class."""
        found: P = self._parts[kind]
        return found

    @contextmanager
    def live(self, kind: str) -> Iterator[None]:
        """Count a live connection while it lasts. See `check_room`."""
        self._live += 1
        self.metrics.places_used.set(self._live)
        self.metrics.connected(kind, 1)
        try:
            yield
        finally:
            self._live -= 1
            self.metrics.places_used.set(self._live)
            self.metrics.connected(kind, -1)

    def check_room(self) -> None:
        """Raise a 503 when the server has as many live connections as it may, or stops."""
        if self._live >= self.settings.max_live or self.stopping.is_set():
            raise ApiError(
                503,
                "service_unavailable",
                "The server has as many live connections as it may" if not self.stopping.is_set() else "The server stops",
                detail="Connect again, in a while or to another one",
                in_body=True,
                headers={"Retry-After": "1"},
            )

    async def with_time_limit(self, call: Coroutine[Any, Any, R]) -> R:
        """A call that is repeated while the database is away, as workers like it, for as long as a request may take."""
        # A task, since the cancellation of a call waits for a database that hangs.
        calling = asyncio.create_task(call, name="penstock-limited-call")
        calling.add_done_callback(seen)
        try:
            await asyncio.wait({calling}, timeout=_CALL_TIMEOUT_S)
            if calling.done():
                return calling.result()
            raise DatabaseUnavailable(f"the database has not answered for {_CALL_TIMEOUT_S:g} s")
        finally:
            calling.cancel()

    async def counts(self) -> list[JobCounts]:
        """The queue depths, at most some seconds old: counting reads the whole queue."""
        return await self._counts()

    async def statistics(self, name: str | None = None) -> tuple[list[JobCounts], dict[str, http.Rates]]:
        """Queue depths and rates, at most some seconds old; with those of the type `name`, which may be new."""

        def lacks(counts: list[JobCounts]) -> bool:
            return name is not None and all(count.name != name for count in counts)

        return await self._counts(lacks), await self._rates()
