"""The key of an event or a job, from its payload: a field by its name, or a function.

With the name of a field that does not exist, nothing would have a key, and what has no key has no order. The name is therefore
checked against the payload type at the declaration, and against each payload where the type does not define its fields.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import BaseModel

from penstock.core.checks import did_you_mean
from penstock.errors import InvalidInput

KeyOf = Callable[[Any], str | None]
if TYPE_CHECKING:
    from typing import _SpecialForm

    PayloadForm: TypeAlias = types.UnionType | _SpecialForm
else:
    PayloadForm = Any
"""Payload types that are no classes, as type checkers see them: `A | B`, `Annotated[...]`. Their key functions take anything; an
overload that said so of every payload type would let mypy accept functions that do not fit a class."""
_MISSING: Any = object()
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, list, tuple, set, frozenset)


def check_key(what: str, payload: Any, key: Any) -> None:
    """Raise `InvalidInput` unless payloads of this type can have a key by this field or function.

    Args:
        what: Name of what has the key, for messages: "stream orders".
        payload: Payload type; Any: any payload.
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
        raise InvalidInput(f"key of {what} must name a field, not ''", hint="Leave it out where payloads have no rule for keys.")
    for one in _alternatives(payload):
        known = _fields_of(one)
        if known is None or key in known:
            continue
        name = getattr(one, "__name__", str(one))
        raise InvalidInput(
            f"key of {what} is {key!r}, and {name} has no such field",
            hint=did_you_mean(key, known) or (f"Its fields are {', '.join(sorted(known))}." if known else None),
        )


def key_of_field(what: str, field: str, optional: bool, checked: Callable[[Any], Any], hint: str) -> KeyOf:
    """The function that returns a field as the key. A payload whose field is null has no key.

    Args:
        what: What has the key, for messages: "an event of orders".
        field: Name of the field.
        optional: Whether a payload may lack the field.
        checked: Converts a mapping to the payload type, with the type's own names and defaults.
        hint: What to do when a payload lacks the field.
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
                    f"{what} has no field {field!r}, which is its declared key",
                    hint=hint,
                )
        return None if value is None else str(value)

    return key_of


def key_by(what: str, function: Callable[[Any], Any]) -> KeyOf:
    """The key function of an application; its errors and invalid results become errors of the payload. None: no key."""

    def key_of(data: Any) -> str | None:
        try:
            key = function(data)
        except Exception as error:
            raise InvalidInput(
                f"the key of {what} cannot be computed: {type(error).__name__}",
                hint="The function that was declared as key= failed for the payload.",
            ) from error
        if key is not None and not isinstance(key, str):
            raise InvalidInput(f"the key of {what} must be text, not {type(key).__name__}", hint="Return str(...), or None.")
        return key

    return key_of


def _alternatives(payload: Any) -> list[Any]:
    """The alternatives of a payload type, apart from None."""
    payload = _plain(payload)
    if typing.get_origin(payload) in (typing.Union, types.UnionType):
        return [one for member in typing.get_args(payload) for one in _alternatives(member)]
    return [] if payload in (None, type(None)) else [payload]


def _plain(payload: Any) -> Any:
    """A type without its annotations and aliases."""
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
    """The names of the attributes or fields of a payload type; None: they depend on the payload."""
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
