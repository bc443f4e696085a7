"""The calls of the HTTP API about jobs, job types, workers and schedules. What the clients send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, urlsplit
from uuid import UUID

import httpx
import orjson

from penstock.client.answers import json_of, outcomes_of, reader, record_of, time_of
from penstock.client.call import Call, at, outside, quoted
from penstock.core.records import from_object
from penstock.core.serialization import dump_json
from penstock.errors import InvalidInput, JobFailed
from penstock.jobs.group_record import JobGroupRecord
from penstock.jobs.http_models import Claimed, ClaimedJobs, Result
from penstock.jobs.models import OWN_FIELDS, Enqueued, EnqueueOutcome, GroupReference, NewJob, group_id, jobs_after, make_id
from penstock.jobs.records import HandlerRecord, JobCounts, JobRecord, JobTypeRecord, Status, Why, parse_id
from penstock.jobs.steps import StepRecord
from penstock.jobs.top import TopRecord, check_top
from penstock.schedules.schedule import ScheduleRecord, ScheduleRun
from penstock.worker.findings import Finding
from penstock.worker.fleets import FleetRecord, WorkerRecord
from penstock.worker.leader import LeaderRecord
from penstock.worker.overview import Overview
from penstock.workflows.models import OnFailure, WorkflowRunRecord, WorkflowStepRecord

T = TypeVar("T")
_BATCH = 10_000
Page: TypeAlias = "tuple[list[JobRecord], Call[Page] | None]"


def enqueue(name: str, new: NewJob) -> Call[Enqueued]:
    """A PUT. The id is made here, so that it can be repeated."""
    new_id = make_id() if new.id is None else parse_id(new.id)
    return new_receipt("PUT", f"/v1/jobs/{quoted(name)}/job_{new_id}", new_id, body_of(new))


def new_receipt(method: str, path: str, id: UUID, body: dict[str, Any]) -> Call[Enqueued]:
    """A call that enqueues one job under an id."""

    def parse(response: httpx.Response) -> Enqueued:
        if response.status_code == 400:
            return Enqueued(id, EnqueueOutcome.ARCHIVED)
        return Enqueued(parse_id(json_of(response)["id"]), EnqueueOutcome(response.headers.get("penstock-outcome", "queued")))

    return _Put(method, path, parse, body)


class _Put(Call[Enqueued]):
    """That a job is finished already is an answer, not an error."""

    __slots__ = ()

    def read(self, response: httpx.Response) -> Enqueued:
        """See `Call`."""
        if response.status_code == 400 and b'"job_already_archived"' in response.content:
            return self.parse(response)
        return Call.read(self, response)


def enqueue_many(name: str, new: Iterable[Any]) -> Iterator[Call[list[Enqueued]]]:
    """Batches."""
    batch: list[NewJob] = []
    for item in new:
        job = item if isinstance(item, NewJob) else NewJob(item)
        id = make_id() if job.id is None else parse_id(job.id)
        batch.append(replace(job, id=id))
        if len(batch) == _BATCH:
            yield _batch(name, batch)
            batch = []
    if batch:
        yield _batch(name, batch)


def _batch(name: str, batch: list[NewJob]) -> Call[list[Enqueued]]:
    def parse(response: httpx.Response) -> list[Enqueued]:
        found = outcomes_of(response, "job", len(batch))
        return [Enqueued(parse_id(outcome["id"]), EnqueueOutcome(outcome["outcome"])) for outcome in found]

    return Call("POST", f"/v1/jobs/{quoted(name)}/batch", parse, lines=b"\n".join(map(_line, batch)))


def _line(job: NewJob) -> bytes:
    fields = {"id": f"job_{job.id}", "data": orjson.Fragment(dump_json(job.data, "the job"))}
    return orjson.dumps(fields | _options(job))


def body_of(job: NewJob) -> dict[str, Any]:
    """A job as the body of a request, without its id."""
    return {"data": orjson.Fragment(dump_json({} if job.data is None else job.data, "the job"))} | _options(job)


def _options(job: NewJob) -> dict[str, Any]:
    fields: dict[str, Any] = {"key": job.key, "priority": job.priority or None, "unique": job.unique}
    fields |= {"run_after": at("run_after", job.run_after), "expires_at": at("expires_at", job.expires_at)}
    for name, value in job.own.items():
        if name == "group":
            value = str(group_id(value))
        elif name == "after":
            value = [f"job_{id}" for id in jobs_after(value)]
        fields[OWN_FIELDS[name]] = value.total_seconds() if isinstance(value, timedelta) else value
    return {name: value for name, value in fields.items() if value is not None}


def find(id: UUID | str, wait_s: float = 0.0) -> Call[JobRecord]:
    """One job."""
    params = {"details": "true"} | ({"wait": f"{wait_s:.3f}s"} if wait_s > 0 else {})
    return Call("GET", f"/v1/jobs/job_{parse_id(id)}", reader(JobRecord), params=params)


def why(id: UUID | str) -> Call[Why]:
    """Why a job waits."""

    def parse(response: httpx.Response) -> Why:
        job = json_of(response)
        if job["why"] is not None:
            return from_object(Why, job["why"])
        reason, message = (
            ("running", f"It runs on {job['worker']}.")
            if job["status"] == "in-progress"
            else ("finished", f"It is finished: {job['status']}.")
        )
        started, finished = time_of(job["started_at"]), time_of(job["finished_at"])
        return Why(reason, message, started, finished, None, job["worker"], None, None, None, time_of(job["expires_at"]))

    return Call("GET", f"/v1/jobs/job_{parse_id(id)}", parse, params={"details": "true"})


def find_many(
    name: str | None,
    status: Status | str | None,
    key: str | None,
    reason: str | None = None,
    workflow: GroupReference | None = None,
) -> list[Call[Page]]:
    """The first pages of the lists that can have such jobs."""
    wanted = None if status is None else str(status)
    of = None if workflow is None else str(group_id(workflow, "workflow"))
    given = {"name": name, "status": wanted, "key": key, "reason": reason, "workflow": of, "details": "true"}
    params = {field: value for field, value in given.items() if value is not None}
    queued, archived = (Call("GET", f"/v1/{kind}-jobs", _page, params=params) for kind in ("queued", "archived"))
    if reason is not None:
        return [archived]
    if wanted is None:
        return [queued, archived]
    return [queued] if wanted in (Status.WAITING, Status.QUEUED, Status.IN_PROGRESS) else [archived]


def _page(response: httpx.Response) -> Page:
    records = record_of(list[JobRecord], response)
    following = response.links.get("next", {}).get("url")
    if following is None:
        return records, None
    parts = urlsplit(following)
    return records, Call("GET", parts.path, _page, params=dict(parse_qsl(parts.query)))


def latest(records: list[JobRecord], limit: int) -> list[JobRecord]:
    """The latest of jobs from several lists."""
    return sorted(records, key=lambda job: (job.finished_at or job.created_at, job.id), reverse=True)[:limit]


def succeeded(record: JobRecord) -> JobRecord:
    """The same job. Raises `JobFailed` when it ended without success."""
    if record.status is not Status.SUCCEEDED:
        message = record.errors[-1].get("message") if record.errors else None
        raise JobFailed(f"job {record.id} {record.status}" + (f": {message}" if message else ""))
    return record


def result(name: str, id: UUID | str, wait_s: float) -> Call[Result]:
    """What became of a job."""
    params = {"wait": f"{wait_s:.3f}s"} if wait_s > 0 else {}
    return Call("GET", f"/v1/jobs/{quoted(name)}/job_{parse_id(id)}/result", reader(Result), params=params)


def cancel(id: UUID | str) -> Call[str]:
    """Cancel."""
    return Call("POST", f"/v1/jobs/job_{parse_id(id)}/cancel", lambda response: str(json_of(response)["status"]))


def signal(id: UUID | str, name: str, value: Any) -> Call[bool]:
    """Signal. It can be repeated: the first one of a name counts, and the repeated one may be told that it was not the first."""
    return Call(
        "POST",
        f"/v1/jobs/job_{parse_id(id)}/signals/{quoted(name)}",
        lambda response: bool(json_of(response)["first"]),
        {"value": orjson.Fragment(dump_json(value, f"the signal {name}"))},
        repeatable=False,
    )


def steps(id: UUID | str, after: str | None, limit: int) -> Call[list[StepRecord]]:
    """A page of the durable steps of a job."""
    params = {"limit": str(limit)} | ({} if after is None else {"after": after})
    return Call("GET", f"/v1/jobs/job_{parse_id(id)}/steps", reader(list[StepRecord]), params=params)


def set_priority(id: UUID | str, priority: int) -> Call[bool]:
    """Another priority."""
    body = {"priority": priority}
    return Call("POST", f"/v1/jobs/job_{parse_id(id)}/priority", lambda response: bool(json_of(response)["changed"]), body)


def run_now(id: UUID | str) -> Call[bool]:
    """Make a deferred job due."""
    return Call("POST", f"/v1/jobs/job_{parse_id(id)}/run-now", lambda response: bool(json_of(response)["changed"]))


def replay(id: UUID | str, new_id: UUID | str | None, data: Any = None, force: bool = False) -> Call[Enqueued]:
    """Replay; the id of the copy is made here, so that it can be repeated."""
    copy = make_id() if new_id is None else parse_id(new_id)
    return Call(
        "POST",
        f"/v1/jobs/job_{parse_id(id)}/replay",
        lambda response: Enqueued(parse_id(json_of(response)["id"]), EnqueueOutcome.QUEUED),
        None if data is None else {"data": orjson.Fragment(dump_json(data, "the copy"))},
        params={"new_id": f"job_{copy}", "force": str(force).lower()},
    )


def record_status(
    name: str, id: UUID | str, attempt: int, status: Status | str, retryable: bool, result: Any, error: Any
) -> Call[None]:
    """A callback. Not repeated: the second one would be refused."""
    body = {"status": str(status), "attempt": attempt, "retryable": retryable, "result": result, "error": error}
    return Call("POST", f"/v1/jobs/{quoted(name)}/job_{parse_id(id)}", lambda _: None, body, repeatable=False)


def job_types() -> Call[list[JobTypeRecord]]:
    """All types."""
    return Call("GET", "/v1/jobs", reader(list[JobTypeRecord]))


def leaders() -> Call[list[LeaderRecord]]:
    """The tasks of the leader."""
    return Call("GET", "/v1/leaders", reader(list[LeaderRecord]))


def doctor() -> Call[list[Finding]]:
    """What is wrong."""
    return Call("GET", "/v1/doctor", reader(list[Finding]))


def workers() -> Call[list[WorkerRecord]]:
    """The workers."""
    return Call("GET", "/v1/workers", reader(list[WorkerRecord]))


def overview() -> Call[Overview]:
    """How everything is doing."""
    return Call("GET", "/v1/overview", reader(Overview))


def drain_worker(id: str) -> Call[str]:
    """Let a worker of a fleet stop."""
    return Call("POST", f"/v1/workers/{quoted(id)}/drain", lambda response: str(json_of(response)["fleet"]))


def fleets() -> Call[list[FleetRecord]]:
    """The fleets."""
    return Call("GET", "/v1/fleets", reader(list[FleetRecord]))


def drain_fleet(name: str) -> Call[None]:
    """Let the workers of a fleet stop."""
    return Call("POST", f"/v1/fleets/{quoted(name)}/drain", lambda _: None)


def handlers() -> Call[list[HandlerRecord]]:
    """What workers say of their handlers."""
    return Call("GET", "/v1/handlers", reader(list[HandlerRecord]))


def create_job_type(name: str, options: dict[str, Any]) -> Call[JobTypeRecord]:
    """Create a type."""
    strategy = options.get("delivery_strategy", "at_least_once")
    body = {"delivery_strategy": strategy, "max_attempts": 1 if strategy == "at_most_once" else 5, "concurrency": None}
    body |= outside(options) | {"name": name}
    return Call("POST", "/v1/jobs", reader(JobTypeRecord), body, {"details": "true"}, repeatable=False)


def change_job_type(name: str, options: dict[str, Any]) -> Call[JobTypeRecord]:
    """Change a type."""
    return Call("PATCH", f"/v1/jobs/{quoted(name)}", reader(JobTypeRecord), outside(options))


def drop_job_type(name: str, force: bool) -> Call[None]:
    """Drop a type. Not repeated: the second time it is not there."""
    return Call("DELETE", f"/v1/jobs/{quoted(name)}", lambda _: None, params={"force": "true"} if force else {}, repeatable=False)


def job_groups(open: bool, limit: int) -> Call[list[JobGroupRecord]]:
    """Job groups, latest first."""
    params = {"limit": str(limit)} | ({"open": "true"} if open else {})
    return Call("GET", "/v1/workflows", reader(list[JobGroupRecord]), params=params)


def find_group(group: UUID | str) -> Call[JobGroupRecord]:
    """One job group."""
    return Call("GET", f"/v1/workflows/{quoted(str(group))}", reader(JobGroupRecord))


def open_group(
    name: str, then: str | None, then_data: Any, then_key: str | None, on_failure: OnFailure, parent: UUID | None
) -> Call[JobGroupRecord]:
    """Open a job group."""
    body = {
        "name": name, "then": then, "then_data": then_data, "then_key": then_key, "on_failure": on_failure,
        "parent": parent and str(parent),
    }  # fmt: skip
    return Call("POST", "/v1/workflows", reader(JobGroupRecord), body)


def change_group(group: UUID | str, change: str) -> Call[JobGroupRecord]:
    """Seal or cancel a job group."""
    return Call("POST", f"/v1/workflows/{quoted(str(group))}/{change}", reader(JobGroupRecord), {})


def start_workflow(run: str, workflow: str, steps: list[dict[str, Any]], on_failure: OnFailure) -> Call[WorkflowRunRecord]:
    """Start a run of a workflow."""
    body = {"workflow": workflow, "steps": steps, "on_failure": on_failure}
    return Call("POST", f"/v1/workflow-runs/{quoted(run)}/start", reader(WorkflowRunRecord), body)


def workflow_runs(workflow: str | None, open: bool, limit: int) -> Call[list[WorkflowRunRecord]]:
    """Runs of workflows, latest first."""
    params = {"limit": str(limit)} | ({"open": "true"} if open else {}) | ({} if workflow is None else {"workflow": workflow})
    return Call("GET", "/v1/workflow-runs", reader(list[WorkflowRunRecord]), params=params)


def find_workflow_run(run: UUID | str) -> Call[WorkflowRunRecord]:
    """One run of a workflow."""
    return Call("GET", f"/v1/workflow-runs/{quoted(str(run))}", reader(WorkflowRunRecord))


def workflow_steps(run: UUID | str) -> Call[list[WorkflowStepRecord]]:
    """The steps of a run."""
    return Call("GET", f"/v1/workflow-runs/{quoted(str(run))}/steps", reader(list[WorkflowStepRecord]))


def cancel_workflow(run: UUID | str) -> Call[WorkflowRunRecord]:
    """Cancel a run."""
    return Call("POST", f"/v1/workflow-runs/{quoted(str(run))}/cancel", reader(WorkflowRunRecord), {})


def retry_workflow(run: UUID | str, from_step: str | None, id: str | None) -> Call[WorkflowRunRecord]:
    """Retry a run."""
    body = {"from_step": from_step, "id": id}
    return Call("POST", f"/v1/workflow-runs/{quoted(str(run))}/retry", reader(WorkflowRunRecord), body)


def list_schedules() -> Call[list[ScheduleRecord]]:
    """All schedules."""
    return Call("GET", "/v1/schedules", reader(list[ScheduleRecord]))


def schedule_runs(name: str, status: Status | str | None, limit: int) -> Call[list[ScheduleRun]]:
    """The last runs of a schedule."""
    params = {"limit": str(limit)} | ({} if status is None else {"status": str(status)})
    return Call("GET", f"/v1/schedules/{quoted(name)}/runs", reader(list[ScheduleRun]), params=params)


def run_schedule(name: str, key: str | None) -> Call[UUID | None]:
    """Run a schedule now. Not repeated: the second time its run may not have ended."""

    def parse(response: httpx.Response) -> UUID | None:
        id = json_of(response)["job_id"]
        return None if id is None else parse_id(id)

    return Call("POST", f"/v1/schedules/{quoted(name)}/run", parse, {} if key is None else {"key": key}, repeatable=False)


def drop_schedule(name: str) -> Call[None]:
    """Drop a schedule. Not repeated: the second time it is not there."""
    return Call("DELETE", f"/v1/schedules/{quoted(name)}", lambda _: None, repeatable=False)


def pause(name: str) -> Call[None]:
    """Pause a type."""
    return Call("POST", f"/v1/jobs/{quoted(name)}/pause", lambda _: None)


def resume(name: str) -> Call[None]:
    """Resume a type."""
    return Call("POST", f"/v1/jobs/{quoted(name)}/resume", lambda _: None)


def counts() -> Call[list[JobCounts]]:
    """Statistics."""
    return Call("GET", "/v1/stats", reader(list[JobCounts]))


def top(by: str, order: str, name: str | None, limit: int) -> Call[list[TopRecord]]:
    """What fills the queue."""
    check_top(by, order, name, limit)
    params = {"order": order, "limit": str(limit)} | ({} if name is None else {"name": name})
    return Call("GET", f"/v1/top/{by}", reader(list[TopRecord]), params=params)


def claim(name: str, worker: str, limit: int, wait_s: float) -> Call[list[Claimed]]:
    """Claim. Not repeated: what a lost answer gave would be claimed twice as much."""
    body: dict[str, Any] = {"worker": worker, "limit": limit} | ({"wait": f"{wait_s:.3f}s"} if wait_s > 0 else {})

    def parse(response: httpx.Response) -> list[Claimed]:
        return record_of(ClaimedJobs, response).jobs

    return Call("POST", f"/v1/jobs/{quoted(name)}/claim", parse, body, repeatable=False)


def extend(jobs: Sequence[Claimed], duration: timedelta | None) -> Call[dict[UUID, int]]:
    """Extend leases of jobs of one type. Not repeated: the first time already made the lease another one."""
    if len({job.name for job in jobs}) != 1:
        raise InvalidInput("extend takes jobs of one type", hint="Call it once for each type.")
    body = {"jobs": [_held(job) for job in jobs], "for_s": None if duration is None else duration.total_seconds()}
    path = f"/v1/jobs/{quoted(jobs[0].name)}/extend"

    def parse(response: httpx.Response) -> dict[UUID, int]:
        return {parse_id(id): lease for id, lease in json_of(response)["leases"].items()}

    return Call("POST", path, parse, body, repeatable=False)


def settle(job: Claimed, outcome: str, result: Any, error: Any, retry_after: timedelta | None) -> Call[str]:
    """Settle one job."""
    one = _held(job) | {"outcome": outcome, "result": result, "error": error}
    if retry_after is not None:
        one["retry_after_s"] = retry_after.total_seconds()
    return Call(
        "POST",
        f"/v1/jobs/{quoted(job.name)}/settle",
        lambda response: str(next(iter(json_of(response)["outcomes"].values()))),
        {"jobs": [one]},
    )


def heartbeat(worker: str, fields: dict[str, Any]) -> Call[dict[str, Any]]:
    """A heartbeat."""
    return Call("POST", f"/v1/workers/{quoted(worker)}/heartbeat", json_of, fields)


def unregister(worker: str) -> Call[None]:
    """The end of a worker."""
    return Call("DELETE", f"/v1/workers/{quoted(worker)}", lambda _: None)


def _held(job: Claimed) -> dict[str, Any]:
    return {"id": f"job_{job.id}", "attempt": job.attempt, "lease": job.lease}
