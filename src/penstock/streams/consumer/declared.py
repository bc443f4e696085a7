"""Consumers as an application declares them: handler and options, before a database is open."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import InvalidInput
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.streams.consumer.batch import Batch, Events
from penstock.streams.consumer.consumer import Consumer
from penstock.streams.consumer.handling import EventHandler, Form, Handling, Middleware
from penstock.streams.consumer.options import ConsumerOptions
from penstock.streams.declared_stream import DeclaredStream
from penstock.streams.models import Event


@dataclass(frozen=True, slots=True)
class DeclaredConsumer:
    """A declared consumer of a group."""

    stream: DeclaredStream[Any]
    group: str
    handling: Handling
    options: ConsumerOptions

    @property
    def name(self) -> str:
        """Name in the form "stream/group"."""
        return f"{self.stream.name}/{self.group}"

    async def consumer(self, database: Database, settings: Settings, id: str | None = None) -> Consumer[Any]:
        """A member of the group with this id; None: a new id."""
        await self.stream.ready()
        return Consumer(database, self.stream.name, self.stream.encoding, self.group, self.options, settings, self.handling, id)


def declared_consumer(
    stream: DeclaredStream[Any],
    group: str,
    handler: EventHandler,
    options: ConsumerOptions,
    *,
    one: bool,
    middleware: Sequence[Middleware],
) -> DeclaredConsumer:
    """Check the declaration of a consumer.

    Args:
        stream: Stream to consume.
        group: Name of the group.
        handler: Handler of the events.
        options: Options of the consumer.
        one: Whether a handler without annotation takes one event; otherwise it takes a batch.
        middleware: Functions that are called around the handler.

    Raises:
        InvalidInput: The handler or an option cannot be used.
    """
    form = _form(handler) or ("event" if one else "batch")
    if form == "events" and not inspect.iscoroutinefunction(handler):
        raise InvalidInput(f"{handler.__qualname__} iterates over events, so it must be async", hint="Declare it with async def.")
    if form == "events" and middleware:
        raise InvalidInput(f"{handler.__qualname__} iterates over events, so middleware cannot be called around each of them")
    return DeclaredConsumer(stream, group, Handling(handler, form, tuple(middleware)), replace(options))


def _form(handler: EventHandler) -> Form | None:
    parameters = [
        parameter
        for parameter in inspect.signature(handler).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    if len(parameters) != 1:
        raise InvalidInput(
            f"handler {handler.__qualname__} must take one argument, not {len(parameters)}",
            hint="Declare it as: async def handler(event: Event[Payload]) -> None, or with Batch or Events",
        )
    try:
        hint = typing.get_type_hints(handler).get(parameters[0].name, Any)
    except NameError as error:
        raise InvalidInput(
            f"cannot resolve the annotations of {handler.__qualname__}: {error}",
            hint="Define payload types at the top of the module.",
        ) from None
    forms: dict[Any, Form] = {Event: "event", Batch: "batch", Events: "events"}
    return forms.get(typing.get_origin(hint) or hint)
