"""Checks of arguments: an error names the argument and its value before anything reaches the database."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import Any

from penstock.errors import InvalidInput

# As the database checks it. Which characters beyond ASCII are white space is for the database to say.
_NAME = re.compile(r"(?![.]{1,2}$)[^\s/\x00-\x1f\x7f]+", re.ASCII)


def check_number(what: str, value: Any, low: int, high: int) -> None:
    """Raise `InvalidInput` unless the value is an integer in this range."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidInput(f"{what} must be an integer from {low:,} to {high:,}, not {value!r}")


def check_name(what: str, value: Any, longest: int, *, never: str | None = None) -> None:
    """Raise `InvalidInput` unless the value can be the name of an object. No name begins with `never`."""
    fits = isinstance(value, str) and len(value) <= longest and _NAME.fullmatch(value)
    if not fits or (never is not None and value.startswith(never)):
        begins = f', does not begin with "{never}"' if never is not None else ""
        raise InvalidInput(
            f"invalid {what}: {value!r:.100}",
            hint=f'It has 1 to {longest} characters, none of them white space, "/" or a control character{begins}, and is not'
            ' "." or "..".',
        )


def check_mapping(what: str, value: Any, example: str) -> None:
    """Raise `InvalidInput` unless the value is a mapping whose keys are text."""
    if not isinstance(value, Mapping) or any(not isinstance(key, str) for key in value):
        raise InvalidInput(f"{what} must be a mapping with text as keys, not {value!r:.100}", hint=f"For example: {example}")


def check_flag(what: str, value: Any) -> None:
    """Raise `InvalidInput` unless the value is True or False."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{what} must be True or False, not {value!r:.100}")


def check_span(what: str, value: Any, *, zero: bool = False) -> None:
    """Raise `InvalidInput` unless the value is a positive timedelta. `zero` also allows a timedelta of zero."""
    if not isinstance(value, timedelta) or value < timedelta(0) or (not zero and not value):
        raise InvalidInput(f"{what} must be a span of time, not {value!r:.100}", hint="For example: timedelta(minutes=5)")


def check_names(what: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise `InvalidInput` unless all options that are given by name exist; the error names the nearest one."""
    names = list(known)
    for name, value in given.items():
        if name not in names:
            raise InvalidInput(
                f"{what} has no option {name} (it was given {value!r:.100})",
                hint=did_you_mean(name, names) or f"Its options are {', '.join(names)}.",
            )


def check_documentation(name: str, docs_url: Any, owner: Any) -> None:
    """Raise `InvalidInput` unless these can be the address of a documentation and an owner."""
    for what, value, longest in (("docs_url", docs_url, 2_000), ("owner", owner, 200)):
        if value is not None and (not isinstance(value, str) or not 0 < len(value) <= longest or not value.isprintable()):
            raise InvalidInput(f"{what} of {name} must be 1 to {longest:,} characters of text, not {value!r:.100}")
    if docs_url is not None and not docs_url.startswith(("https://", "http://")):
        raise InvalidInput(f"docs_url of {name} must begin with https:// or http://, not {docs_url!r:.100}")


def check_choice(what: str, value: Any, choices: Iterable[str]) -> None:
    """Raise `InvalidInput` unless the value is one of these choices."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        raise InvalidInput(f"{what} must be {', '.join(known[:-1])} or {known[-1]}, not {value!r:.100}")


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """A hint that names the known name nearest to an unknown one; None when none is near."""
    near = get_close_matches(name, list(known), 1)
    return f"Did you mean {near[0]!r}?" if near else None


def check_time(what: str, value: Any) -> datetime:
    """Return the value. Raises `InvalidInput` unless it is a datetime with a time zone."""
    if not isinstance(value, datetime):
        raise InvalidInput(f"{what} must be a datetime, not {value!r:.100}", hint="For example: datetime.now(UTC)")
    if value.utcoffset() is None:
        raise InvalidInput(f"{what} has no time zone: {value.isoformat()}", hint="Use datetime.now(UTC).")
    return value
