"""Payloads: from Python values to the JSON that is stored, and back, checked.

A payload type can be anything pydantic understands: a model, a dataclass, a TypedDict, `dict[str, int]`, `str`, or nothing at
all (`Any`), which is plain JSON.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import orjson
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from penstock.errors import InvalidInput

T = TypeVar("T")
# An escape of U+0000 whose backslash is not itself escaped.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


class Codec(Generic[T]):
    """Writes and reads payloads of one type.

    Args:
        type_: The payload type; Any for plain JSON.
        what: What the payload is of, for error messages.
    """

    def __init__(self, type_: Any, what: str) -> None:
        self._what = what
        try:
            self._adapter: TypeAdapter[T] | None = None if type_ is Any else TypeAdapter(type_)
        except PydanticUserError as error:
            raise InvalidInput(f"{what} cannot have payloads of {type_}", hint=error.message) from None

    def dump(self, value: T) -> str:
        """The JSON text of a payload. Raises `InvalidInput` when it does not fit the type or JSON."""
        if self._adapter is None:
            return dump_json(value, self._what)
        try:
            # A value that only looks like the type (a dict for a model) is accepted when it validates.
            checked = self._adapter.validate_python(value)
            return storable(self._adapter.dump_json(checked).decode(), self._what)
        except (ValidationError, PydanticSerializationError) as error:
            raise InvalidInput(f"invalid payload for {self._what}: {_brief(error)}") from None

    def load(self, text: str) -> T:
        """The payload of a JSON text. Raises `InvalidInput` when it does not fit the type."""
        if self._adapter is None:
            value: T = orjson.loads(text)
            return value
        try:
            return self._adapter.validate_json(text)
        except ValidationError as error:
            raise InvalidInput(f"invalid payload for {self._what}: {_brief(error)}") from None


def dump_json(value: object, what: str) -> str:
    """The JSON text of a plain value. Raises `InvalidInput` when it has none, or one that PostgreSQL cannot store."""
    try:
        text = orjson.dumps(value, default=_default).decode()
    except (TypeError, orjson.JSONEncodeError, UnicodeError) as error:
        raise InvalidInput(
            f"the payload of {what} is not JSON: {error}", hint="Use dicts, lists, text, numbers, or declare its type."
        ) from None
    return storable(text, what)


def storable(text: str, what: str) -> str:
    """The same JSON text. Raises `InvalidInput` when it has the one character that PostgreSQL cannot store."""
    if "\\u0000" in text and _NUL.search(text):
        raise InvalidInput(f"the payload of {what} contains the character U+0000", hint="PostgreSQL cannot store it in JSON.")
    return text


def plain_text(text: str) -> str:
    """A text from anywhere, such as an error message, with what cannot be stored replaced."""
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
