"""Operations on all jobs that match, with preview, progress and an end; and the audit of what users changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from penstock.errors import DatabaseUnavailable, InvalidInput, NotFound
from penstock.http.auth import Role
from penstock.http.dashboard import queries
from penstock.http.dashboard.pages.jobs import check_masked
from penstock.http.dashboard.searching import Wanted
from penstock.http.dashboard.view import Action, Done, Page, Shown, View, not_here, whole_number
from penstock.http.errors import ApiError
from penstock.http.masking import MASK
from penstock.jobs.models import make_id
from penstock.operations import queries as operations
from penstock.operations.models import JobFilter, OperationRecord

_KINDS = {
    "replay": "Replay", "cancel": "Cancel", "purge": "Purge", "set-priority": "Change the priority of", "run-now": "Run now",
}  # fmt: skip
_SHOWN = 100
# The conditions of a filter that the page of a new operation has too, by what that calls them.
_CONDITIONS = {
    "name": "type", "status": "status", "key": "key", "error": "error", "since": "since", "until": "until",
    "workflow": "group", "new_priority": "priority",
}  # fmt: skip


async def show(view: View) -> Shown:
    """The operations, latest first."""
    records = await view.read(operations.operations, _SHOWN, False, view.names, kept_s=2.0)
    shown = [_shown(view, record) for record in records]
    return Shown("Operations", "operations.html", {"operations": shown, "may_stop": partial(_may_stop, view), "again": _again})


async def new(view: View) -> Shown:
    """What an operation would change, and the form that starts it."""
    kind, filter, given = _wanted(view, view.query)
    priority = _priority(view.query) if kind == "set-priority" else None
    asks = kind == "set-priority" and priority is None
    preview, problem = None, ""
    try:
        if not asks:
            preview = await view.read(operations.preview, kind, filter, priority, kept_s=5.0)
    except DatabaseUnavailable:
        problem = "The jobs could not be counted within two seconds. The operation changes all that match, however many they are."
    except (InvalidInput, NotFound) as error:
        raise InvalidInput(error.message, hint=error.hint) from None
    return Shown(
        f"{_KINDS[kind]} all that match",
        "operation_new.html",
        {
            "kind": kind,
            "word": _KINDS[kind],
            "filter": filter.as_json(),
            "given": given,
            "preview": preview,
            "uncounted": problem,
            "priority": priority,
            "asks": asks,
        },
    )


async def start(view: View) -> Done:
    """Start an operation; workers do it in batches."""
    names = ("kind", "status", "type", "key", "error", "since", "until", "group")
    form = {name: view.text(name) for name in names if view.text(name)}
    kind, filter, _ = _wanted(view, form)
    priority = _priority({"priority": view.text("priority")}) if kind == "set-priority" else None
    if kind == "set-priority" and priority is None:
        raise InvalidInput("priority is empty", hint="Write a number from -100 (first) to 100 (last).")
    id = make_id()
    told = {} if priority is None else {"priority": priority}
    async with view.changing(f"{kind} all", id=str(id), **filter.as_json(), **told) as changed:
        record = await operations.start(await view.database(), kind, filter, id, priority)
        changed(0)
    return Done("operations", f"The operation {record.id} was started. Workers do it in batches.")


async def cancel(view: View) -> Done:
    """End an operation after its current batch."""
    database = await view.database()
    try:
        record = await operations.find(database, UUID(view.parameters["id"]))
    except (ValueError, NotFound):
        raise not_here(f"operation {view.parameters['id']}") from None
    if not _may(view, record):
        raise not_here(f"operation {record.id}")
    if not _may_stop(view, record):
        raise ApiError(403, "forbidden", "Only a user with the role admin may stop an erasure", in_body=True)
    async with view.changing("stop operation", id=str(record.id)):
        record = await operations.cancel(database, record.id)
    return Done("operations", f"It is {record.state}, after {record.done} jobs.")


async def audit(view: View) -> Shown:
    """What users changed, latest first."""
    given = view.query.get("before", "")
    before = whole_number(given)
    changes = await view.read(queries.list_changes, before, _SHOWN)
    last = changes[-1].id if len(changes) == _SHOWN else None
    return Shown("Audit", "audit.html", {"changes": changes, "last": last, "before": before})


def _wanted(view: View, given: Any) -> tuple[str, JobFilter, dict[str, str]]:
    """Kind and filter of an operation that the user may start. Raises `InvalidInput`, `ApiError`."""
    kind = given.get("kind", "")
    if kind not in _KINDS:
        raise InvalidInput(f"unknown operation: {kind[:100]!r}", hint=f"There are: {', '.join(_KINDS)}.")
    # A replay of all finished jobs is one of those that failed.
    wanted = Wanted.of(
        {**given, "status": "failed"} if kind == "replay" and given.get("status", "") in ("", "finished") else given
    )
    # A preview counts what matches: that tells as much as a search.
    check_masked(view, wanted)
    filter = wanted.operation()
    if filter is None:
        raise InvalidInput(
            "no operation has such a condition", hint="An operation goes by type, status, key, error type and time."
        )
    if view.user.types is not None and (filter.name is None or filter.name not in view.user.types):
        raise ApiError(403, "forbidden", "You have access to some job types only: search for one of them first", in_body=True)
    return kind, filter, wanted.given


def _again(record: OperationRecord) -> str | None:
    """The address of the page that starts an operation like an ended one, for what matches now; None: there is none."""
    if not record.ended or record.kind not in _KINDS or set(record.filter) - set(_CONDITIONS):
        return None
    given = {_CONDITIONS[name]: value for name, value in record.filter.items()}
    return f"operations/new?{urlencode({'kind': record.kind, **given})}"


def _priority(given: Mapping[str, str]) -> int | None:
    """The priority that is wanted; None: it is not given yet. Raises `InvalidInput`."""
    text = given.get("priority", "").strip()
    if not text:
        return None
    if re.fullmatch(r"-?[0-9]{1,3}", text) is None:
        raise InvalidInput(f"no priority: {text[:100]!r}", hint="Write a number from -100 (first) to 100 (last).")
    return int(text)


def _may(view: View, record: OperationRecord) -> bool:
    name = record.filter.get("name")
    return view.user.types is None or (name is not None and view.user.may(name))


def _may_stop(view: View, record: OperationRecord) -> bool:
    return view.may("admin" if record.kind == "erase" else "enqueue")


def _shown(view: View, record: OperationRecord) -> OperationRecord:
    """An operation; of an erasure not whom it removes, which is shown only to users who may start one."""
    if record.kind != "erase" or view.may("admin"):
        return record
    return replace(record, filter=dict.fromkeys(record.filter, MASK))


PAGES = [
    Page("operations", show),
    Page("operations/new", new, Role.ENQUEUE),
    Page("audit", audit, Role.ADMIN, all_types=True),
]
ACTIONS = [Action("operations/start", start, Role.ENQUEUE), Action("operations/{id}/stop", cancel, Role.ENQUEUE)]
