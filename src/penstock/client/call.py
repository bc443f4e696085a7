"""One call of the HTTP API as data: what is sent, how the answer is read, and how times and options are written in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote

import httpx
import orjson

from penstock.client.answers import error_of
from penstock.core.checks import check_moment
from penstock.errors import InvalidInput

T = TypeVar("T")
_SPANS = {
    "visibility_timeout",
    "time_limit",
    "backoff_base",
    "backoff_cap",
    "rate_period",
    "keep_succeeded",
    "keep_failed",
    "key_rate_period",
}
_SPAN = re.compile(r"\s*([0-9.]+)\s*(s|seconds?|m|minutes?|h|hours?|d|days?)?\s*")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and how to read its answer. `repeatable`: sending it twice does no harm."""

    method: str
    path: str
    parse: Callable[[httpx.Response], T]
    body: Any = None
    params: dict[str, str] = field(default_factory=dict)
    repeatable: bool = True
    lines: bytes | None = None

    @property
    def content(self) -> bytes | None:
        """The bytes of the body."""
        if self.lines is not None:
            return self.lines
        if self.body is None:
            return None
        try:
            return orjson.dumps(self.body)
        except TypeError as error:
            raise InvalidInput(
                f"what is to be sent is not JSON: {error}",
                hint="Use dicts, lists, text and numbers; integers have up to 64 bits.",
            ) from None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the body."""
        if self.lines is not None:
            return {"Content-Type": "application/x-ndjson"}
        return {} if self.body is None else {"Content-Type": "application/json"}

    def read(self, response: httpx.Response) -> T:
        """The result. Raises the errors that a direct call would raise."""
        if response.status_code >= 400:
            raise error_of(response)
        return self.parse(response)


class Send(Protocol):
    """Sends calls."""

    def __call__(self, call: Call[T], /) -> T:
        """Send one call, and read its answer."""


class AsyncSend(Protocol):
    """Sends calls."""

    async def __call__(self, call: Call[T], /) -> T:
        """Send one call, and read its answer."""


def quoted(name: str) -> str:
    """A name as part of a path. Raises `InvalidInput`."""
    if not name or "/" in name:
        raise InvalidInput(f"invalid name: {name!r}", hint='A name is not empty and has no "/".')
    return quote(name, safe="")


def at(what: str, time: datetime | timedelta | None) -> datetime | None:
    """A time, from a time or a span from now by the clock here. Raises `InvalidInput` for a time without a zone."""
    if time is not None:
        check_moment(what, time)
    if isinstance(time, timedelta):
        return datetime.now().astimezone() + time
    return time


def outside(options: dict[str, Any]) -> dict[str, Any]:
    """Options as HTTP has them: spans in seconds, with the unit in the name."""
    return {
        f"{name}_s" if name in _SPANS else name: seconds_of(value) if name in _SPANS else value for name, value in options.items()
    }


def seconds_of(value: Any) -> Any:
    """A span of time, or such as `90s` or `7 days`, in seconds; anything else as it is. Raises `InvalidInput`."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, str):
        match = _SPAN.fullmatch(value)
        if match is None:
            raise InvalidInput(f"{value!r} is not a span of time", hint='Write "90 seconds", 90s, 5m, 2h or 30d.')
        return float(match[1]) * _UNITS[(match[2] or "s")[0]]
    return value
