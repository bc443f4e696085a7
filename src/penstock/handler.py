"""What a handler is: a function of one `Job`, and how to find out its payload type and where it is to run."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, Protocol, TypeVar
from uuid import UUID

from penstock.errors import Conflict, InvalidInput
from penstock.job import Executor

T = TypeVar("T")
Group = Literal["async", "thread", "process"]


class JobControl(Protocol):
    """What a running job can ask of its worker."""

    async def extend(self, span: timedelta | None) -> None:
        """Make the job belong to this worker for `span` from now."""

    def extend_blocking(self, span: timedelta | None) -> None:
        """The same, from a thread."""

    def progress(self, value: Any) -> None:
        """Note how far the job is; from the loop or a thread."""

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked to cancel the job, or its time is up."""


@dataclass(slots=True)
class Job(Generic[T]):
    """A job as its handler gets it.

    Attributes:
        id: Identity of the job.
        name: Its job type.
        key: Whose job it is, or None.
        attempt: Which attempt this is, from 1.
        attempts: Attempts that are left, this one included.
        data: The payload.
        created_at: When it was enqueued, by the database's clock.
    """

    id: UUID
    name: str
    key: str | None
    attempt: int
    attempts: int
    data: T
    created_at: datetime
    control: JobControl | None = field(default=None, repr=False, compare=False)

    async def extend(self, span: timedelta | None = None) -> None:
        """Keep the job for `span` from now (None: the visibility timeout), in an async handler.

        Raises:
            Conflict: The job no longer belongs to this worker; stop working on it.
        """
        await self._controlled().extend(span)

    def extend_blocking(self, span: timedelta | None = None) -> None:
        """`extend` for a plain handler in a thread."""
        self._controlled().extend_blocking(span)

    def progress(self, value: Any) -> None:
        """Say how far the job is: any JSON, shown beside the job. Written about once a second, the last value wins."""
        self._controlled().progress(value)

    @property
    def cancelled(self) -> bool:
        """Whether to stop: somebody cancelled the job, or its time is up. A plain handler in a loop should look."""
        return self.control is not None and self.control.cancelled

    def _controlled(self) -> JobControl:
        if self.control is None:
            raise Conflict(
                f"job {self.id} cannot speak to its worker from here",
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


def group_of(handler: Handler, executor: Executor) -> Group:
    """Where a handler runs: on the loop, in a thread, or in a process. Raises `InvalidInput` for an async one elsewhere."""
    if inspect.iscoroutinefunction(handler):
        if executor != "auto":
            raise InvalidInput(
                f"{handler.__qualname__} is async, which runs on the loop, not in a {executor}",
                hint="Make it a plain def, or leave executor out.",
            )
        return "async"
    return "process" if executor == "process" else "thread"
