"""What the page of a job group shows of it when it is a run of a workflow: the graph, the table of its steps, and its signals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from penstock.errors import NotFound
from penstock.http.dashboard import queries
from penstock.http.dashboard.queries import SignalledStep
from penstock.http.dashboard.run_graph import RunGraph, graph_of, jobs_page, took_of
from penstock.http.dashboard.view import View
from penstock.postgres.database import Database
from penstock.workflows import queries as workflows
from penstock.workflows.models import WorkflowRunRecord, WorkflowStepRecord

_ROWS = 500
_SIGNALS = 20
# Which steps the table of a run has when there are more of them than rows.
_ORDER = {"failed": 0, "expired": 1, "in-progress": 2, "running": 2, "queued": 3, "waiting": 4, "cancelled": 5}


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it was read."""

    record: WorkflowRunRecord
    steps: list[WorkflowStepRecord]
    signalled: list[SignalledStep]


@dataclass(frozen=True, slots=True)
class Row:
    """A step in the table: the names of the steps after which it runs, its page, its time, its error as the user may see it."""

    step: WorkflowStepRecord
    after: list[str]
    page: str
    took_s: float | None
    error: str | None


@dataclass(frozen=True, slots=True)
class ShownRun:
    """A run as the page shows it. `names`: steps from which on it can be run again; none where they are too many for a list."""

    record: WorkflowRunRecord
    graph: RunGraph | None
    rows: list[Row]
    names: list[str]
    left_out: int
    signalled: list[SignalledStep]


async def read_run(database: Database, group: UUID) -> Run | None:
    """A run with its steps; None: the group is no run."""
    try:
        record = await workflows.find_workflow_run(database, group)
    except NotFound:
        return None
    signalled = [] if record.finished_at is not None else await queries.signalled_steps(database, group, _SIGNALS)
    return Run(record, await workflows.workflow_steps(database, group), signalled)


def shown_run(view: View, run: Run) -> ShownRun:
    """A run as the user may see it."""
    names = {step.place: step.name for step in run.steps}
    rows = [
        Row(
            step, [names[place] for place in step.after], jobs_page(step), took_of(step), view.masking.text(step.type, step.error)
        )
        for step in _of_interest(run.steps)
    ]
    left_out = len(run.steps) - len(rows)
    return ShownRun(run.record, graph_of(run.steps), rows, [] if left_out else list(names.values()), left_out, run.signalled)


def _of_interest(steps: Sequence[WorkflowStepRecord]) -> list[WorkflowStepRecord]:
    chosen = sorted(steps, key=lambda step: (_ORDER.get(step.status, len(_ORDER)), step.place))[:_ROWS]
    return sorted(chosen, key=lambda step: step.place)
