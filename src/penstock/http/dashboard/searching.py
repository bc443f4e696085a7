"""The conditions of a search as the address of a page has them, and back: no input or output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlencode
from uuid import UUID

from penstock.core.checks import parse_time
from penstock.errors import InvalidInput
from penstock.http.dashboard.queries import JobSearch
from penstock.jobs.records import Status, parse_id
from penstock.operations.models import JobFilter

_FIELD = re.compile(r"""(?:data\.)?(?P<path>[^\s=.]+(?:\.[^\s=.]+)*)\s*=\s*(?P<value>'(?:[^']|'')*'|"[^"]*"|[^\s'"]+)""")
_ID = re.compile(r"(job_)?[0-9a-fA-F]{8}-?([0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}")
_SIGNATURE = re.compile("[0-9a-f]{16}")
CONDITIONS = ("status", "type", "key", "field", "error", "worker", "since", "until", "group", "id")
STATES = {"unfinished": "Not finished", "finished": "Finished"} | {str(status): str(status).capitalize() for status in Status}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A search as the reader wrote it.

    Attributes:
        given: The conditions, as texts, in the order of the page.
        search: The same for the database.
        finished: Whether among the finished jobs.
        id: The one job that is wanted.
    """

    given: dict[str, str]
    search: JobSearch
    finished: bool
    id: UUID | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Wanted:
        """The search of an address. Raises `InvalidInput`."""
        given = {name: value.strip() for name in CONDITIONS if (value := query.get(name, "")).strip()}
        state = given.get("status", "finished")
        if state not in STATES:
            raise InvalidInput(f"unknown status: {state[:100]!r}", hint=f"There are: {', '.join(STATES)}.")
        status = None if state in ("unfinished", "finished") else Status(state)
        field = parse_field(given["field"]) if "field" in given else None
        search = JobSearch(
            names=(given["type"],) if "type" in given else None,
            status=None if status is None else str(status),
            key=given.get("key"),
            since=_time(given.get("since"), "since"),
            until=_time(given.get("until"), "until"),
            worker=given.get("worker"),
            error=given.get("error"),
            path=None if field is None else field[0],
            value=None if field is None else field[1],
            group=_group(given.get("group")),
        )
        finished = status.finished if status is not None else state == "finished"
        return cls(given, search, finished, parse_id(given["id"]) if "id" in given else None)

    def address(self, **changed: str | None) -> str:
        """The query of the same search with other conditions; None: without that one."""
        conditions = {name: value for name, value in (self.given | changed).items() if value}
        return urlencode(conditions)

    def operation(self) -> JobFilter | None:
        """The filter of an operation on all jobs that match; None: no operation has such a condition."""
        search = self.search
        if search.path is not None or search.worker is not None or self.id is not None:
            return None
        error, signature = search.error, None
        if error is not None and is_signature(error):
            error, signature = None, error
        elif error is not None and not re.fullmatch(r"[\w.]+", error):
            return None
        name = search.names[0] if search.names else None
        return JobFilter(
            name, search.status, search.key, None, error, search.since, search.until, search.group, signature=signature
        )


def parse_field(text: str) -> tuple[tuple[str, ...], str]:
    """A field of the payload and its value, from `data.customer = 'acme'`. Raises `InvalidInput`."""
    match = _FIELD.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(
            f"cannot read the condition {text[:100]!r}", hint="Write data.customer = 'acme' or data.order.id = 42."
        )
    value = match["value"]
    if value[0] == "'":
        value = value[1:-1].replace("''", "'")
    elif value[0] == '"':
        value = value[1:-1]
    return tuple(match["path"].split(".")), value


def is_id(text: str) -> bool:
    """Whether a text can be the id of a job."""
    return _ID.fullmatch(text.strip()) is not None


def is_signature(text: str) -> bool:
    """Whether a text can be the signature of an error."""
    return _SIGNATURE.fullmatch(text) is not None


def _group(given: str | None) -> UUID | None:
    if given is None:
        return None
    try:
        return UUID(given)
    except ValueError:
        raise InvalidInput(f"no id of a job group: {given[:100]!r}", hint="The page of the group links to its jobs.") from None


def _time(given: str | None, name: str) -> datetime | None:
    return None if given is None else parse_time(name, given)
