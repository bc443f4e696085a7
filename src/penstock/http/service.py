"""What the routes share: the database, group commits, waits, claims, metrics. One for each server process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from uuid import UUID

from penstock.app import Penstock
from penstock.errors import DatabaseUnavailable, NotFound
from penstock.http import bodies, shapes
from penstock.http.appending import Appending
from penstock.http.auth import Door, Principal
from penstock.http.batching import GroupCommit
from penstock.http.claims import Claims
from penstock.http.deliveries import Deliveries
from penstock.http.errors import ApiError, no_such_type
from penstock.http.feeds import Feeds
from penstock.http.kept import Kept
from penstock.http.memberships import Memberships
from penstock.http.metrics import Metrics
from penstock.http.origin import Origins
from penstock.http.proxies import Proxies
from penstock.http.scaling import Scaling
from penstock.http.settings import HttpSettings
from penstock.http.watch import Watch
from penstock.job import Admission, JobCounts, Status
from penstock.postgres import http, topics
from penstock.postgres.database import Database
from penstock.postgres.http import Callback, Put
from penstock.postgres.jobs import Batch
from penstock.postgres.listener import Listener

_PATIENCE_S = 10.0
R = TypeVar("R")


class New:
    """A job on its way to a group commit."""

    __slots__ = ("body", "data", "id")

    def __init__(self, id: UUID, data: str, body: bodies.NewJobBody) -> None:
        self.id = id
        self.data = data
        self.body = body


class Service:
    """One server process.

    Args:
        app: An open app.
        database: Its database.
        door: Who comes in.
        settings: Of the server.
        metrics: Counters.
        listener: Hears notifications and tells `heard`.
    """

    def __init__(
        self, app: Penstock, database: Database, door: Door, settings: HttpSettings, metrics: Metrics, listener: Listener
    ) -> None:
        self.app = app
        self.database = database
        self.door = door
        self.settings = settings
        self.metrics = metrics
        self.origins = Origins(settings.allowed_hosts, settings.trusted_origins)
        self.proxies = Proxies(settings.trusted_proxies)
        self.stopping = asyncio.Event()
        self.watch = Watch(database, self.stopping, http.attempts_of)
        self.messages = Watch(database, self.stopping, topics.unfinished)
        self.claims = Claims(database, self.stopping)
        self.scaling = Scaling(database)
        self.appending = Appending(database)
        self.feeds = Feeds(database, f"penstock_{self.claims.id}", self.stopping)
        grace_s = app.settings.handover_grace.total_seconds()
        self.memberships = Memberships(database, self.feeds, listener, self.stopping, grace_s)
        self.deliveries = Deliveries(database, listener, app.settings)
        self._live = 0
        listener.add(f"penstock_{self.claims.id}")
        self._counts = Kept(app.counts)
        self._rates = Kept(lambda: http.job_rates(database))
        self._puts: GroupCommit[str, New, Put] = GroupCommit(self._put)
        self._callbacks: GroupCommit[None, Callback, str] = GroupCommit(
            self._settle, most=500, identity=lambda callback: callback.id
        )

    def stop(self) -> None:
        """End long polls, waits and live connections; what is being committed goes on."""
        self.stopping.set()
        self.watch.stop()
        self.messages.stop()
        self.claims.stop()
        self.feeds.stop()
        self.memberships.stop()
        self.deliveries.stop("the server stops")

    async def close(self) -> None:
        """Settle what was handed out, and take leave of the database."""
        await self.deliveries.aclose()
        await self.feeds.close()

    def heard(self, payload: str) -> None:
        """A notification came, or listening began (anew)."""
        word, _, rest = payload.partition(" ")
        if word not in ("events", "slots", "moved", "taken", "listening"):
            self.claims.heard(payload)
            self.deliveries.heard(word, rest)
        if word == "taken":
            self.deliveries.heard(word, rest)
        if word in ("events", "connected"):
            self.feeds.heard(word, rest)
        if word in ("slots", "moved", "listening", "connected"):
            self.memberships.heard(word, rest)

    @contextmanager
    def live(self, kind: str) -> Iterator[None]:
        """Count a live connection while it lasts. See `check_room`."""
        self._live += 1
        self.metrics.connected(kind, 1)
        try:
            yield
        finally:
            self._live -= 1
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

    async def put(self, principal: Principal, name: str, given_id: str, body: bytes, instance: str) -> tuple[bytes, Admission]:
        """Enqueue one job and return its QueuedJob and what was done. Raises `ApiError` in Rickover's order of checks."""
        new, data = bodies.new_job(body, instance)
        id = bodies.job_id(given_id, random=True)
        principal.require(name, instance)
        put = await self.enqueue(name, id, bodies.check_data(data), new)
        if put.name is not None:
            # The id may be that of a job of another type.
            principal.require_job(put.name, instance)
        if put.name is None or put.admission is Admission.ARCHIVED:
            raise ApiError(
                400, "job_already_archived", "Job has already been archived", instance=f"/v1/jobs/{name}/{shapes.job_id(id)}"
            )
        return shapes.put_job(put, data), put.admission

    async def enqueue(self, name: str, id: UUID, data: str, body: bodies.NewJobBody) -> Put:
        """Enqueue one job with others of its type that come at the same time. Raises `ApiError` 404."""
        try:
            put = await self._puts.submit(name, New(id, data, body))
        except NotFound:
            raise no_such_type(name) from None
        self.metrics.admitted(name, put.admission)
        return put

    async def record_status(self, principal: Principal, name: str, given_id: str, body: bytes, path: str) -> None:
        """Settle one attempt by its number: the callback. Raises `ApiError` in Rickover's order of checks."""
        parsed, attempt = bodies.status(body, path)
        id = bodies.job_id(given_id)
        principal.require(name, path)
        if parsed.status == "succeeded":
            outcome, detail = "succeeded", bodies.text(parsed.result, "the result")
        else:
            outcome = "failed-for-good" if parsed.retryable is False else "failed"
            detail = bodies.failure(bodies.text(parsed.error, "the error"))
        if attempt == 0 and outcome == "succeeded":
            attempt = await self._only_attempt(name, id)
        what = await self._callbacks.submit(None, Callback(name, id, attempt, outcome, detail))
        self.metrics.settled(name, what)
        if what == "unknown":
            raise ApiError(
                400, "duplicate_status_request", "This job has already been archived, or was never queued", instance=path
            )
        if what == "stale":
            raise ApiError(
                400,
                "decrement_failed",
                "could not decrement queued job counter; job may have been archived or attempt number may not match the database",
                instance=path,
                in_body=True,
            )

    async def _only_attempt(self, name: str, id: UUID) -> int:
        """The number of a job's first attempt while there was no other, else 0.

        Rickover looks at the number of a failure only, and its own example of a service sends 0 with every success. While a job
        has had one attempt there is none that the callback could be confused with.
        """
        job = (await http.stored_jobs(self.database, [id])).get(id)
        if job is None or job.name != name or job.status is not Status.IN_PROGRESS or job.attempts != job.max_attempts:
            return 0
        return job.attempts

    async def patiently(self, call: Awaitable[R]) -> R:
        """A call that is repeated while the database is away, as workers like it, for as long as a request may take."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await call
        except TimeoutError:
            raise DatabaseUnavailable("the database is not available") from None

    async def counts(self) -> list[JobCounts]:
        """The queue depths, at most some seconds old: counting reads the whole queue."""
        return await self._counts()

    async def statistics(self, name: str | None = None) -> tuple[list[JobCounts], dict[str, http.Rates]]:
        """Queue depths and rates, at most some seconds old; with those of the type `name`, which may be new."""

        def lacks(counts: list[JobCounts]) -> bool:
            return name is not None and all(count.name != name for count in counts)

        return await self._counts(lacks), await self._rates()

    async def _put(self, name: str, jobs: list[New]) -> list[Put]:
        self.metrics.batch(len(jobs))
        # In the same order in every process, so that two batches with the same ids or unique keys wait for each other once
        # and not both ways. What is enqueued at the same time has no order.
        order = sorted(range(len(jobs)), key=lambda place: (jobs[place].body.unique or "", jobs[place].id))
        puts = await http.put_jobs(self.database, batch_of(name, [jobs[place] for place in order]))
        in_order = dict(zip(order, puts, strict=True))
        return [in_order[place] for place in range(len(jobs))]

    async def _settle(self, _: None, callbacks: list[Callback]) -> list[str]:
        return await http.settle_attempts(self.database, callbacks)


def batch_of(name: str, jobs: list[New]) -> Batch:
    """The columns of some jobs; those that are at their default for all are left out."""
    plain = all(
        job.body.run_after is None
        and job.body.expires_at is None
        and job.body.key is None
        and not job.body.priority
        and job.body.unique is None
        for job in jobs
    )
    ids, data = [job.id for job in jobs], [job.data for job in jobs]
    if plain:
        return Batch(name, ids, data)
    return Batch(
        name,
        ids,
        data,
        [job.body.key for job in jobs],
        [job.body.priority or 0 for job in jobs],
        [job.body.run_after for job in jobs],
        [job.body.expires_at for job in jobs],
        # All null would send the batch the slow way.
        [job.body.unique for job in jobs] if any(job.body.unique is not None for job in jobs) else None,
    )
