"""Handlers: functions of one `Job`, with their payload type and the place where they run."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, Protocol, TypeVar
from uuid import UUID

from penstock.errors import Conflict, InvalidInput
from penstock.jobs.models import Executor

T = TypeVar("T")
HandlerKind = Literal["async", "thread", "process"]


class JobControl(Protocol):
    """Operations that a running job requests from its worker."""

    async def extend(self, duration: timedelta | None) -> None:
        """Extend the job's lease to `duration` from now."""

    def extend_blocking(self, duration: timedelta | None) -> None:
        """`extend` for handlers in threads."""

    def progress(self, value: Any) -> None:
        """Record the progress of the job. Callable from the loop and from threads."""

    @property
    def cancelled(self) -> bool:
        """Whether a cancellation was requested, or the job's time limit has passed."""


@dataclass(slots=True)
class Job(Generic[T]):
    """A job as its handler receives it.

    Attributes:
        id: Identity of the job.
        name: Name of its job type.
        key: Key of the job (a tenant, an account), or None.
        attempt: Number of this attempt, from 1.
        attempts: Number of attempts that are left, this one included.
        data: Payload.
        created_at: Time of the enqueue, by the database's clock.
    """

    id: UUID
    name: str
    key: str | None
    attempt: int
    attempts: int
    data: T
    created_at: datetime
    control: JobControl | None = field(default=None, repr=False, compare=False)

    async def extend(self, duration: timedelta | None = None) -> None:
        """Extend the job's lease to `duration` from now (None: the visibility timeout).

        Raises:
            Conflict: The job no longer belongs to this worker; stop working on it.
        """
        await self._controlled().extend(duration)

    def extend_blocking(self, duration: timedelta | None = None) -> None:
        """`extend` for a plain handler in a thread."""
        self._controlled().extend_blocking(duration)

    def progress(self, value: Any) -> None:
        """Report the job's progress as any JSON value, shown beside the job. The last value is written about once a second."""
        self._controlled().progress(value)

    @property
    def cancelled(self) -> bool:
        """Whether to stop: the job was cancelled, or its time limit has passed. A plain handler checks this in its loops."""
        return self.control is not None and self.control.cancelled

    def _controlled(self) -> JobControl:
        if self.control is None:
            raise Conflict(
                f"job {self.id} has no connection to its worker in this process",
                hint="extend() and progress() work in async handlers and in threads, not in processes.",
            )
        return self.control


Handler = Callable[[Job[Any]], Awaitable[Any] | Any]


def payload_type(handler: Callable[..., Any]) -> Any:
    """The T of a handler's `job: Job[T]`; Any when it is not annotated. Raises `InvalidInput` for another signature."""
    parameters = [
        parameter
        for parameter in inspect.signature(handler).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    if len(parameters) != 1:
        raise InvalidInput(
            f"handler {handler.__qualname__} must take one argument, not {len(parameters)}",
            hint="Declare it as: async def handler(job: Job[Payload]) -> None",
        )
    try:
        hints = typing.get_type_hints(handler)
    except NameError as error:
        raise InvalidInput(
            f"cannot resolve the annotations of {handler.__qualname__}: {error}",
            hint="Define payload types at the top of the module.",
        ) from None
    hint = hints.get(parameters[0].name, Any)
    if hint is Any or hint is Job:
        return Any
    if typing.get_origin(hint) is Job:
        return typing.get_args(hint)[0]
    raise InvalidInput(
        f"handler {handler.__qualname__} must take a Job, not {hint}",
        hint="Declare it as: async def handler(job: Job[Payload]) -> None",
    )


def kind_of(handler: Handler, executor: Executor) -> HandlerKind:
    """Where a handler runs: on the loop, in a thread or in a process.

    Raises:
        InvalidInput: An async handler, which runs on the loop, is declared for another executor.
    """
    if inspect.iscoroutinefunction(handler):
        if executor != "auto":
            raise InvalidInput(
                f"{handler.__qualname__} is async and runs on the loop, not in a {executor}",
                hint="Make it a plain def, or leave executor out.",
            )
        return "async"
    return "process" if executor == "process" else "thread"
