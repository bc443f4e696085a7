"""The jobs: a search that says how far it looked, and changes of those that are selected."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from penstock.core.serialization import load_json
from penstock.errors import Conflict, InvalidInput, NotFound, Unreadable
from penstock.http.auth import Role
from penstock.http.dashboard import queries
from penstock.http.dashboard.queries import JobSearch, Named
from penstock.http.dashboard.searching import STATES, Wanted, is_signature
from penstock.http.dashboard.view import Action, Done, Page, Shown, Sight, View
from penstock.http.errors import ApiError
from penstock.http.jobs.access import job_shown_to
from penstock.jobs import http_queries, type_queries
from penstock.jobs import queries as jobs
from penstock.jobs.http_queries import StoredJob
from penstock.jobs.models import make_id
from penstock.jobs.records import Status, parse_id
from penstock.postgres.database import Database

ON_A_PAGE = 50
_MOST_LOOKED = 20_000
_MOST_SELECTED = 1_000
_KEPT_S = 2.0
_LONGEST_SHOWN = 160


@dataclass(frozen=True, slots=True)
class _Found:
    """A page of jobs, each with the beginning of its payload and its last error: whole payloads are not kept.

    Attributes:
        jobs: The jobs.
        awaited: What those of them that wait for others wait for.
        place: Where the next page goes on; None: there are no more.
        until: Time of the last job that was looked at; None: all were.
    """

    jobs: list[tuple[StoredJob, str, str]]
    awaited: dict[UUID, list[Named]]
    place: str | None
    until: datetime | None


async def search(view: View) -> Shown:
    """The jobs that meet the conditions of the address."""
    problem, wanted = "", Wanted.of({})
    found = _Found([], {}, None, None)
    try:
        wanted = Wanted.of(view.query)
        check_masked(view, wanted)
        _check_group(view, wanted)
        after = view.query.get("after") or None
        if wanted.id is not None:
            found = await view.read(_look_at, view.sight, wanted.id, kept_s=_KEPT_S, follows=True)
        else:
            allowed = wanted.search.only(view.names)
            found = await view.read(_look, view.sight, allowed, wanted.finished, after, kept_s=_KEPT_S, follows=True)
    except InvalidInput as error:
        problem = f"{error.message}. {error.hint or ''}"
    types = [one.name for one in await view.read(type_queries.job_types) if view.user.may(one.name)]
    filter = wanted.operation()
    return Shown(
        "Jobs",
        "jobs.html",
        {
            "wanted": wanted,
            "given": dict(view.query) if problem else wanted.given,
            "invalid": problem,
            "jobs": found.jobs,
            "awaited": found.awaited,
            "place": found.place,
            "until": found.until,
            "after": view.query.get("after", ""),
            "most": _MOST_LOOKED,
            "types": types,
            "states": STATES,
            "back": f"jobs?{wanted.address()}",
            "bulk": filter is not None and bool(filter.as_json()) and (filter.name is not None or view.user.types is None),
        },
    )


async def _look_at(database: Database, sight: Sight, id: UUID) -> _Found:
    stored = list((await http_queries.stored_jobs(database, [id])).values())
    return _Found([line_of(sight, job) for job in stored if sight.types is None or job.name in sight.types], {}, None, None)


async def _look(database: Database, sight: Sight, search: JobSearch, finished: bool, after: str | None) -> _Found:
    page = await queries.search(
        database, search.only(sight.names), finished=finished, after=after, limit=ON_A_PAGE, most=_MOST_LOOKED
    )
    stored_jobs = await http_queries.stored_jobs(database, page.ids)
    waiting = [id for id in page.ids if id in stored_jobs and stored_jobs[id].status is Status.WAITING]
    # Names of groups are for users of all types.
    awaited = await queries.awaited_by(database, waiting) if waiting and sight.types is None else {}
    return _Found([line_of(sight, stored_jobs[id]) for id in page.ids if id in stored_jobs], awaited, page.place, page.until)


def line_of(sight: Sight, job: StoredJob) -> tuple[StoredJob, str, str]:
    """A job in a list: without its documents, the beginning of its payload, and its last error."""
    bare = replace(job, data="", errors=None, result=None, progress=None, log=None)
    return bare, shortened(sight, job), error_of(sight, job_shown_to(sight, job))


def _check_group(view: View, wanted: Wanted) -> None:
    """Raise `InvalidInput` for a search in a job group, whose children may be of any type."""
    if wanted.search.group is not None and view.user.types is not None:
        raise InvalidInput("job groups are for users with access to all job types", hint="Search for a job type.")


def check_masked(view: View, wanted: Wanted) -> None:
    """Raise `InvalidInput` for a search in what the user may not see. A signature tells nothing of an error."""
    path, names = wanted.search.path, wanted.search.names
    if path is not None and view.masking.hides(names[0] if names else None, path):
        raise InvalidInput(f"the field {'.'.join(path)} is masked for you", hint="Search for another field.")
    words = wanted.search.error is not None and not (wanted.finished and is_signature(wanted.search.error))
    if words and view.masking.hides_words(names[0] if names else None):
        raise InvalidInput("errors of some job types are hidden from you", hint="Name another job type too.")


def shortened(sight: Sight, job: StoredJob) -> str:
    """The beginning of a payload."""
    text = sight.masking.json_text(job.name, job.data)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def error_of(sight: Sight, job: StoredJob) -> str:
    """The last error of a job in one line."""
    errors: Any = []
    with suppress(Unreadable):
        errors = load_json(job.errors) if job.errors else []
    if not isinstance(errors, list) or not errors or not isinstance(errors[-1], dict):
        return ""
    last = errors[-1]
    message = str(sight.masking.text(job.name, str(last.get("message", "")).split("\n")[0]))
    text = f"{sight.masking.text(job.name, str(last.get('type', 'Error')))}: {message}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


# -- changes


async def allowed_jobs(view: View, ids: Sequence[UUID]) -> list[StoredJob]:
    """Those of the jobs that the user may change; what there is not is left out. Raises `ApiError` 404 when there is none."""
    found = await http_queries.stored_jobs(await view.database(), ids)
    allowed = [found[id] for id in ids if id in found and view.user.may(found[id].name)]
    if not allowed:
        raise ApiError(404, "not_found", "There is no such job", detail="It may have been pruned.", in_body=True)
    return allowed


async def change_selected(view: View) -> Done:
    """Replay, cancel, start now or reorder the selected jobs."""
    ids = [parse_id(text) for text in view.texts("id")][:_MOST_SELECTED]
    if not ids:
        raise InvalidInput("no job is selected", hint="Select the jobs, or follow the link to all that match.")
    action = view.text("action")
    priority = view.number("priority")
    if action not in _WORDS:
        raise InvalidInput(f"unknown action: {action[:100]!r}", hint=f"There are: {', '.join(_WORDS)}.")
    if action == "set-priority" and priority is None:
        raise InvalidInput("priority is empty", hint="Write a number from -100 (first) to 100 (last).")
    chosen = await allowed_jobs(view, ids)
    told = {"priority": priority} if action == "set-priority" else {}
    async with view.changing(action, ids=[str(job.id) for job in chosen], **told) as changed:
        number = await _change(await view.database(), action, [job.id for job in chosen], priority or 0)
        changed(number)
    left = len(chosen) - number
    words = _WORDS[action]
    message = f"{number} of {len(chosen)} jobs {words}." + (f" {left} stayed as they are." if left else "")
    return Done(_back(view), message)


def _back(view: View) -> str:
    back = view.text("back", "jobs")
    return back if back.partition("?")[0] == "jobs" else "jobs"


async def replay_jobs(database: Database, ids: Sequence[UUID]) -> int:
    """Replay jobs, unless an earlier replay waits, runs or has succeeded. Returns how many."""
    number = 0
    for id in ids:
        # Replayed already and not failed, or queued still.
        with suppress(Conflict, NotFound):
            await jobs.replay(database, id, make_id(), force=False)
            number += 1
    return number


async def _cancel(database: Database, ids: Sequence[UUID]) -> int:
    number = 0
    for id in ids:
        with suppress(NotFound):
            number += (await jobs.cancel(database, id)) in ("cancelled", "cancelling")
    return number


async def _change(database: Database, action: str, ids: Sequence[UUID], priority: int) -> int:
    """Make one of the changes. Returns how many jobs it changed."""
    if action == "replay":
        return await replay_jobs(database, ids)
    if action == "cancel":
        return await _cancel(database, ids)
    if action == "run-now":
        return len(await jobs.run_now(database, ids))
    return len(await jobs.set_priority(database, ids, priority))


_WORDS = {"replay": "replayed", "cancel": "cancelled", "run-now": "made due", "set-priority": "given another priority"}

PAGES = [Page("jobs", search)]
ACTIONS = [Action("jobs/selected", change_selected, Role.ENQUEUE)]
