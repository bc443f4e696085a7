"""Records as JSON, and back: how what a record looks like is said once.

A record is a frozen dataclass of a capability. The SQL functions fill it, the HTTP server shows it, the clients read it, the
OpenAPI document is made of it. Where JSON is not what Python is, the annotation of the field says so: `Seconds`, `JobId`
(`penstock.jobs.records`), an alias.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import is_dataclass
from datetime import timedelta
from typing import Annotated, Any, TypeVar
from uuid import UUID

import orjson
from pydantic import BaseModel, ConfigDict, PlainSerializer, TypeAdapter

T = TypeVar("T")
_OPTIONS = orjson.OPT_UTC_Z | orjson.OPT_APPEND_NEWLINE | orjson.OPT_PASSTHROUGH_DATACLASS
Seconds = Annotated[timedelta, PlainSerializer(timedelta.total_seconds, return_type=float)]
"""A time span that is a number of seconds in JSON. The alias of the field ends in `_s`."""


def to_json(value: Any) -> bytes:
    """Records, or lists or dictionaries of them, as JSON with a newline; times end in Z."""
    return orjson.dumps(value, default=as_json, option=_OPTIONS)


def from_json(kind: type[T], content: bytes) -> T:
    """A record, or such as `list[Record]`, from JSON. Fields that it does not have are ignored. Raises `ValidationError`."""
    found: T = _adapter(kind).validate_json(content)
    return found


def from_object(kind: type[T], value: Any) -> T:
    """A record from what was JSON already. Raises `ValidationError`."""
    found: T = _adapter(kind).validate_python(value)
    return found


def as_json(value: Any) -> Any:
    """What orjson can write for a value that it cannot."""
    if isinstance(value, BaseModel):
        # What was not said is left out.
        return {name: given for name, given in value.__dict__.items() if name in value.model_fields_set}
    if is_dataclass(value):
        return _adapter(type(value)).dump_python(value, by_alias=True, warnings=False)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):  # the driver's own kind
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def raw(text: str | None, default: Any = None) -> Any:
    """JSON text as a part of an answer, to the digit."""
    return default if text is None else orjson.Fragment(text)


def raw_list(texts: Iterable[bytes]) -> Any:
    """A list of records that are JSON already, as a part of an answer."""
    return orjson.Fragment(b"[" + b",".join(texts) + b"]")


def example(value: dict[str, Any]) -> ConfigDict:
    """The configuration of a record, or model, with an example for the OpenAPI document."""
    return ConfigDict(json_schema_extra={"example": value})


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return _made(kind)


@functools.cache
def _made(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
