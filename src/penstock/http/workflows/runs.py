"""Runs of workflows: start, look at, cancel and retry them. A run is a job group too, under /v1/workflows."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from fastapi import Depends, Path, Query
from pydantic import Field

from penstock.core.records import example
from penstock.core.serialization import storable
from penstock.errors import NotFound
from penstock.http import bodies
from penstock.http.errors import missing
from penstock.http.models import Model, Word
from penstock.http.routing import ENQUEUE, READ, Instance, OpenDatabase, RawBody, User, body, router
from penstock.workflows import queries
from penstock.workflows.models import WorkflowRunRecord, WorkflowStepRecord

api = router("workflows")
RunName = Annotated[str, Path(description="Id of the run.", examples=["nightly-2026-01-11"], max_length=255)]
OfWorkflow = Annotated[str | None, Query(description="Only runs of this workflow.")]
Open = Annotated[bool, Query(description="Only those that have not ended.")]
Most = Annotated[int, Query(description="How many at most.", ge=1, le=1_000)]
_EXAMPLE = {
    "workflow": "nightly",
    "steps": [{"name": "extract", "type": "extract"}, {"name": "publish", "type": "publish", "after": ["extract"]}],
}


class NewRun(Model):
    """A run of a workflow to be started; to start it again is the same run."""

    model_config = example(_EXAMPLE)

    workflow: Word = Field(description="Name of the workflow.")
    steps: list[dict[str, Any]] = Field(
        description="Its steps: name, type, after (names of steps before it), when, data, key, priority, run_after, expires_at,"
        " max_attempts, time_limit; or jobs, an array of objects with data and options, of a step of many jobs."
    )
    on_failure: Literal["cancel", "continue"] = Field(
        "continue", description="continue: steps that do not need the one that failed go on."
    )


class Retry(Model):
    """What of a run is to be run again."""

    model_config = example({"from_step": "publish"})

    from_step: str | None = Field(None, description="The step from which on; null: the steps that did not succeed.")
    id: str | None = Field(None, description="Id of the new run; null: that of the run with ~2, ~3 and so on.", max_length=255)


async def _whole(user: User, path: Instance) -> None:
    """A run has steps of any job type, so only users with access to all of them may know of it."""
    user.require_any("the steps of a workflow", path)


async def _run(name: RunName, database: OpenDatabase) -> WorkflowRunRecord:
    try:
        return await queries.find_workflow_run(database, UUID(name))
    except (ValueError, NotFound):
        return await queries.find_workflow_run(database, name)


WHOLE = Depends(_whole)
Run = Annotated[WorkflowRunRecord, Depends(_run)]
NewBody = Annotated[NewRun, body(NewRun, _EXAMPLE)]
RetryBody = Annotated[Retry, body(Retry, {"from_step": "publish"})]


@api.get("/v1/workflow-runs", dependencies=[READ, WHOLE])
async def list_runs(
    database: OpenDatabase, workflow: OfWorkflow = None, open: Open = False, limit: Most = 50
) -> list[WorkflowRunRecord]:
    """Runs of workflows, latest first."""
    return await queries.workflow_runs(database, workflow, limit, open=open)


@api.post("/v1/workflow-runs/{name:key}/start", dependencies=[ENQUEUE, WHOLE], status_code=201)
async def start_run(name: RunName, new: NewBody, sent: RawBody, database: OpenDatabase, instance: Instance) -> WorkflowRunRecord:
    """Start a run, or find the one of this id. 409 when the id is in use for something else."""
    steps = bodies.field_text(sent, "steps")
    if steps is None:
        raise missing("steps", instance)
    document = {
        "workflow": new.workflow, "steps": orjson.Fragment(storable(steps, "a step")), "on_failure": new.on_failure
    }  # fmt: skip
    return await queries.find_workflow_run(
        database, await queries.start_workflow(database, name, orjson.dumps(document).decode())
    )


@api.get("/v1/workflow-runs/{name:key}", dependencies=[READ, WHOLE])
async def get_run(run: Run) -> WorkflowRunRecord:
    """One run of a workflow."""
    return run


@api.get("/v1/workflow-runs/{name:key}/steps", dependencies=[READ, WHOLE])
async def get_steps(run: Run, database: OpenDatabase) -> list[WorkflowStepRecord]:
    """The steps of a run, each behind those after which it runs, with status and times."""
    return await queries.workflow_steps(database, run.id)


@api.post("/v1/workflow-runs/{name:key}/cancel", dependencies=[ENQUEUE, WHOLE])
async def cancel_run(run: Run, database: OpenDatabase) -> WorkflowRunRecord:
    """Cancel the steps of a run that wait, are queued or run. One that has ended stays as it is."""
    await queries.cancel_group(database, run.id)
    return await queries.find_workflow_run(database, run.id)


@api.post("/v1/workflow-runs/{name:key}/retry", dependencies=[ENQUEUE, WHOLE])
async def retry_run(run: Run, wanted: RetryBody, database: OpenDatabase) -> WorkflowRunRecord:
    """Retry a run that has ended, as a new run, which shares the results of the steps that are not run again."""
    return await queries.find_workflow_run(database, await queries.retry_workflow(database, run.id, wanted.from_step, wanted.id))
