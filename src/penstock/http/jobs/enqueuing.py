"""The only place in which the HTTP API enqueues jobs, and single jobs and callbacks that come at the same time.

A `New` cannot be made without the user who enqueues it, and its constructor refuses what that user may not name: another type's
name, jobs to wait for, job groups. Both ways to enqueue take a `New`, and hide from the user what was found under an id that
is another type's. So a route cannot forget these checks.

Jobs that come at the same time are enqueued in one statement and one commit, callbacks settled in another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from penstock.core.coalescing import GroupCommit
from penstock.core.tracing import valid_traceparent
from penstock.errors import DatabaseUnavailable, NotFound
from penstock.http import bodies, shapes
from penstock.http.auth import Principal
from penstock.http.errors import ApiError, no_such_type
from penstock.http.metrics import Metrics
from penstock.jobs import http_queries as http
from penstock.jobs import queries
from penstock.jobs.http_queries import Callback, Put
from penstock.jobs.models import EnqueueOutcome
from penstock.jobs.queries import JobColumns
from penstock.jobs.records import Status
from penstock.postgres.database import Database

_MOST_CALLBACKS = 500


class New:
    """A job on its way to the database, which its user may enqueue.

    Args:
        principal: Who enqueues it.
        name: Its type.
        id: Its id.
        data: Its payload as text.
        body: What else was sent.
        instance: The path of the request, which errors name.
        traceparent: Its trace context.

    Raises:
        ApiError: 403 for what the user may not name, 400 and 413 for a payload that no job can have.
    """

    __slots__ = ("body", "data", "id", "instance", "principal", "traceparent")

    def __init__(
        self, principal: Principal, name: str, id: UUID, data: str, body: bodies.NewJobBody, instance: str,
        traceparent: str | None = None,
    ) -> None:  # fmt: skip
        principal.require(name, instance)
        if body.after is not None or body.group is not None:
            # They may be of any type.
            principal.require_any("jobs to wait for and job groups", instance)
        self.principal = principal
        self.id = id
        self.data = bodies.check_data(data)
        self.body = body
        self.instance = instance
        self.traceparent = traceparent

    @property
    def own(self) -> Mapping[str, Any] | None:
        """Its own options, and its trace context."""
        return self.body.own if self.traceparent is None else {**(self.body.own or {}), "traceparent": self.traceparent}


class SingleJobs:
    """Enqueues and settles the single jobs of all requests of this process.

    Args:
        database: Database to write to.
        metrics: Counters.
    """

    def __init__(self, database: Database, metrics: Metrics) -> None:
        self._database = database
        self._metrics = metrics
        self._puts: GroupCommit[str, New, Put] = GroupCommit(self._put)
        self._callbacks: GroupCommit[None, Callback, str] = GroupCommit(
            self._settle, most=_MOST_CALLBACKS, identity=lambda callback: callback.id
        )

    async def put(
        self, principal: Principal, name: str, given_id: str, body: bytes, instance: str, traceparent: bytes = b""
    ) -> tuple[bytes, EnqueueOutcome]:
        """Enqueue one job and return its QueuedJob and what was done. Raises `ApiError` in Rickover's order of checks."""
        given, data = bodies.new_job(body, instance)
        id = bodies.job_id(given_id, random=True)
        new = New(principal, name, id, data, given, instance, valid_traceparent(traceparent.decode("latin-1")))
        put = await self.enqueue(name, new)
        if put.name is None or put.outcome is EnqueueOutcome.ARCHIVED:
            raise ApiError(
                400, "job_already_archived", "Job has already been archived", instance=f"/v1/jobs/{name}/{shapes.job_id(id)}"
            )
        return shapes.put_job(put, data), put.outcome

    async def enqueue(self, name: str, new: New) -> Put:
        """Enqueue one job with others of its type that come at the same time.

        Raises:
            ApiError: 404 without such a type; for the id of a job of another type 403 to a user of some types, else 409.
        """
        try:
            put = await self._puts.submit(name, new)
        except NotFound:
            raise no_such_type(name) from None
        self._metrics.enqueued(name, put.outcome)
        if put.outcome is EnqueueOutcome.TAKEN:
            raise taken(new)
        if put.name is None and put.outcome is EnqueueOutcome.COALESCED:
            # It coalesced with a job that has ended, and holds its unique key for a time.
            holder = (await http.stored_jobs(self._database, [put.id])).get(put.id)
            return put if holder is None else http.put_of(put.outcome, holder)
        return put

    async def enqueue_lines(self, name: str, part: Sequence[New]) -> list[dict[str, Any]]:
        """Enqueue many jobs of a type in one statement: what became of each, or why it was refused, as a line of an answer."""
        batch = batch_of(name, part)
        try:
            exceptions = await queries.enqueue_many(self._database, batch)
        except DatabaseUnavailable:
            # The ids are made, so that once more does no harm.
            exceptions = await queries.enqueue_many(self._database, batch)
        lines: list[dict[str, Any]] = []
        for index, new in enumerate(part):
            id, outcome = exceptions.get(index, (new.id, EnqueueOutcome.QUEUED))
            refused = outcome is EnqueueOutcome.TAKEN and new.principal.types is not None
            lines.append({"error": taken(new).as_dict()} if refused else {"id": shapes.job_id(id), "outcome": str(outcome)})
        return lines

    async def record_status(self, principal: Principal, name: str, given_id: str, body: bytes, path: str) -> None:
        """Settle one attempt by the number of attempts left: the callback. Raises `ApiError` in Rickover's order of checks."""
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
        """The number of attempts left to a job while it has its first one, else 0.

        Rickover looks at the number of a failure only, and its own example of a service sends 0 with every success. While a job
        has had one attempt there is none that the callback could be confused with.
        """
        job = (await http.stored_jobs(self._database, [id])).get(id)
        if job is None or job.name != name or job.status is not Status.IN_PROGRESS or job.attempt != 1:
            return 0
        return job.attempts_left

    async def _put(self, name: str, jobs: list[New]) -> list[Put]:
        self._metrics.batch(len(jobs))
        # In the same order in every process, so that two batches with the same ids or unique keys wait for each other once
        # and not both ways. What is enqueued at the same time has no order.
        order = sorted(range(len(jobs)), key=lambda index: (jobs[index].body.unique or "", jobs[index].id))
        puts = await http.put_jobs(self._database, batch_of(name, [jobs[index] for index in order]))
        in_order = dict(zip(order, puts, strict=True))
        return [in_order[index] for index in range(len(jobs))]

    async def _settle(self, _: None, callbacks: list[Callback]) -> list[str]:
        began = time.monotonic()
        settled = await http.settle_attempts(self._database, callbacks)
        names = [callback.name for callback in callbacks]
        others = [(name, one.outcome) for name, one in zip(names, settled, strict=True) if one.outcome != "succeeded"]
        self._metrics.settled(names, others, time.monotonic() - began)
        self._metrics.timed(
            (name, one.outcome, one.wait_s, one.run_s)
            for name, one in zip(names, settled, strict=True)
            if one.wait_s is not None and one.run_s is not None
        )
        return [one.outcome for one in settled]


def taken(new: New) -> ApiError:
    """The answer to an id that is in use for a job of another type: that it is in use, and nothing else."""
    if new.principal.types is None:
        return ApiError(409, "id_taken", f"The id belongs to another job: {shapes.job_id(new.id)}", instance=new.instance)
    # Whether the other type is open to the user or not.
    title = f"User {new.principal.name} has no access to this job"
    return ApiError(403, "forbidden", title, detail="Its id is in use: take another one", instance=new.instance, in_body=True)


def batch_of(name: str, jobs: Sequence[New]) -> JobColumns:
    """The columns of some jobs; those that are at their default for all are left out."""
    plain = all(
        job.body.run_after is None
        and job.body.expires_at is None
        and job.body.key is None
        and not job.body.priority
        and job.body.unique is None
        and job.own is None
        for job in jobs
    )
    ids, data = [job.id for job in jobs], [job.data for job in jobs]
    if plain:
        return JobColumns(name, ids, data)
    own = [job.own for job in jobs]
    return JobColumns(
        name,
        ids,
        data,
        [job.body.key for job in jobs],
        [job.body.priority or 0 for job in jobs],
        [job.body.run_after for job in jobs],
        [job.body.expires_at for job in jobs],
        # All null would send the batch the slow way.
        [job.body.unique for job in jobs] if any(job.body.unique is not None for job in jobs) else None,
        own if any(options is not None for options in own) else None,
    )
