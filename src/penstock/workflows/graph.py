"""Graphs: steps that are put together first and started together, each behind those after which it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, get_args
from uuid import UUID

import orjson

from penstock.core.checks import check_choice, check_many, check_text
from penstock.core.serialization import dump_json
from penstock.core.transactional import fetch_document, in_callers_task
from penstock.errors import InvalidInput
from penstock.jobs.enqueue import aware, own_options
from penstock.jobs.job_type import JobCall, JobType
from penstock.jobs.models import MOST_AFTER, NewJob, When, make_id
from penstock.postgres.context import Context
from penstock.workflows import queries
from penstock.workflows.models import RESULT, OnFailure
from penstock.workflows.step import ResultOf, Step, StepReference
from penstock.workflows.sync import SyncWorkflow

_NOT_OF_STEPS = ("id", "unique", "unique_for", "after", "when", "group")
_HINT = 'For example: nightly.add(load.options(priority=-1), day, after=extracted, step="load").'


class Workflow:
    """A graph of steps, which `Penstock.workflow` makes.

        nightly = app.workflow("nightly")
        rows = nightly.add(extract, "2026-11-22")
        nightly.add(publish, after=rows)
        await nightly.start(id="nightly-2026-11-22")

    A step is a job, or many jobs of one type. It runs when the steps after which it runs have succeeded.
    """

    def __init__(self, context: Context, name: str, on_failure: OnFailure) -> None:
        check_text("name of a workflow", name)
        check_choice("on_failure", on_failure, ["cancel", "continue"])
        self.name = name
        """Name of the workflow."""
        self._context = context
        self._on_failure = on_failure
        self._steps: dict[str, Step] = {}
        self._documents: list[dict[str, Any]] = []

    @property
    def sync(self) -> SyncWorkflow:
        """The blocking half, for threads without an event loop."""
        return SyncWorkflow(self, self._context.background)

    @property
    def steps(self) -> list[Step]:
        """The steps so far, each behind those after which it runs."""
        return list(self._steps.values())

    def add(
        self,
        job: JobType[Any] | JobCall[Any],
        *args: Any,
        after: StepReference | Sequence[StepReference] | None = None,
        when: When | None = None,
        step: str | None = None,
        **kwargs: Any,
    ) -> Step:
        """Add a step that is one job.

        Args:
            job: Its job type, also with options of the job: `load.options(priority=-1)`.
            args: The payload, as for `JobType.enqueue`. Where it is a dict or a list, `Step.result` can stand for a value in it.
            after: Steps, or their names, after which it runs, at most 100; None: it starts at once.
            when: "finished": it runs when these have ended, however they ended. None and "succeeded": when they have succeeded.
            step: Name of the step; None: that of the job type, with a number when there is one already.
            kwargs: The payload by name, as for `JobType.enqueue`.

        Raises:
            InvalidInput: The payload does not fit the job type, a step is not one of this graph, or an argument is not valid.
        """
        type, new = _declared(job)
        data = type.codec.or_empty(type.signature.payload_of(type.name, args, kwargs))
        added = self._added(type, step, None, after, when)
        self._append(added, when, self._document_of(added, new, data))
        return added

    def add_many(
        self,
        job: JobType[Any] | JobCall[Any],
        payloads: Iterable[Any],
        *,
        after: StepReference | Sequence[StepReference] | None = None,
        when: When | None = None,
        step: str | None = None,
    ) -> Step:
        """Add a step of many jobs, up to 100,000. Steps after it run when all of them have ended.

        Args:
            job: Their job type, also with options of the jobs.
            payloads: The payload of each.
            after: See `add`.
            when: See `add`.
            step: See `add`.

        Raises:
            InvalidInput: As for `add`.
        """
        check_many("payloads", payloads, "add_many(load, [1, 2, 3])")
        type, new = _declared(job)
        items = list(payloads)
        added = self._added(type, step, len(items), after, when)
        self._append(added, when, {"jobs": [self._document_of(added, new, data) for data in items]})
        return added

    async def start(self, *, id: str | None = None, connection: Any = None) -> UUID:
        """Start a run of the steps. To start it again with the same id, in any process, is the same run.

        Args:
            id: Id of the run, such as `nightly-2026-11-22`; None: a new one.
            connection: Connection of the caller, in whose transaction to start it; see `Penstock.enqueue`.

        Returns:
            The id of the run as a job group, which `Penstock.workflow_steps` and others take, as they take `id`.

        Raises:
            InvalidInput: The graph has no steps, or the database refuses one.
            Conflict: A job group, or a run of another workflow, has this id.
            NotFound: A job type does not exist.
        """
        run = f"{self.name} {make_id()}" if id is None else id
        check_text("id of a run", run)
        if not self._steps:
            raise InvalidInput(f"workflow {self.name} has no steps", hint="Add some: nightly.add(extract, day)")
        if connection is None or self._context.is_open:
            for type in {step.type.name: step.type for step in self._steps.values()}.values():
                await type.declare_if_allowed()
        document = orjson.dumps({"workflow": self.name, "steps": self._documents, "on_failure": self._on_failure}).decode()
        if connection is not None:
            return await _start_through(connection, run, document)
        return await queries.start_workflow(await self._context.database(), run, document)

    def _added(
        self,
        type: JobType[Any],
        name: str | None,
        jobs: int | None,
        after: StepReference | Sequence[StepReference] | None,
        when: When | None,
    ) -> Step:
        if when is not None:
            check_choice("when", when, get_args(When))
        if when is not None and after is None:
            raise InvalidInput("when is given without after", hint=_HINT)
        given = [] if after is None else [after] if isinstance(after, (Step, str)) else list(after)
        names = list(dict.fromkeys(each.name if isinstance(each, Step) else each for each in given))
        for each in names:
            if not isinstance(each, str) or each not in self._steps:
                raise InvalidInput(
                    f"{each!r:.100} is no step of workflow {self.name}",
                    hint="Add a step behind those after which it runs: a = nightly.add(...); nightly.add(..., after=a)",
                )
        if any(isinstance(each, Step) and self._steps[each.name] is not each for each in given):
            raise InvalidInput(f"a step of another graph is no step of workflow {self.name}")
        if len(names) > MOST_AFTER:
            raise InvalidInput(
                f"a step runs after at most {MOST_AFTER} others, not {len(names)}",
                hint="Make one step of these: parts = nightly.add_many(load, [...]); nightly.add(report, after=parts)",
            )
        if name is not None:
            check_text("name of a step", name)
            if not name:
                raise InvalidInput("the name of a step is empty", hint="Leave step out: it is called as its job type.")
            if name in self._steps:
                raise InvalidInput(f"two steps of workflow {self.name} have the name {name}", hint="Give each its own: step=...")
        return Step(self._free(type.name) if name is None else name, type, jobs, tuple(names))

    def _free(self, name: str) -> str:
        number = 1
        while (found := name if number == 1 else f"{name}-{number}") in self._steps:
            number += 1
        return found

    def _append(self, step: Step, when: When | None, document: dict[str, Any]) -> None:
        self._steps[step.name] = step
        self._documents.append({
            "name": step.name, "type": step.type.name, **({"after": step.after} if step.after else {}),
            **({"when": when} if when == "finished" else {}), **document,
        })  # fmt: skip

    def _document_of(self, step: Step, new: NewJob, data: Any) -> dict[str, Any]:
        """A job of a step as SQL takes it."""
        for name in _NOT_OF_STEPS:
            if getattr(new, name) is not None:
                raise InvalidInput(f"a step takes no option {name}", hint=_HINT)
        named: list[str] = []
        plain = _with_references(data, named)
        key = new.key
        if key is None and step.type.key_of is not None:
            if named:
                raise InvalidInput(
                    f"the key of a job of {step.type.name} comes from its payload, which names results",
                    hint="Give the step its key: nightly.add(load.options(key=...), ...).",
                )
            key = step.type.key_of(data)
        text = self._with_results(step, plain, named) if named else step.type.codec.dump(data)
        options = {
            "key": key,
            "priority": new.priority or None,
            "run_after": _moment("run_after", new.run_after),
            "expires_at": _moment("expires_at", new.expires_at),
            **(own_options(new) or {}),
        }
        return {"data": orjson.Fragment(text), **{name: value for name, value in options.items() if value is not None}}

    def _with_results(self, step: Step, plain: Any, named: Sequence[str]) -> str:
        """A payload that names results, which its type cannot check before they are there."""
        if step.type.declared.encrypted:
            raise InvalidInput(
                f"the payload of {step.type.name} is encrypted, and cannot name results",
                hint="Let its handler read the result: (await app.find(job)).result",
            )
        before = self._before(step.after)
        for name in named:
            if name not in before:
                raise InvalidInput(
                    f"step {step.name} takes the result of step {name}, and does not run after it", hint=f'Give after="{name}".'
                )
        return dump_json(plain, step.type.name)

    def _before(self, after: Iterable[str]) -> set[str]:
        found: set[str] = set()
        left = list(after)
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += self._steps[name].after
        return found


@in_callers_task
async def _start_through(connection: Any, run: str, document: str) -> UUID:
    """Start a run in the caller's transaction."""
    rows = await fetch_document(connection, queries.START, run, document)
    found = rows[0][0]
    return found if isinstance(found, UUID) else UUID(str(found))


def _declared(job: Any) -> tuple[JobType[Any], NewJob]:
    if isinstance(job, JobCall):
        if job.connection is not None:
            raise InvalidInput("a step takes no option connection", hint="Give it to start: nightly.start(connection=...)")
        return job.type, job.given
    if not isinstance(job, JobType):
        raise InvalidInput(f"a step is a job of a declared type, not {job!r:.100}", hint=_HINT)
    return job, NewJob()


def _with_references(data: Any, named: list[str]) -> Any:
    """The payload with its references to results as JSON; `named` gets the names of the steps."""
    if isinstance(data, ResultOf):
        named.append(data.step)
        return {RESULT: data.step}
    if isinstance(data, Mapping):
        return {name: _with_references(value, named) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_with_references(value, named) for value in data]
    return data


def _moment(what: str, time: Any) -> Any:
    """A time as JSON for SQL: text, or seconds from now."""
    checked = aware(what, time)
    if isinstance(checked, timedelta):
        return checked.total_seconds()
    return None if checked is None else checked.isoformat()
