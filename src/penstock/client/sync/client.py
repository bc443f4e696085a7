"""The client.

    with Client("http://127.0.0.1:9090", "admin", "secret") as penstock:
        receipt = penstock.enqueue("invoice-shipments", {"shipmentId": "shp_123"})
        record = penstock.wait(receipt.id)

The methods are those of `penstock.Penstock`, with the same words in and out, so one can take the place of the other. Calls that
can be repeated are repeated for a while when the server is away: all but `claim`. What is sent, and how an answer is read, is
described as data, a `Call`; the client only sends it.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack
from uuid import UUID

import httpx

from penstock.client import calls, pool_calls, stream_calls, topic_calls
from penstock.client.answers import unavailable
from penstock.client.call import Call
from penstock.client.connection import LONGEST_WAIT_S, options_for, pause_after
from penstock.client.sync.operations import Operations
from penstock.client.sync.pools import Pool
from penstock.client.sync.streams import Stream
from penstock.client.sync.topics import Topic
from penstock.core.checks import check_span
from penstock.errors import DatabaseUnavailable, InvalidInput
from penstock.jobs.group_record import JobGroupRecord
from penstock.jobs.http_models import Claimed, Result
from penstock.jobs.models import Enqueued, GroupReference, NewJob, NewJobOptions
from penstock.jobs.records import HandlerRecord, JobCounts, JobRecord, JobTypeRecord, Status, Why
from penstock.jobs.scaling import ScaleAdvice
from penstock.jobs.steps import StepRecord
from penstock.jobs.top import TopRecord
from penstock.pools.models import PoolDetails
from penstock.schedules.schedule import ScheduleRecord, ScheduleRun
from penstock.streams.models import StreamRecord, StreamSummary
from penstock.topics.models import TopicCounts
from penstock.worker.findings import Finding
from penstock.worker.fleets import FleetRecord, WorkerRecord
from penstock.worker.leader import LeaderRecord
from penstock.worker.overview import Overview
from penstock.workflows.models import OnFailure, WorkflowRunRecord, WorkflowStepRecord

T = TypeVar("T")


class Client:
    """A client for threads.

    Args:
        url: Of the server; may have a user and a password in it.
        user: Name for basic auth.
        password: For basic auth.
        token: A bearer token, instead of a user.
        timeout: Longest time for a try, waits not counted, and for repeating it while the server is away.
    """

    def __init__(
        self,
        url: str,
        user: str | None = None,
        password: str = "",
        *,
        token: str | None = None,
        timeout: timedelta = timedelta(seconds=30),
    ) -> None:
        check_span("timeout", timeout)
        self._timeout_s = timeout.total_seconds()
        self._http = httpx.Client(**options_for(url, user, password, token, self._timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def enqueue(self, name: str, data: Any = None, **options: Unpack[NewJobOptions]) -> Enqueued:
        """Enqueue one job. See `Penstock.enqueue`."""
        return self._send(calls.enqueue(name, NewJob(data, **options)))

    def enqueue_many(self, name: str, new: Iterable[NewJob | Any]) -> list[Enqueued]:
        """Enqueue many jobs, in batches of 10,000. Raises `InvalidInput` for the first bad one; the others are enqueued."""
        return [receipt for call in calls.enqueue_many(name, new) for receipt in self._send(call)]

    def find(self, id: UUID | str) -> JobRecord:
        """Everything known of a job. Raises `NotFound`."""
        return self._send(calls.find(id))

    def why(self, id: UUID | str) -> Why:
        """Why a job waits: the first thing that has to change for it to start. Raises `NotFound`."""
        return self._send(calls.why(id))

    def find_many(
        self,
        *,
        name: str | None = None,
        status: Status | str | None = None,
        key: str | None = None,
        reason: str | None = None,
        workflow: GroupReference | None = None,
        limit: int = 50,
    ) -> list[JobRecord]:
        """Jobs, latest first, by type, status, key, reason and workflow."""
        found: list[JobRecord] = []
        for call in calls.find_many(name, status, key, reason, workflow):
            page: Call[calls.Page] | None = call
            left = limit
            while page is not None and left > 0:
                jobs, page = self._send(page)
                found += jobs[:left]
                left -= len(jobs)
        return calls.latest(found, limit)

    def wait(self, id: UUID | str, *, timeout: timedelta = timedelta(minutes=1)) -> JobRecord:
        """Wait until a job is finished. Raises `JobFailed`, `NotFound`, `TimeoutError`."""
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            left = deadline - time.monotonic()
            record = self._send(calls.find(id, wait_s=min(max(left, 0.0), LONGEST_WAIT_S)))
            if record.status.finished:
                return calls.succeeded(record)
            if time.monotonic() >= deadline:
                raise TimeoutError(f"job {record.id} is {record.status}")

    def result(self, name: str, id: UUID | str, *, wait: timedelta = timedelta(0)) -> Result:
        """What became of a job; `status` says whether it is finished."""
        return self._send(calls.result(name, id, wait.total_seconds()))

    def cancel(self, id: UUID | str) -> str:
        """Cancel a job. See `Penstock.cancel`."""
        return self._send(calls.cancel(id))

    def set_priority(self, id: UUID | str, priority: int) -> bool:
        """Give a job that waits another priority. See `Penstock.set_priority`."""
        return self._send(calls.set_priority(id, priority))

    def run_now(self, id: UUID | str) -> bool:
        """Make a job that waits for its time, or for a further attempt, due at once. See `Penstock.run_now`."""
        return self._send(calls.run_now(id))

    def replay(self, id: UUID | str, *, new_id: UUID | str | None = None, data: Any = None, force: bool = False) -> Enqueued:
        """Enqueue a copy of a running or finished job. See `Penstock.replay`.

        Raises:
            InvalidInput: It is queued.
            Conflict: It was replayed already, and `force` is not given.
        """
        return self._send(calls.replay(id, new_id, data, force))

    def record_status(
        self,
        name: str,
        id: UUID | str,
        attempt: int,
        status: Status | str,
        *,
        retryable: bool = True,
        result: Any = None,
        error: Any = None,
    ) -> None:
        """The callback of a downstream service. Raises `InvalidInput` when the attempt is stale or the job finished."""
        self._send(calls.record_status(name, id, attempt, status, retryable, result, error))

    def job_types(self) -> list[JobTypeRecord]:
        """All job types that the user may see."""
        return self._send(calls.job_types())

    def leaders(self) -> list[LeaderRecord]:
        """Those tasks of the leader that the user may see."""
        return self._send(calls.leaders())

    def doctor(self) -> list[Finding]:
        """What is wrong with the database and the workers, and what to do about it, as the server sees it."""
        return self._send(calls.doctor())

    def workers(self) -> list[WorkerRecord]:
        """Those workers that the user may see."""
        return self._send(calls.workers())

    def overview(self) -> Overview:
        """How the job types, workers and streams that the user may see are doing. See `Penstock.overview`."""
        return self._send(calls.overview())

    def drain_worker(self, id: str) -> str:
        """Let one worker of a fleet stop. Returns the fleet. Raises `NotFound`, and `Conflict` for a worker of no fleet."""
        return self._send(calls.drain_worker(id))

    def fleets(self) -> list[FleetRecord]:
        """All fleets of workers on Spark."""
        return self._send(calls.fleets())

    def drain_fleet(self, name: str) -> None:
        """Let the workers of a fleet stop. Raises `NotFound`."""
        self._send(calls.drain_fleet(name))

    def handlers(self) -> list[HandlerRecord]:
        """What workers say of those handlers that the user may see."""
        return self._send(calls.handlers())

    def create_job_type(self, name: str, **options: Any) -> JobTypeRecord:
        """Create a job type. Raises `InvalidInput` when it exists."""
        return self._send(calls.create_job_type(name, options))

    def change_job_type(self, name: str, **options: Any) -> JobTypeRecord:
        """Change options of a job type. Raises `NotFound`, `InvalidInput`."""
        return self._send(calls.change_job_type(name, options))

    def drop_job_type(self, name: str, *, force: bool = False) -> None:
        """Drop a job type. Raises `NotFound`, `Conflict` while jobs of it run, or wait and `force` is not given."""
        self._send(calls.drop_job_type(name, force))

    def pause(self, name: str) -> None:
        """Claim no more jobs of a type. Raises `NotFound`."""
        self._send(calls.pause(name))

    def resume(self, name: str) -> None:
        """End a pause. Raises `NotFound`, `Conflict`."""
        self._send(calls.resume(name))

    def signal(self, id: UUID | str, name: str, value: Any = None) -> bool:
        """Send a signal to a job; see `Penstock.signal`. Raises `NotFound`, `Conflict`."""
        return self._send(calls.signal(id, name, value))

    def steps(self, id: UUID | str, *, after: str | None = None, limit: int = 1000) -> list[StepRecord]:
        """The durable steps of a job, page by page; see `Penstock.steps`. Raises `NotFound`."""
        return self._send(calls.steps(id, after, limit))

    def open_group(
        self,
        name: str,
        *,
        then: str | None = None,
        then_data: Any = None,
        then_key: str | None = None,
        on_failure: OnFailure = "cancel",
        parent: UUID | None = None,
    ) -> JobGroupRecord:
        """Open a job group, or find the one of this name; see `Penstock.job_group`. Raises `Conflict`, `NotFound`."""
        data = {} if then_data is None else then_data
        return self._send(calls.open_group(name, then, data, then_key, on_failure, parent))

    def seal_group(self, group: UUID | str) -> JobGroupRecord:
        """Say that no more children of a job group come, apart from those that children enqueue. Raises `NotFound`."""
        return self._send(calls.change_group(group, "seal"))

    def cancel_group(self, group: UUID | str) -> JobGroupRecord:
        """Cancel the children of a job group, and its `then`. Raises `NotFound`."""
        return self._send(calls.change_group(group, "cancel"))

    def find_group(self, group: UUID | str) -> JobGroupRecord:
        """A job group by its id or its name. Raises `NotFound`."""
        return self._send(calls.find_group(group))

    def job_groups(self, *, open: bool = False, limit: int = 50) -> list[JobGroupRecord]:
        """Job groups, latest first: all, or only those that have not ended."""
        return self._send(calls.job_groups(open, limit))

    def start_workflow(
        self, run: str, workflow: str, steps: list[dict[str, Any]], *, on_failure: OnFailure = "continue"
    ) -> WorkflowRunRecord:
        """Start a run of a workflow, or find the one of this id. Raises `InvalidInput`, `Conflict`, `NotFound`.

        Args:
            run: Id of the run, such as `nightly-2026-11-22`.
            workflow: Name of the workflow.
            steps: Its steps as in SQL: objects with name, type, after (names of steps before it), when, data, key, priority,
                run_after, expires_at, max_attempts, time_limit; or, of a step of many jobs, jobs.
            on_failure: See `Penstock.workflow`.
        """
        return self._send(calls.start_workflow(run, workflow, steps, on_failure))

    def workflow_runs(self, workflow: str | None = None, *, open: bool = False, limit: int = 50) -> list[WorkflowRunRecord]:
        """Runs of workflows, latest first: all, those of a workflow, or only those that have not ended."""
        return self._send(calls.workflow_runs(workflow, open, limit))

    def find_workflow_run(self, run: UUID | str) -> WorkflowRunRecord:
        """A run of a workflow by its id. Raises `NotFound`."""
        return self._send(calls.find_workflow_run(run))

    def workflow_steps(self, run: UUID | str) -> list[WorkflowStepRecord]:
        """The steps of a run, each behind those after which it runs, with status and times. Raises `NotFound`."""
        return self._send(calls.workflow_steps(run))

    def cancel_workflow(self, run: UUID | str) -> WorkflowRunRecord:
        """Cancel the steps of a run. Raises `NotFound`."""
        return self._send(calls.cancel_workflow(run))

    def retry_workflow(self, run: UUID | str, *, from_step: str | None = None, id: str | None = None) -> WorkflowRunRecord:
        """Retry a run that has ended; see `Penstock.retry_workflow`. Raises `NotFound`, `InvalidInput`, `Conflict`."""
        return self._send(calls.retry_workflow(run, from_step, id))

    def list_schedules(self) -> list[ScheduleRecord]:
        """All schedules that the user may see, with their last runs."""
        return self._send(calls.list_schedules())

    def schedule_runs(self, name: str, *, status: Status | str | None = None, limit: int = 20) -> list[ScheduleRun]:
        """The last runs of a schedule, latest first. Raises `NotFound`."""
        return self._send(calls.schedule_runs(name, status, limit))

    def run_schedule(self, name: str, *, key: str | None = None) -> UUID | None:
        """Run a schedule now. Returns its job, None for a run in place. Raises `NotFound`, `Conflict`, `InvalidInput`."""
        return self._send(calls.run_schedule(name, key))

    def drop_schedule(self, name: str) -> None:
        """Forget a schedule that left the code. Raises `NotFound`, `Conflict`."""
        self._send(calls.drop_schedule(name))

    def counts(self) -> list[JobCounts]:
        """How each job type is doing."""
        return self._send(calls.counts())

    def top(self, by: str, *, order: str = "ready", name: str | None = None, limit: int = 20) -> list[TopRecord]:
        """What fills the queue, of the job types that the user may see. See `Penstock.top`."""
        return self._send(calls.top(by, order, name, limit))

    def claim(self, name: str, worker: str, *, limit: int = 1, wait: timedelta = timedelta(0)) -> list[Claimed]:
        """Claim jobs, waiting for one for a while. Not repeated when the answer is lost."""
        return self._send(calls.claim(name, worker, limit, wait.total_seconds()))

    def extend(self, jobs: Sequence[Claimed], duration: timedelta | None = None) -> dict[UUID, int]:
        """Keep jobs of one type for longer: their new leases. A job that is missing is no longer the worker's."""
        return self._send(calls.extend(jobs, duration))

    def settle(
        self,
        job: Claimed,
        outcome: str = "succeeded",
        *,
        result: Any = None,
        error: Any = None,
        retry_after: timedelta | None = None,
    ) -> str:
        """Say what became of a job. Returns what came of that; "stale": it was no longer the worker's."""
        return self._send(calls.settle(job, outcome, result, error, retry_after))

    def heartbeat(self, worker: str, **fields: Any) -> Mapping[str, Any]:
        """Say that a worker lives: names, in_flight, concurrency, dead_after_s. Returns known, cancelled, leases."""
        return self._send(calls.heartbeat(worker, fields))

    def unregister(self, worker: str) -> None:
        """The orderly end of a worker."""
        self._send(calls.unregister(worker))

    @property
    def operations(self) -> Operations:
        """Operations on all jobs that match a filter."""
        return Operations(self._send)

    def pool(self, name: str) -> Pool:
        """A pool, to enqueue into, look at and steer."""
        return Pool(name, self._send)

    def list_pools(self) -> list[PoolDetails]:
        """All pools that the user may see."""
        return self._send(pool_calls.pools())

    def find_pool(self, name: str) -> Pool:
        """A pool that is there. Raises `NotFound`."""
        pool = self.pool(name)
        pool.details()
        return pool

    def create_pool(self, name: str, *, convert: bool = False, **options: Any) -> PoolDetails:
        """Create a pool, or (convert) make one of a job type: slots, assignor, on_retry, ... Raises `Conflict` when it exists."""
        return self._send(pool_calls.create_pool(name, {**options, "convert": convert}))

    def drop_pool(self, name: str, *, force: bool = False) -> None:
        """Drop a pool with its job type. Raises `NotFound`, `Conflict` while it has live workers, or (unless forced) work."""
        self._send(pool_calls.drop_pool(name, force))

    def scale_advice(self, *, wait: timedelta = timedelta(seconds=5)) -> list[ScaleAdvice]:
        """How many workers each job type and pool needs for jobs to wait no longer than `wait`."""
        return self._send(pool_calls.scale_advice(wait))

    def stream(self, name: str) -> Stream:
        """A stream on the server, which need not exist yet."""
        return Stream(self._send, self._http, name, self._timeout_s)

    def topic(self, name: str, *, catch_up: int | None = None, encrypted: bool = False) -> Topic:
        """A topic on the server, which need not exist yet. `catch_up` and `encrypted` are for `declare`, see `Penstock.topic`."""
        return Topic(self._send, self._http, name, self._timeout_s, catch_up, encrypted or None)

    def find_stream(self, name: str) -> Stream:
        """A stream that is there. Raises `NotFound`."""
        stream = self.stream(name)
        stream.describe()
        return stream

    def topic_counts(self) -> list[TopicCounts]:
        """How each topic is doing."""
        return self._send(topic_calls.topics())

    def find_topic(self, name: str) -> Topic:
        """A topic that is there. Raises `NotFound`."""
        topic = self.topic(name)
        topic.details()
        return topic

    def list_streams(self) -> list[StreamSummary]:
        """All streams that the user may see, and how large they are."""
        return [self._send(stream_calls.summary(one.name)) for one in self._send(stream_calls.streams())]

    def create_stream(self, name: str, partitions: int = 16, **options: Any) -> StreamRecord:
        """Create a stream, with the options of `POST /v1/streams`. Raises `Conflict` when it exists."""
        return self.stream(name).create(partitions, **options)

    def drop_stream(self, name: str, *, force: bool = False) -> None:
        """Drop a stream with its events and groups. Raises `NotFound`, `Conflict` while a group has live members."""
        self.stream(name).drop(force=force)

    def _send(self, call: Call[T]) -> T:
        deadline = time.monotonic() + self._timeout_s
        for attempt in itertools.count():
            try:
                response = self._http.request(
                    call.method, call.path, params=call.params, content=call.content, headers=call.headers
                )
                return call.read(response)
            except httpx.InvalidURL as error:
                raise InvalidInput(f"the server's URL is not valid: {error}") from None
            except (httpx.RequestError, DatabaseUnavailable) as error:
                if not call.repeatable or time.monotonic() > deadline:
                    raise unavailable(error) from error
            time.sleep(pause_after(attempt))
        raise AssertionError
