"""Answers of the HTTP API in the words of the domain: jobs, job types, errors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import httpx
import orjson
from pydantic import ValidationError

from penstock.core.records import from_object
from penstock.core.serialization import load_json
from penstock.errors import (
    Conflict,
    DatabaseUnavailable,
    InvalidInput,
    NotFound,
    OffsetGone,
    PenstockError,
    QueueFull,
    Unreadable,
)  # fmt: skip

T = TypeVar("T")


class AccessDenied(PenstockError):
    """The server does not accept the credentials, or the user may not do this."""


def error_of(response: httpx.Response) -> PenstockError:
    """The error that a direct call would have raised."""
    try:
        error = orjson.loads(response.content)
        title, detail, error_id = str(error["title"]), error.get("detail"), error.get("id")
    except (orjson.JSONDecodeError, KeyError, TypeError):
        title, detail, error_id = f"the server answered {response.status_code}", None, None
    kinds: dict[int, type[PenstockError]] = {
        400: InvalidInput, 401: AccessDenied, 403: AccessDenied, 404: NotFound, 409: Conflict, 410: OffsetGone, 413: InvalidInput,
        429: AccessDenied, 502: DatabaseUnavailable, 503: DatabaseUnavailable, 504: DatabaseUnavailable,
    }  # fmt: skip
    if response.status_code == 429 and error_id == "queue_full":
        return QueueFull(title, hint=detail)
    return kinds.get(response.status_code, PenstockError)(title, hint=detail)


def unavailable(error: Exception) -> PenstockError:
    """The error for a server that is away."""
    if isinstance(error, PenstockError):
        return error
    return DatabaseUnavailable(f"the server is not available: {type(error).__name__}: {error}")


def json_of(response: httpx.Response) -> Any:
    """The body, its integers exactly. Raises `PenstockError` when something else than Penstock answered, such as a proxy."""
    try:
        return load_json(response.content.decode())
    except (Unreadable, UnicodeDecodeError):
        raise PenstockError(
            f"the answer ({response.status_code}) of {response.url.copy_with(query=None)} is no JSON",
            hint="Check the URL: it is that of a Penstock server.",
        ) from None


def record_of(kind: type[T], response: httpx.Response) -> T:
    """A record, or such as `list[Record]`. Raises `PenstockError` when the answer is none: another version, another server."""
    found = json_of(response)
    try:
        return from_object(kind, found)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise PenstockError(
            f"the answer of {response.url.copy_with(query=None)} is not what this version expects: {where or 'it'}",
            hint="Use a client and a server of the same version.",
        ) from None


def reader(kind: type[T]) -> Callable[[httpx.Response], T]:
    """What reads such a record from an answer."""
    return lambda response: record_of(kind, response)


def outcomes_of(response: httpx.Response, what: str, many: int) -> list[dict[str, Any]]:
    """What became of each line that was sent. Raises the error of the first that was refused; the others are done."""
    found = []
    for line in response.content.splitlines():
        outcome: dict[str, Any] = orjson.loads(line)
        if error := outcome.get("error"):
            place = outcome.get("line") or outcome["lines"][0][0]
            kind = Conflict if error["id"] == "conflict" else InvalidInput
            raise kind(f"{what} {place} of {many}: {error['title']}", hint=error.get("detail"))
        found.append(outcome)
    return found


def time_of(text: str | None) -> Any:
    """A time, or None."""
    return None if text is None else datetime.fromisoformat(text)
