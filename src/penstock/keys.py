"""How a stream takes the key of an event from its payload: a field by its name, or a function.

A field that does not exist would give every event no key, and events without a key have no order. So a name is checked against
the payload type where the stream is declared, and against the payload where the type does not say which fields there are.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from penstock.errors import InvalidInput

KeyOf = Callable[[Any], str | None]
_MISSING: Any = object()
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, list, tuple, set, frozenset)


def check_key(what: str, payload: Any, key: Any) -> None:
    """Raise `InvalidInput` unless payloads of this type can have a key by this field or function.

    Args:
        what: Whose key it is, for messages: "stream orders".
        payload: The payload type; Any: anything.
        key: Name of a field, a function of a payload, or None.
    """
    if key is None:
        return
    if not isinstance(key, str):
        if not callable(key) or inspect.iscoroutinefunction(key):
            raise InvalidInput(
                f"key of {what} must be the name of a field or a plain function, not {key!r:.100}",
                hint='For example: key="customer", or key=lambda order: order.customer',
            )
        return
    if not key:
        raise InvalidInput(f"key of {what} must name a field, not ''", hint="Leave it out for events without a rule for keys.")
    for one in _alternatives(payload):
        known = _fields_of(one)
        if known is None or key in known:
            continue
        name = getattr(one, "__name__", str(one))
        near = difflib.get_close_matches(key, known, 1)
        raise InvalidInput(
            f"key of {what} is {key!r}, and {name} has no such field",
            hint=f"Did you mean {near[0]!r}?" if near else f"Its fields are {', '.join(sorted(known))}." if known else None,
        )


def key_of_field(what: str, field: str, optional: bool, checked: Callable[[Any], Any]) -> KeyOf:
    """The function that takes a field as the key. A field that is null says that the event has no key.

    Args:
        what: Whose key it is, for messages.
        field: Its name.
        optional: Whether an event need not have the field.
        checked: A mapping as the payload type that it stands for, with the type's own names and defaults.
    """

    def of(data: Any) -> Any:
        return data.get(field, _MISSING) if isinstance(data, Mapping) else getattr(data, field, _MISSING)

    def key_of(data: Any) -> str | None:
        value = data.get(field, _MISSING) if isinstance(data, dict) else getattr(data, field, _MISSING)
        if value is _MISSING:
            value = of(checked(data))
            if value is _MISSING:
                if optional:
                    return None
                raise InvalidInput(
                    f"an event of {what} has no field {field!r}, which is to be its key",
                    hint="Append it with a key (key=..., or NewEvent), or declare the stream with key_optional=True.",
                )
        return None if value is None else str(value)

    return key_of


def key_by(what: str, function: Callable[[Any], Any]) -> KeyOf:
    """A function of an application, whose errors and odd answers are those of the event. None says that the event has no key."""

    def key_of(data: Any) -> str | None:
        try:
            key = function(data)
        except Exception as error:
            raise InvalidInput(
                f"the key of an event of {what} cannot be told: {type(error).__name__}",
                hint="The function that the stream was declared with as key= failed with the payload.",
            ) from error
        if key is not None and not isinstance(key, str):
            raise InvalidInput(f"a key of {what} must be text, not {type(key).__name__}", hint="Return str(...), or None.")
        return key

    return key_of


def _alternatives(payload: Any) -> list[Any]:
    """The types of which a payload is one, apart from None."""
    payload = _plain(payload)
    if typing.get_origin(payload) in (typing.Union, types.UnionType):
        return [one for member in typing.get_args(payload) for one in _alternatives(member)]
    return [] if payload in (None, type(None)) else [payload]


def _plain(payload: Any) -> Any:
    """A type without what is said about it."""
    while True:
        if typing.get_origin(payload) is typing.Annotated:
            payload = typing.get_args(payload)[0]
        elif isinstance(payload, typing.NewType):
            payload = payload.__supertype__
        elif hasattr(payload, "__value__"):  # type X = ...
            payload = payload.__value__
        else:
            return payload


def _fields_of(payload: Any) -> set[str] | None:
    """Names by which a payload of this type has something; None: that depends on the payload."""
    of = typing.get_origin(payload) or payload
    if not isinstance(of, type):
        return set() if typing.get_origin(payload) is typing.Literal else None
    if issubclass(of, dict) and hasattr(of, "__required_keys__"):  # a TypedDict
        return {*of.__required_keys__, *vars(of)["__optional_keys__"]}
    if issubclass(of, tuple) and hasattr(of, "_fields"):
        return set(of._fields) | _properties(of)
    if issubclass(of, _PLAIN):
        return set()
    if issubclass(of, BaseModel):
        return None if of.model_config.get("extra") == "allow" else set(of.model_fields) | _properties(of)
    if dataclasses.is_dataclass(of):
        return {field.name for field in dataclasses.fields(of)} | _properties(of)
    if hasattr(of, "__struct_fields__"):
        return set(of.__struct_fields__) | _properties(of)
    return None


def _properties(of: type) -> set[str]:
    return {
        name
        for base in of.__mro__
        for name, member in vars(base).items()
        if not name.startswith("_") and not callable(member) and hasattr(type(member), "__get__")
        and not isinstance(member, (classmethod, staticmethod))
    } - {"model_fields_set", "model_extra", "model_computed_fields", "model_fields"}  # fmt: skip
