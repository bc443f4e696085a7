"""Checks of arguments: an error names the argument and its value before anything reaches the database."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

from penstock.errors import InvalidInput

P = ParamSpec("P")
T = TypeVar("T")
LONGEST_SPAN = timedelta(days=366_000)
"""The longest span of time from now: a thousand years, which PostgreSQL and Python can both add to a time."""
ZONED = "Write it with its zone, such as 2026-01-31T12:00:00Z or 2026-01-31T13:00:00+01:00."
"""The hint of errors about a text that is not a time, or has no zone."""
# As the database checks it. Which characters beyond ASCII are white space is for the database to say.
_NAME = re.compile(r"(?![.]{1,2}$)[^\s/\x00-\x1f\x7f]+", re.ASCII)


def check_number(what: str, value: Any, low: int, high: int) -> None:
    """Raise `InvalidInput` unless the value is an integer in this range."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidInput(f"{what} must be an integer from {low:,} to {high:,}, not {value!r}")


def check_real(what: str, value: Any, low: float, high: float) -> None:
    """Raise `InvalidInput` unless the value is an integer or a float in this range."""
    if type(value) not in (int, float) or not low <= value <= high:
        raise InvalidInput(f"{what} must be a number from {low:g} to {high:g}, not {value!r:.100}")


def check_text(what: str, value: Any) -> None:
    """Raise `InvalidInput` unless the value is text that PostgreSQL can store."""
    if not isinstance(value, str):
        raise InvalidInput(f"{what} must be text, not {value!r:.100}")
    if not storable_text(value):
        raise InvalidInput(
            f"{what} is not text that PostgreSQL can store: {value!r:.100}",
            hint="It contains the character U+0000, or half of a surrogate pair.",
        )


def storable_text(text: str) -> bool:
    """Whether PostgreSQL can store a text: it has no U+0000 and no half of a surrogate pair."""
    try:
        return b"\x00" not in text.encode()
    except UnicodeEncodeError:
        return False


def check_texts(what: str, values: Iterable[str | None]) -> None:
    """`check_text` for each of many values that are not None, at the cost of one check for all."""
    given = [value for value in values if value is not None]
    if not set(map(type, given)) <= {str} or not storable_text("".join(given)):
        for value in given:
            check_text(what, value)


def check_many(what: str, value: Any, example: str) -> None:
    """Raise `InvalidInput` unless the value can be iterated over as a list can: text, bytes and mappings cannot."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray, Mapping)):
        raise InvalidInput(f"{what} must be a list, not {value!r:.100}", hint=f"For example: {example}")


def check_secrets(what: str, value: Any, example: str) -> None:
    """As `check_many`, for values that no error shows."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray, Mapping)):
        raise InvalidInput(f"{what} must be a list, not of type {type(value).__name__}", hint=f"For example: {example}")


def check_function(what: str, value: Any, example: str) -> None:
    """Raise `InvalidInput` unless the value can be called."""
    if not callable(value):
        raise InvalidInput(f"{what} must be a function, not {value!r:.100}", hint=f"For example: {example}")


def check_name(what: str, value: Any, longest: int, *, never: str | None = None) -> None:
    """Raise `InvalidInput` unless the value can be the name of an object. No name begins with `never`."""
    fits = isinstance(value, str) and len(value) <= longest and _NAME.fullmatch(value) and storable_text(value)
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


def check_span(
    what: str, value: Any, *, zero: bool = False, shortest: timedelta = timedelta(0), longest: timedelta = timedelta.max
) -> None:
    """Raise `InvalidInput` unless the value is a positive timedelta in this range. `zero` also allows a timedelta of zero."""
    if not isinstance(value, timedelta) or value < timedelta(0) or (not zero and not value):
        raise InvalidInput(f"{what} must be a span of time, not {value!r:.100}", hint="For example: timedelta(minutes=5)")
    if value < shortest:
        raise InvalidInput(f"{what} must be at least {shortest}, not {value} ({value!r})")
    if value > longest:
        raise InvalidInput(f"{what} must be at most {longest}, not {value} ({value!r})")


def check_names(what: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise `InvalidInput` unless all options that are given by name exist; the error names the nearest one."""
    names = list(known)
    for name, value in given.items():
        if name not in names:
            raise InvalidInput(
                f"{what} has no option {name} (it was given {value!r:.100})",
                hint=did_you_mean(name, names) or f"Its options are {', '.join(names)}.",
            )


def refusing_unknown(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator of a declaration whose options are its parameters: `check_names` for options that it does not have.

    Args:
        what: What is declared, for the message: "a topic".
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(function).parameters
        options = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            check_names(what, {name: value for name, value in kwargs.items() if name not in parameters}, options)
            return function(*args, **kwargs)

        return call

    return decorate


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
        raise InvalidInput(f"{what} has no time zone: {value!r}", hint="Use datetime.now(UTC).")
    return value


def parse_time(what: str, text: str) -> datetime:
    """A time in ISO 8601 with its zone, in UTC. Only a terminal reads one without a zone, see `penstock.cli.times`.

    Raises:
        InvalidInput: The text is not a time, or has no zone, or is before the year 1 or after 9999 in UTC.
    """
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"{what} is not a time: {text!r:.100}", hint=ZONED) from None
    if time.utcoffset() is None:
        raise InvalidInput(f"{what} has no time zone: {text!r:.100}", hint=ZONED)
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise InvalidInput(f"{what} is out of range: {text!r:.100}", hint="Times lie in the years 1 to 9999.") from None


def check_moment(what: str, value: Any) -> None:
    """Raise `InvalidInput` unless the value is a datetime with a time zone, or a timedelta from now."""
    hint = "Use datetime.now(UTC) or a timedelta."
    if not isinstance(value, (datetime, timedelta)):
        raise InvalidInput(f"{what} must be a datetime or a timedelta, not {value!r:.100}", hint=hint)
    if isinstance(value, timedelta):
        if abs(value) > LONGEST_SPAN:
            raise InvalidInput(f"{what} must be within {LONGEST_SPAN}, not {value!r}", hint=hint)
    elif value.utcoffset() is None:
        raise InvalidInput(f"{what} has no time zone: {value!r}", hint=hint)
