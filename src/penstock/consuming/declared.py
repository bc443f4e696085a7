"""A consumer as an application declares it: its handler and options, without a database yet."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.consuming.batch import Batch, Events
from penstock.consuming.consumer import Consumer
from penstock.consuming.delivery import Deliver, EventHandler, Form, Middleware
from penstock.consuming.options import ConsumerOptions
from penstock.errors import InvalidInput
from penstock.event import Event
from penstock.postgres.database import Database
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.streams import Stream


@dataclass(frozen=True, slots=True)
class DeclaredConsumer:
    """What a consumer group does in this application."""

    stream: Stream[Any]
    group: str
    handler: EventHandler
    form: Form
    options: ConsumerOptions
    middleware: Sequence[Middleware]

    @property
    def name(self) -> str:
        """stream/group."""
        return f"{self.stream.name}/{self.group}"

    async def consumer(self, database: Database, settings: Settings, id: str | None = None) -> Consumer[Any]:
        """A member of the group; `id` None: a new one."""
        await self.stream.ready()
        deliver: Deliver[Any] = Deliver(self.handler, self.form, self.middleware)
        return Consumer(database, self.stream.name, self.stream.encoding, self.group, self.options, settings, deliver, id)


def declared_consumer(
    stream: Stream[Any],
    group: str,
    handler: EventHandler,
    options: ConsumerOptions,
    *,
    one: bool,
    middleware: Sequence[Middleware],
) -> DeclaredConsumer:
    """Check a declaration.

    Args:
        stream: The stream.
        group: Name of the group.
        handler: The handler.
        options: How to consume.
        one: What a handler without annotation takes: one event (or a batch).
        middleware: Functions around the handler.

    Raises:
        InvalidInput: The handler or an option cannot be used.
    """
    form = _form(handler) or ("event" if one else "batch")
    if form == "events" and not inspect.iscoroutinefunction(handler):
        raise InvalidInput(f"{handler.__qualname__} iterates over events, so it must be async")
    if form == "events" and middleware:
        raise InvalidInput(f"{handler.__qualname__} iterates over events, so middleware cannot be called around each of them")
    return DeclaredConsumer(stream, group, handler, form, replace(options), tuple(middleware))


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
