"""One typed function for each SQL function about workflows. No logic beyond converting rows to models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple
from uuid import UUID

from penstock.core.checks import check_text
from penstock.errors import InvalidInput, NotFound
from penstock.jobs import workflow_ticks
from penstock.jobs.group_record import JobGroupRecord
from penstock.jobs.steps import StepRecord
from penstock.postgres.database import Database
from penstock.workflows.models import OnFailure, WorkflowRunRecord, WorkflowStepRecord

START = """
    select penstock.start_workflow(given.workflow, {0}, given.steps, given.on_failure)
    from jsonb_to_record(cast({1} as jsonb)) as given (workflow text, steps jsonb, on_failure text)
"""
"""Starts a run. It has the two parameters that every driver can send: the id of the run, and a document with the rest."""


@dataclass(frozen=True, slots=True)
class StuckDependency:
    """A job of the type `name` that waits for the end of another one, of which no tick will tell."""

    job: UUID
    name: str
    after: UUID


async def stuck_dependencies(database: Database) -> list[StuckDependency]:
    """Up to ten jobs that wait for the end of one that has ended, or does not exist, although no tick says so."""
    return [StuckDependency(*row) for row in await database.fetch("select * from penstock.stuck_dependencies()")]


@dataclass(frozen=True, slots=True)
class EndlessWait:
    """What waits for long, and has no time at which that ends: a job of the type `name` that waits for the signal `waits_for`
    ("signal"), or the job group `name`, which is not sealed ("group").
    """

    kind: Literal["signal", "group"]
    id: UUID
    name: str
    waits_for: str | None
    since: datetime


async def endless_waits(database: Database, longer_than: timedelta) -> list[EndlessWait]:
    """Up to 1,000 jobs and 1,000 job groups that have waited for longer, of the oldest."""
    statement = "select * from penstock.endless_waits(penstock.clock() - $1::interval)"
    return [EndlessWait(*row) for row in await database.fetch(statement, longer_than)]


async def resolve(database: Database, *, if_due: bool = False) -> int | None:
    """Release or cancel what waited for jobs that have ended.

    `if_due` leaves ends of children from which nothing follows but the numbers of their group for a later call.

    Returns how much was done: 0 when nothing is left for now; None when another transaction is doing it.
    """
    done: int | None = await database.fetchval("select penstock.resolve_workflows(p_if_due => $1)", if_due)
    return done


@dataclass(frozen=True, slots=True)
class NewGroup:
    """What opens a job group; `then_data` is JSON text as it is stored."""

    name: str
    then: str | None
    then_data: str
    on_failure: OnFailure
    parent: UUID | None
    then_key: str | None = None


def _columns(new: NewGroup) -> tuple[Any, ...]:
    return new.name, new.then, new.then_data, new.on_failure, new.parent, new.then_key


async def open_group(database: Database, new: NewGroup) -> UUID:
    """Open a job group, or find the one of this name. Raises `Conflict` when that has other options, `NotFound`."""
    opened: UUID = await database.fetchval(
        "select penstock.open_group($1, $2, $3::jsonb, $4, $5, $6)", *_columns(new), retry=True
    )
    return opened


async def fill_group(database: Database, new: NewGroup, job: UUID, lease: int) -> tuple[UUID, UUID | None]:
    """Open a job group which the handler of a job fills that is held under this lease.

    Returns its id, and what the ids of its children follow from; None: the job is in another database. Raises `Conflict` when the
    job is not held any more, and as `open_group` does.
    """
    row = await database.fetchrow(
        "select opened.id, penstock.fill_group(opened.id, $7, $8) as seed"
        " from penstock.open_group($1, $2, $3::jsonb, $4, $5, $6) as opened (id)",
        *_columns(new),
        job,
        lease,
        retry=True,
    )
    return row["id"], row["seed"]


async def seal_filled_group(database: Database, id: UUID, job: UUID, lease: int) -> None:
    """Seal the group that the handler of a job has filled. Raises `Conflict` when the job is not held any more: the handler that
    holds it adds children still.
    """
    await database.fetch("select penstock.fill_group($1, $2, $3), penstock.seal_group($1)", id, job, lease, retry=True)


async def seal_group(database: Database, id: UUID) -> None:
    """Say that no more children come from outside. Raises `NotFound`."""
    await database.fetch("select penstock.seal_group($1)", id, retry=True)


async def cancel_group(database: Database, id: UUID) -> None:
    """Cancel the children of a job group, and its `then`. Raises `NotFound`."""
    await database.fetch("select penstock.cancel_group($1)", id, retry=True)


async def groups(database: Database, limit: int, *, open: bool) -> list[JobGroupRecord]:
    """Job groups, latest first: all, or only those that have not ended."""
    return [JobGroupRecord(*row) for row in await database.fetch("select * from penstock.group_list($1, $2)", limit, open)]


def _id_or_name(what: str, wanted: UUID | str) -> tuple[UUID | None, str | None]:
    if isinstance(wanted, UUID):
        return wanted, None
    if not isinstance(wanted, str):
        raise InvalidInput(f"{what} is found by its id or name, not by {wanted!r:.100}", hint="Give its id, such as group.id.")
    check_text(f"the name of {what}", wanted)
    return None, wanted


async def find_group(database: Database, wanted: UUID | str) -> JobGroupRecord:
    """A job group by its id or its name. Raises `NotFound`."""
    id, name = _id_or_name("a job group", wanted)
    row = await database.fetchrow("select * from penstock.group_list(1, false, $1, $2)", id, name)
    if row is None:
        raise NotFound(f"no such job group: {wanted}", hint="See: penstock workflows list")
    return JobGroupRecord(*row)


async def group_of(database: Database, job: UUID) -> JobGroupRecord | None:
    """The job group of a job, of the `then` of one that group; None: it is in none, or the group was pruned."""
    row = await database.fetchrow(
        "select found.* from penstock.group_of($1) as of_job (id)"
        " cross join lateral penstock.group_list(1, false, of_job.id) as found where of_job.id is not null",
        job,
        retry=True,
    )
    return None if row is None else JobGroupRecord(*row)


_STEPS_OF_A_PAGE = 1_000
MOST_RESULTS = 32
"""Results that one call of `kept_results` reads at most."""


async def kept_steps(database: Database, ids: Sequence[UUID]) -> list[Any]:
    """The durable steps of jobs, with results of up to 8 KiB: the columns of the SQL function. Read in parts of 1,000."""
    rows: list[Any] = []
    after: tuple[UUID | None, str | None] = (None, None)
    while True:
        page = await database.fetch("select * from penstock.kept_steps($1, $2, $3)", ids, *after, retry=True)
        rows += page
        if len(page) < _STEPS_OF_A_PAGE:
            return rows
        after = page[-1]["id"], page[-1]["name"]


async def kept_results(database: Database, wanted: Sequence[tuple[UUID, str]]) -> list[str | None]:
    """The results of these steps of jobs, as they are stored, each by the job and its name; None: there is none. At most 32."""
    found: list[str | None] = [None] * len(wanted)
    statement = "select place, result from penstock.kept_results($1, $2)"
    for row in await database.fetch(statement, [id for id, _ in wanted], [name for _, name in wanted], retry=True):
        found[row["place"] - 1] = row["result"]
    return found


async def steps_shown(
    database: Database, job: UUID, most: int | None = None, after: str | None = None, limit: int = 1_000
) -> list[StepRecord]:
    """A page of the durable steps of a job. `result` is JSON text as it is stored; of `most` bytes in all, and None beyond."""
    rows = await database.fetch("select * from penstock.steps_shown($1, $2, $3, $4)", job, most, after, limit, retry=True)
    return [StepRecord(*row) for row in rows]


class StepResult(NamedTuple):
    """The result of a step of a job that is held under this lease, as it is stored."""

    id: UUID
    lease: int
    name: str
    result: str


async def write_steps(database: Database, results: Sequence[StepResult]) -> list[str]:
    """Keep the results of steps.

    Returns for each "written", "known" (there is one of this name already), "stale", or "busy" (another transaction has locked
    the job).
    """
    rows = await database.fetch(
        "select outcome from penstock.write_steps($1, $2::bigint[], $3, $4::jsonb[], false)",
        [one.id for one in results],
        [one.lease for one in results],
        [one.name for one in results],
        [one.result for one in results],
        retry=True,
    )
    return [row["outcome"] for row in rows]


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of a job that is held under this lease; `span` is how long it sleeps, or waits at most."""

    id: UUID
    lease: int
    kind: Literal["sleep", "wait", "gather"]
    name: str
    span: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """What has become of a wait: see `penstock.begin_waits` for the states. `value` is JSON text as it is stored."""

    state: str
    value: str | None
    group: UUID | None


async def begin_waits(database: Database, waits: Sequence[Wait]) -> list[Waiting]:
    """Begin to wait, or go on. Raises `Conflict` for a job of an at_most_once type."""
    rows = await database.fetch(
        "select state, value, job_group from penstock.begin_waits($1, $2::bigint[], $3, $4, $5)",
        [one.id for one in waits],
        [one.lease for one in waits],
        [one.kind for one in waits],
        [one.name for one in waits],
        [one.span for one in waits],
        retry=True,
    )
    return [Waiting(*row) for row in rows]


async def child_ids(database: Database, id: UUID, lease: int, name: str, types: Sequence[str]) -> list[UUID] | None:
    """The ids of the children of a step, of these types: the same in each run. None: the job is not held under the lease."""
    query = "select penstock.child_ids($1, $2, $3, $4)"
    ids: list[UUID] | None = await database.fetchval(query, id, lease, name, types, retry=True)
    return ids


async def signal(database: Database, id: UUID, name: str, value: str) -> bool:
    """Send a signal to a job, JSON text as it is stored. Returns whether it was the first. Raises `NotFound`, `Conflict`."""
    first = bool(await database.fetchval("select penstock.signal($1, $2, $3::jsonb)", id, name, value))
    if first:
        workflow_ticks.tell(database)
    return first


async def start_workflow(database: Database, run: str, document: str) -> UUID:
    """Start a run, or find the one of this id. Raises `InvalidInput`, `Conflict`, `NotFound`."""
    started: UUID = await database.fetchval(START.format("$1", "$2::text"), run, document, retry=True)
    return started


async def retry_workflow(database: Database, id: UUID, from_step: str | None, run: str | None) -> UUID:
    """Retry a run that has ended, as a new run. Raises `NotFound`, `InvalidInput`, `Conflict`."""
    started: UUID = await database.fetchval("select penstock.retry_workflow($1, $2, $3)", id, from_step, run, retry=True)
    return started


async def workflow_runs(database: Database, workflow: str | None, limit: int, *, open: bool) -> list[WorkflowRunRecord]:
    """Runs of a workflow, or of all, latest first: all, or only those that have not ended."""
    rows = await database.fetch("select * from penstock.workflow_runs($1, $2, $3)", limit, open, workflow)
    return [WorkflowRunRecord(*row) for row in rows]


async def find_workflow_run(database: Database, wanted: UUID | str) -> WorkflowRunRecord:
    """A run by its id as a job group, or by the id that was given at its start. Raises `NotFound`."""
    id, name = _id_or_name("a run of a workflow", wanted)
    row = await database.fetchrow("select * from penstock.workflow_runs(1, false, null, $1, $2)", id, name)
    if row is None:
        raise NotFound(f"no such run of a workflow: {wanted}", hint="See: penstock workflows list")
    return WorkflowRunRecord(*row)


async def workflow_steps(database: Database, id: UUID) -> list[WorkflowStepRecord]:
    """The steps of a run, each behind those after which it runs."""
    return [WorkflowStepRecord(*row) for row in await database.fetch("select * from penstock.workflow_steps($1)", id)]


async def step_results(database: Database, job: UUID, names: list[str]) -> list[tuple[str, str, UUID, str | None]]:
    """Results of steps of the run of a running job: name and job type of each step, its job, and its result as JSON text."""
    statement = "select name, type, job, result::text from penstock.step_results($1, $2)"
    rows = await database.fetch(statement, job, names, retry=True)
    return [(row["name"], row["type"], row["job"], row["result"]) for row in rows]
