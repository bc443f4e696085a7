"""Handlers: the `Job` that they handle, and the place where they run."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args
from uuid import UUID

from penstock.core.blocking import run_without_loop
from penstock.core.checks import check_choice
from penstock.core.dependencies import name_of, unwrapped
from penstock.core.logs import add_context
from penstock.core.tracing import trace_id_of
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

    def log(self, line: str) -> None:
        """Add a line to the log of the job. Callable from the loop and from threads."""

    def finish(self, connection: Any, result: Any) -> Coroutine[Any, Any, None]:
        """Finish the job in the transaction of a connection. The call runs on the loop, or without one in a handler's thread."""

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
        max_attempts: Number of attempts that the job may have.
        data: Payload.
        created_at: Time of the enqueue, by the database's clock.
        snoozes: How often the handler has put this job off (`Snooze`).
        traceparent: Trace context (W3C) of the handler's span, or of the producer when this application makes no spans; None:
            there is none.
    """

    id: UUID
    name: str
    key: str | None
    attempt: int
    max_attempts: int
    data: T
    created_at: datetime
    control: JobControl | None = field(default=None, repr=False, compare=False)
    snoozes: int = 0
    traceparent: str | None = None

    async def extend(self, duration: timedelta | None = None) -> None:
        """Extend the job's lease to `duration` from now (None: the visibility timeout).

        Args:
            duration: Length of the lease from now; None: the visibility timeout.

        Raises:
            Conflict: The job no longer belongs to this worker; stop working on it.
        """
        await self._controlled().extend(duration)

    def extend_blocking(self, duration: timedelta | None = None) -> None:
        """`extend` for a plain handler in a thread."""
        self._controlled().extend_blocking(duration)

    def progress(self, value: Any) -> None:
        """Report the job's progress as any JSON value, shown beside the job. The last value is written about once a second.

        Args:
            value: Any JSON value.
        """
        self._controlled().progress(value)

    def log(self, line: str) -> None:
        """Log a line with the job, where `find` and `penstock jobs show` show it, also when the job is finished.

        Lines are written about once a second. The newest 100 are kept, of each the first 1,000 characters.

        Args:
            line: Text of the line.

        Raises:
            InvalidInput: The line is not text.
        """
        self._controlled().log(line)

    async def finish(self, connection: Any, *, result: Any = None) -> None:
        """End the job as succeeded in your own transaction: exactly once, together with what the transaction does.

        The job is finished when the transaction commits. When it is rolled back, the job is not finished, and is retried. After
        the commit it does not matter how the handler ends. Call it last: while the transaction is open, `extend` is refused.

        Args:
            connection: Connection or session of asyncpg, psycopg, SQLAlchemy or Django with a transaction, in this database.
            result: Result of the job, any JSON, which is kept.

        Raises:
            Conflict: The job no longer belongs to this worker, or it runs in a process: do not commit.
            InvalidInput: The connection is of no supported kind, or has no transaction open.
        """
        await self._controlled().finish(connection, result)

    def finish_blocking(self, connection: Any, *, result: Any = None) -> None:
        """`finish` for a plain handler in a thread, with a connection or session whose driver blocks."""
        run_without_loop(self._controlled().finish(connection, result))

    @property
    def cancelled(self) -> bool:
        """Whether to stop: the job was cancelled, or its time limit has passed. A plain handler checks this in its loops."""
        return self.control is not None and self.control.cancelled

    def _controlled(self) -> JobControl:
        if self.control is None:
            raise Conflict(
                f"job {self.id} has no connection to its worker in this process",
                hint="extend(), progress(), log() and finish() work in async handlers and in threads, not in processes.",
            )
        return self.control


_current: ContextVar[Job[Any]] = ContextVar("penstock_job")
set_current_job = _current.set


def current_job() -> Job[Any]:
    """The job that runs here: in its handler, in the functions and threads that it calls, and in its dependencies.

    Raises:
        Conflict: No job runs here.
    """
    job = _current.get(None)
    if job is None:
        raise Conflict("no job runs here", hint="current_job() works within the handler of a job.")
    return job


def _fields_of_job() -> dict[str, Any]:
    job = _current.get(None)
    if job is None:
        return {}
    fields = {"job_id": str(job.id), "job_type": job.name, "key": job.key, "attempt": job.attempt}
    return fields if job.traceparent is None else {**fields, "trace_id": trace_id_of(job.traceparent)}


# Lines that a handler logs say which job they are of.
add_context(_fields_of_job)


class Jobs(list[Job[T]]):
    """The jobs of a batch, as a batch handler receives them: a list."""


Handler = Callable[..., Awaitable[Any] | Any]


def kind_of(handler: Handler, executor: Executor) -> HandlerKind:
    """Where a function that handles jobs runs: on the loop, in a thread or in a process.

    Raises:
        InvalidInput: An async handler, which runs on the loop, is declared for another executor.
    """
    check_choice("executor", executor, get_args(Executor))
    function, _ = unwrapped(handler)
    if inspect.iscoroutinefunction(function):
        if executor != "auto":
            raise InvalidInput(
                f"{name_of(function)} is async and runs on the loop, not in a {executor}",
                hint="Make it a plain def, or leave executor out.",
            )
        return "async"
    return "process" if executor == "process" else "thread"
