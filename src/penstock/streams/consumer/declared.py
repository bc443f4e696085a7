"""Consumers as an application declares them: handler and options, before a database is open."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from penstock.core.dependencies import (
    Depends,
    Given,
    Plan,
    annotations_of,
    check_dependencies,
    depends_of,
    name_of,
    signature_of,
    taking,
    unwrapped,
)
from penstock.core.user_code import check_no_generator, is_async
from penstock.errors import InvalidInput
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.streams.consumer.batch import Batch, Events
from penstock.streams.consumer.consumer import Consumer
from penstock.streams.consumer.handling import EventHandler, Form, Handling, Middleware
from penstock.streams.consumer.options import ConsumerOptions
from penstock.streams.declared_stream import DeclaredStream
from penstock.streams.models import Event

_FORMS: dict[Any, Form] = {Event: "event", Batch: "batch", Events: "events"}
_HINT = "Declare it as: async def handler(event: Event[Payload]) -> None, or with Batch or Events"


@dataclass(frozen=True, slots=True)
class DeclaredConsumer:
    """A declared consumer of a group, callable like the function that it was made from. `Stream.consumer` makes it."""

    stream: DeclaredStream[Any]
    group: str
    function: EventHandler
    handling: Handling
    plan: Plan
    middleware: Sequence[Middleware]
    options: ConsumerOptions
    docs_url: str | None = None
    owner: str | None = None

    @property
    def name(self) -> str:
        """Name in the form "stream/group"."""
        return f"{self.stream.name}/{self.group}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the handler itself, as a plain function, with all of its arguments."""
        return self.function(*args, **kwargs)

    async def declare(self) -> None:
        """Create the stream in the database, unless it exists. The first member creates the group."""
        await self.stream.declare()

    async def consumer(self, database: Database, settings: Settings, id: str | None = None) -> Consumer[Any]:
        """A member of the group with this id; None: a new id."""
        await self.stream.ready()
        context = self.stream.context
        hooks = context.hooks
        # Middleware is called around each batch, which a handler that iterates takes by itself.
        iterates = self.handling.form == "events"
        around = hooks.dependencies(self.plan, Events) if iterates else hooks.around(self.plan, Batch, self.middleware)
        handling = replace(self.handling, around=around, tracing=context.tracing)
        return Consumer(database, self.stream.name, self.stream.encoding, self.group, self.options, settings, handling, id)


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
    function, injected = unwrapped(handler)
    annotations = annotations_of(function)
    filled: dict[str, Depends | Given] = dict(injected)
    taken: list[str] = []
    for name, parameter in signature_of(function).parameters.items():
        if name in injected:
            continue
        if (depends := depends_of(annotations.get(name))) is not None:
            filled[name] = depends
        elif parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            taken.append(name)
    if len(taken) != 1:
        raise InvalidInput(f"handler {name_of(function)} must take one argument, not {len(taken)}", hint=_HINT)
    form = _form(annotations.get(taken[0])) or ("event" if one else "batch")
    on_loop = is_async(function)
    check_no_generator(function, f"handler {name_of(function)}")
    if form == "events" and not on_loop:
        raise InvalidInput(f"{name_of(function)} iterates over events, so it must be async", hint="Declare it with async def.")
    if form == "events" and middleware:
        raise InvalidInput(f"{name_of(function)} iterates over events, so middleware cannot be called around each of them")
    plan = check_dependencies(filled, (Events if form == "events" else Batch,))
    handling = Handling(taking(function, taken[0]), form, on_loop)
    return DeclaredConsumer(stream, group, function, handling, plan, tuple(middleware), replace(options))


def _form(annotation: Any) -> Form | None:
    """The form that an annotation names: `Event`, `Batch` or `Events`; None: another one."""
    if typing.get_origin(annotation) is Annotated:
        annotation = annotation.__origin__
    return _FORMS.get(typing.get_origin(annotation) or annotation)
