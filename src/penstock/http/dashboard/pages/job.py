"""One job: its timeline, errors, payload, result, progress and log, and what can be done with it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from penstock.core.serialization import load_json
from penstock.errors import InvalidInput, NotFound, Unreadable
from penstock.http import bodies
from penstock.http.auth import Role
from penstock.http.dashboard import queries
from penstock.http.dashboard.pages.jobs import allowed_jobs
from penstock.http.dashboard.queries import Surroundings
from penstock.http.dashboard.view import Action, Done, Page, Shown, View, not_here
from penstock.http.jobs.access import job_shown_to, why_shown_to
from penstock.jobs import http_queries
from penstock.jobs import queries as jobs
from penstock.jobs.http_queries import StoredJob
from penstock.jobs.models import make_id
from penstock.jobs.records import Why, parse_id
from penstock.jobs.steps import StepRecord
from penstock.postgres.database import Database
from penstock.workflows import queries as workflows

# A payload that is nested deeply would become a thousand times as long.
_DEEPEST = 24
# Of the durable steps the newest, with results of as many bytes in all.
_STEPS = 200
_ALL_STEPS = 100_000
_MOST_RESULTS = 64 * 1024
_SIGN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


@dataclass(frozen=True, slots=True)
class Step:
    """A step in the life of a job: `kind` is enqueued, deferred, failed, running or how it ended."""

    kind: str
    title: str
    at: datetime | None
    took_s: float | None = None
    worker: str | None = None
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Read:
    """A job, why it waits, its job group, run and trace, the names of the groups that it waits for, and its durable steps."""

    job: StoredJob | None
    why: Why | None
    around: Surroundings
    groups: Mapping[UUID, str]
    durable: Sequence[StepRecord] = ()


async def show(view: View) -> Shown:
    """Everything about one job."""
    read = await _of(view)
    job = read.job
    assert job is not None  # noqa: S101 - _of raises
    masking = view.masking
    return Shown(
        f"Job of {job.name}",
        "job.html",
        {
            "job": job,
            "why": read.why,
            "steps": timeline(view, job),
            "payload": _document(view, job.name, job.data),
            "result": _document(view, job.name, job.result),
            "progress": _document(view, job.name, job.progress),
            "log": [] if masking.hides_all(job.name) else _lines(job.log),
            "masked": masking.masks(job.name),
            # A group has children of any type, so only users of all types may know of it.
            "group": read.around.group if view.user.types is None else None,
            "step_of": read.around.step if view.user.types is None else None,
            "groups": read.groups if view.user.types is None else {},
            "sees_groups": view.user.types is None,
            "trace_id": read.around.trace_id,
            "durable": [(step, _result(view, job, step)) for step in read.durable[-_STEPS:]],
            "steps_before": max(len(read.durable) - _STEPS, 0),
            "editable": not job.encrypted and not masking.masks(job.name),
        },
    )


async def edit(view: View) -> Shown:
    """The form of a replay with another payload."""
    read = await _of(view)
    job = read.job
    assert job is not None  # noqa: S101 - _of raises
    if job.encrypted or view.masking.masks(job.name):
        raise InvalidInput("the payload of this job is not shown to you, so it cannot be edited", hint="Replay it unchanged.")
    return Shown(
        f"Edit and replay a job of {job.name}", "edit.html", {"job": job, "payload": _document(view, job.name, job.data)}
    )


async def replay(view: View) -> Done:
    """Enqueue a copy, with its own payload or an edited one."""
    job = await _allowed(view)
    data = view.raw_text("data")
    if data is not None:
        if job.encrypted or view.masking.masks(job.name):
            raise InvalidInput("the payload of this job is not shown to you, so it cannot be edited", hint="Replay it unchanged.")
        load_json(data)
        bodies.check_data(data)
    new = make_id()
    force = view.text("force") == "yes"
    async with view.changing("replay" if data is None else "edit and replay", id=str(job.id), new_id=str(new), force=force):
        copy = await jobs.replay(await view.database(), job.id, new, data, force=force)
    return Done(f"jobs/{copy}", "Replayed: this is the new job.")


async def cancel(view: View) -> Done:
    """Cancel the job; of a running one the handler is told."""
    job = await _allowed(view)
    async with view.changing("cancel", id=str(job.id)) as changed:
        status = await jobs.cancel(await view.database(), job.id)
        changed(int(status in ("cancelled", "cancelling")))
    said = {"cancelled": "Cancelled.", "cancelling": "Its handler is told to stop."}
    return Done(f"jobs/{job.id}", said.get(status, f"It has ended already: {status}."))


async def run_now(view: View) -> Done:
    """Make a deferred job due at once."""
    job = await _allowed(view)
    async with view.changing("run-now", id=str(job.id)) as changed:
        done = await jobs.run_now(await view.database(), [job.id])
        changed(len(done))
    return Done(f"jobs/{job.id}", "It is due now." if done else "It is not deferred.")


async def set_priority(view: View) -> Done:
    """Give the job another priority."""
    priority = view.number("priority")
    if priority is None:
        raise InvalidInput("priority is empty", hint="Write a number from -100 (first) to 100 (last).")
    job = await _allowed(view)
    async with view.changing("set-priority", id=str(job.id), priority=priority) as changed:
        done = await jobs.set_priority(await view.database(), [job.id], priority)
        changed(len(done))
    return Done(f"jobs/{job.id}", f"Its priority is {priority}." if done else "It stays as it is: it does not wait, or has it.")


async def signal(view: View) -> Done:
    """Send a signal, for which the handler waits."""
    job = await _allowed(view)
    name = view.raw_text("name") or ""
    given = view.raw_text("value")
    value = "null" if given is None or not given.strip() else given
    load_json(value)
    async with view.changing("signal", id=str(job.id), name=name) as changed:
        first = await workflows.signal(await view.database(), job.id, name, bodies.check_data(value))
        changed(int(first))
    return Done(f"jobs/{job.id}", "Signalled." if first else "It has a signal of this name already, or its wait has timed out.")


def timeline(view: View, job: StoredJob) -> list[Step]:
    """The steps of a job, oldest first."""
    steps = [Step("enqueued", "Enqueued", job.created_at)]
    if job.not_before is not None and job.not_before > job.created_at and not job.errors:
        steps.append(Step("deferred", "Not before", job.not_before))
    for error in _list(job.errors):
        began, ended = _moment(error.get("started_at")), _moment(error.get("failed_at"))
        # An error that was reported over HTTP has the fields that its worker gave.
        shown = {
            **error,
            "type": view.masking.text(job.name, error.get("type")),
            "message": view.masking.text(job.name, str(error.get("message", ""))),
            "traceback": view.masking.text(job.name, error.get("traceback")),
        }
        took = None if began is None or ended is None else (ended - began).total_seconds()
        steps.append(
            Step("failed", f"Attempt {error.get('attempt', '?')} failed", began or ended, took, error.get("worker"), shown)
        )
    if str(job.status) == "in-progress":
        steps.append(Step("in-progress", f"Attempt {job.attempt} runs", job.started_at, None, job.worker))
    elif job.finished_at is None:
        steps.append(Step("queued", f"Attempt {job.attempt} waits", job.not_before if job.errors else None))
    elif str(job.status) == "succeeded":
        took = None if job.started_at is None else (job.finished_at - job.started_at).total_seconds()
        steps.append(Step("succeeded", f"Attempt {job.attempt} succeeded", job.started_at, took, job.worker))
    if job.finished_at is not None:
        steps.append(
            Step(str(job.status), f"Archived as {job.status}" + (f": {job.reason}" if job.reason else ""), job.finished_at)
        )
    return steps


async def _of(view: View) -> _Read:
    id = _id(view)
    read = await view.read(_look, view.user.types, id, kept_s=1.0)
    if read.job is None:
        raise not_here(f"job {id}")
    return replace(read, job=job_shown_to(view.user, read.job), why=why_shown_to(view.user, read.why))


async def _look(database: Database, types: frozenset[str] | None, id: UUID) -> _Read:
    """A job of these types, or of any. One of another type takes no statement more than one that there is not."""
    job = (await http_queries.stored_jobs(database, [id], log=True)).get(id)
    if job is None or (types is not None and job.name not in types):
        return _Read(None, None, Surroundings(None, None, None), {})
    why = None
    if not job.status.finished:
        # It may have ended since it was read.
        with suppress(NotFound):
            why = await jobs.why(database, id)
    groups = await queries.named_groups(database, job.after) if job.after else {}
    steps = await workflows.steps_shown(database, id, _MOST_RESULTS, limit=_ALL_STEPS)
    return _Read(job, why, await queries.surroundings_of(database, id), groups, steps)


async def _allowed(view: View) -> StoredJob:
    [job] = await allowed_jobs(view, [_id(view)])
    return job


def _id(view: View) -> UUID:
    try:
        return parse_id(view.parameters["id"])
    except InvalidInput:
        raise not_here(f"job {view.parameters['id']}") from None


def _document(view: View, name: str, text: str | None) -> str | None:
    """A document with indentation, to the digit where nothing is masked; None: there is none."""
    if text is None:
        return None
    return indented(view.masking.json_text(name, text))


def _result(view: View, job: StoredJob, step: StepRecord) -> str | None:
    """What a step returned, or was signalled, as the user may see it; None: there is none, or it is too large for the page."""
    return _document(view, job.name, http_queries.hidden_step(step.result) if job.encrypted else step.result)


def indented(text: str) -> str:
    """JSON text with indentation. Only the space between its tokens changes, so no number is rounded."""
    parts: list[str] = []
    depth = 0

    def line() -> str:
        return f"\n{'  ' * min(depth, _DEEPEST)}"

    signs = _SIGN.findall(text)
    for sign, following in zip(signs, [*signs[1:], ""], strict=True):
        if sign in "{[":
            depth += 1
            parts.append(sign if following in ("}", "]") else f"{sign}{line()}")
        elif sign in "}]":
            depth -= 1
            parts.append(sign if parts and parts[-1] in ("{", "[") else f"{line()}{sign}")
        elif sign == ",":
            parts.append(f",{line()}")
        else:
            parts.append(": " if sign == ":" else sign)
    return "".join(parts)


def _list(text: str | None) -> list[dict[str, Any]]:
    """The objects of a list; none where it cannot be read."""
    value: Any = None
    with suppress(Unreadable):
        value = load_json(text) if text else []
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _lines(text: str | None) -> list[dict[str, Any]]:
    return [{"attempt": None, "line": "", **line, "at": _moment(line.get("at"))} for line in _list(text)]


def _moment(value: Any) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return moment if moment.tzinfo is not None else None


PAGES = [Page("jobs/{id}", show), Page("jobs/{id}/edit", edit, Role.ENQUEUE)]
ACTIONS = [
    Action("jobs/{id}/replay", replay, Role.ENQUEUE),
    Action("jobs/{id}/cancel", cancel, Role.ENQUEUE),
    Action("jobs/{id}/run-now", run_now, Role.ENQUEUE),
    Action("jobs/{id}/set-priority", set_priority, Role.ENQUEUE),
    Action("jobs/{id}/signal", signal, Role.ENQUEUE),
]
