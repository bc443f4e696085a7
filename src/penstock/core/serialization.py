"""Payloads: conversion of Python values to the JSON that is stored and back, with validation.

A payload type can be any type that pydantic supports: a model, a dataclass, a TypedDict, `dict[str, int]`, `str`; `Any` stands
for plain JSON.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any, Generic, TypeVar

import orjson
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from penstock.core.checks import storable_text
from penstock.errors import InvalidInput, Unreadable

T = TypeVar("T")
_DIGIT = 0x30
_LONG = b"0" * 19
_DIGITS = bytes(_DIGIT if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))
# `_ODD` finds an exponent of three digits or a long run of digits anywhere; `_TOKEN` finds each text or number.
_ODD = re.compile(r"[0-9][eE][+-]?[0-9]{3}|(?<![0-9])[0-9]{300}")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|(-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)', re.DOTALL)
_LONGEST_NUMBER = 1_000
# An escape of U+0000 whose backslash is not itself escaped.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


class Codec(Generic[T]):
    """Writes and reads payloads of one type.

    Args:
        type_: The payload type; Any for plain JSON.
        what: Name of what the payload belongs to, for error messages.
    """

    def __init__(self, type_: Any, what: str) -> None:
        self._what = what
        if isinstance(type_, str) or inspect.isroutine(type_):
            raise InvalidInput(f"{what} cannot have payloads of type {type_!r:.100}: it is not a type")
        try:
            self._adapter: TypeAdapter[T] | None = None if type_ is Any else TypeAdapter(type_)
        except Exception as error:  # what pydantic raises for an object that is no type differs from object to object
            hint = (
                error.message if isinstance(error, PydanticUserError) else "Give a type, such as a dataclass or dict[str, int]."
            )
            raise InvalidInput(f"{what} cannot have payloads of type {type_!r:.100}", hint=hint) from None

    def schema(self) -> dict[str, Any] | None:
        """The JSON Schema of the payloads; None: any JSON, or a type that has none."""
        try:
            return None if self._adapter is None else self._adapter.json_schema()
        except PydanticUserError:
            return None

    @cached_property
    def takes_none(self) -> bool:
        """Whether None is a payload of the type, as of `int | None`. With any JSON, None says that there is no payload."""
        try:
            return self._adapter is not None and self._adapter.validate_python(None) is None
        except Exception:  # as a validator of the user's may raise it
            return False

    def or_empty(self, value: T | None) -> Any:
        """A payload as it is sent: None is itself where the type has it, and otherwise an empty object."""
        return {} if value is None and not self.takes_none else value

    def dump(self, value: T) -> str:
        """The JSON text of a payload. Raises `InvalidInput` when the payload does not match the type or is not JSON."""
        if self._adapter is None:
            return dump_json(value, self._what)
        try:
            # A value that only resembles the type (a dict for a model) is accepted when it validates.
            checked = self._adapter.validate_python(value)
            if isinstance(value, (set, frozenset)) and not isinstance(checked, (set, frozenset)):
                raise InvalidInput(f"invalid payload for {self._what}: a set has no order", hint="Give a list.")
            text = self._adapter.dump_json(checked).decode()
            if "null" in text:
                _refuse_no_numbers(self._adapter.dump_python(checked), self._what)
            return _without_nul(text, self._what)
        except (ValidationError, PydanticSerializationError) as error:
            raise InvalidInput(f"invalid payload for {self._what}: {_brief(error)}") from None

    def check(self, value: Any) -> Any:
        """Convert a value to the payload type, such as a dict to a model. Raises `InvalidInput` when it does not match."""
        if self._adapter is None:
            return value
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise InvalidInput(f"invalid payload for {self._what}: {_brief(error)}") from None

    def load(self, text: str) -> T:
        """The payload of a JSON text. Raises `Unreadable` when the text does not match the type."""
        try:
            if self._adapter is None:
                value: T = load_json(text)
                return value
            return self._adapter.validate_json(text)
        except InvalidInput as error:
            raise Unreadable(f"invalid payload for {self._what}: {error.message}") from None
        except ValidationError as error:
            raise Unreadable(f"invalid payload for {self._what}: {_brief(error)}") from None


def dump_json(value: object, what: str) -> str:
    """The JSON text of a plain value. Raises `InvalidInput` for a value that is not JSON or that PostgreSQL cannot store."""
    try:
        text = orjson.dumps(value, default=_default).decode()
    except (TypeError, orjson.JSONEncodeError, UnicodeError) as error:
        raise InvalidInput(
            f"the payload of {what} is not JSON: {error}", hint="Use dicts, lists, text, numbers, or declare its type."
        ) from None
    if "null" in text:
        _refuse_no_numbers(value, what)
    return _without_nul(text, what) if "\\u0000" in text else text


def _refuse_no_numbers(value: object, what: str) -> None:
    """Refuse NaN and the infinities: they would become null in JSON, which is another value and which typed readers refuse."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidInput(
                f"the payload of {what} contains the number {value}, which JSON cannot represent",
                hint="Leave it out, or give None.",
            )
    elif isinstance(value, dict):
        for inner in value.values():
            _refuse_no_numbers(inner, what)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _refuse_no_numbers(inner, what)
    elif hasattr(value, "model_dump"):
        _refuse_no_numbers(value.model_dump(mode="json"), what)


def dump_options(what: str, options: Mapping[str, Any]) -> str:
    """Options by their names in SQL, as the JSON text that SQL functions read. A timedelta becomes an interval.

    Raises:
        InvalidInput: A value has another type than those of options: text, a number, a flag, a timedelta, None, or a mapping of
            them. The error names the option.
    """
    for name, value in options.items():
        if not _may_be_option(value):
            raise InvalidInput(
                f"{name} of {what} cannot be {value!r:.100}", hint="Give text, a number, True or False, a timedelta, or None."
            )
    return orjson.dumps(dict(options), default=lambda span: f"{span.total_seconds():.6f} seconds").decode()


def _may_be_option(value: Any) -> bool:
    if isinstance(value, Mapping):
        return isinstance(value, dict) and all(isinstance(name, str) and _may_be_option(inner) for name, inner in value.items())
    if isinstance(value, str):
        return storable_text(value)
    if type(value) is int:
        return abs(value) < 2**63
    if type(value) is float:
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, timedelta))


def load_json(text: str) -> Any:
    """The value of a JSON text: integers exactly, other numbers as the nearest double.

    Raises `Unreadable` for text that is not JSON, and for numbers that Python cannot represent.
    """
    try:
        # orjson turns integers beyond 64 bits into doubles. Such an integer has at least 19 digits in a row; where no such run
        # exists, orjson is exact, and several times as fast as a parser that is always exact. A run of 19 digits covers one of
        # every 19th characters, which are checked first, because this code runs for each job and each event.
        if (
            len(text) < 19
            or _DIGIT not in text[18::19].encode().translate(_DIGITS)
            or _LONG not in text.encode().translate(_DIGITS)
        ):
            return orjson.loads(text)
        return json.loads(text, parse_float=_finite, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"the text is not valid JSON: {error}") from None


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is out of the range of a double")
    return number


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")


def check_numbers(text: str, what: str) -> str:
    """Return the JSON text. Raises `InvalidInput` when it contains a number that no double can represent."""
    if len(text) < 5 or not _ODD.search(text):
        return text
    for match in _TOKEN.finditer(text):
        number = match[1]
        if number is not None and (len(number) > _LONGEST_NUMBER or _beyond(number)):
            raise InvalidInput(
                f"{what} contains a number that no double can represent: {number[:40]}",
                hint="The magnitude of a number is at most 1.8e308, and 0 or at least 4.9e-324. Write other numbers as text.",
            )
    return text


def _beyond(number: str) -> bool:
    value = float(number)
    return math.isinf(value) or (value == 0.0 and any(digit in "123456789" for digit in re.split("[eE]", number)[0]))


def storable(text: str, what: str) -> str:
    """Return the JSON text. Raises `InvalidInput` for U+0000, which PostgreSQL cannot store, and as `check_numbers` does."""
    return _without_nul(check_numbers(text, what), what)


def _without_nul(text: str, what: str) -> str:
    if "\\u0000" in text and _NUL.search(text):
        raise InvalidInput(f"the payload of {what} contains the character U+0000", hint="PostgreSQL cannot store it in JSON.")
    return text


def plain_text(text: str) -> str:
    """Text from any source, such as an error message, with characters that PostgreSQL cannot store replaced."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def _default(value: object) -> object:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _brief(error: ValidationError | PydanticSerializationError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place + ': ' if place else ''}{first['msg']}"
    return str(error)
