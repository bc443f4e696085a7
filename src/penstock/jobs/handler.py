"""Handlers: the `Job` that they handle, and the place where they run."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import MethodType
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args, overload
from uuid import UUID

from penstock.core import lending
from penstock.core.blocking import run_without_loop
from penstock.core.checks import check_choice
from penstock.core.dependencies import name_of, unwrapped
from penstock.core.logs import add_context
from penstock.core.tracing import trace_id_of
from penstock.core.user_code import check_no_generator, is_async
from penstock.errors import Conflict, InvalidInput
from penstock.jobs.child import ChildJob
from penstock.jobs.filling import Filling
from penstock.jobs.group_record import JobGroupRecord
from penstock.jobs.models import Executor
from penstock.jobs.steps import StepControl

T = TypeVar("T")
R = TypeVar("R")
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

    def steps(self) -> StepControl:
        """The durable steps of this run of the job. Raises `Conflict` where it can have none."""

    async def group(self) -> JobGroupRecord | None:
        """The job group of the job. Raises `Conflict` where the job has no database."""

    def group_blocking(self) -> JobGroupRecord | None:
        """`group` for handlers in threads."""

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
        lease: Number of the lease under which the job was claimed; None: it is stored nowhere.
        filling: The job groups that its handler fills; None: it fills none.
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
    lease: int | None = field(default=None, repr=False, compare=False)
    filling: Filling | None = field(default=None, repr=False, compare=False)

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

    @overload
    async def step(
        self, name: str, function: Callable[..., Awaitable[R]], /, *args: Any, connection: Any = None, **kwargs: Any
    ) -> R: ...
    @overload
    async def step(self, name: str, function: Callable[..., R], /, *args: Any, connection: Any = None, **kwargs: Any) -> R: ...
    async def step(self, name: str, function: Callable[..., Any], /, *args: Any, connection: Any = None, **kwargs: Any) -> Any:
        """Call a function once for this job, and keep what it returns: a further run of the job gets that, without the call.

            @app.job("order")
            async def order(job: Job[int]) -> None:
                paid = await job.step("pay", charge, job.data)

        When this returns, the result is committed, and the function is not called again, whatever becomes of this run. A process
        that dies between the call and the commit calls it again, unless the step is part of your own transaction. The code
        between steps runs again in each run.

        Args:
            name: Name of the step, its own in the job: 1 to 200 characters.
            function: An async function, or a plain one, which runs on the event loop. What it is annotated to return is the type
                of the result, as with a payload; without annotation it is JSON. At most 256 KiB.
            args: Arguments of the function.
            connection: Connection or session with a transaction, as for `finish`: the step is kept when it commits, together
                with what the function did in it. The function gets it as an argument when you give it one.
            kwargs: Arguments of the function by name.

        Raises:
            InvalidInput: The name was used in this run before, the result is too large or not JSON, or the step is to be kept
                outside a transaction that has another one and stays open: commit that first.
            Conflict: The job no longer belongs to this worker, it can have no steps, or the name was that of a sleep or a wait.
        """
        return await self._controlled().steps().do(name, function, args, kwargs, connection)

    def step_blocking(self, name: str, function: Callable[..., R], /, *args: Any, connection: Any = None, **kwargs: Any) -> R:
        """`step` for a plain handler in a thread, with a plain function, which runs in that thread."""
        result: R = self._controlled().steps().do_blocking(name, function, args, kwargs, connection)
        return result

    async def sleep(self, name: str, duration: timedelta) -> None:
        """Suspend the job until this time has passed since the first run that came here. It holds no place in a worker meanwhile.

        The run ends here, by an exception that handlers do not catch (it is no `Exception`), and a further run of the same
        attempt goes on here.

        Args:
            name: Name of the step, its own in the job.
            duration: How long, at most ten years.

        Raises:
            InvalidInput: The name was used in this run before, or the duration is not valid.
            Conflict: The job no longer belongs to this worker, or cannot be suspended: it may start only once.
        """
        await self._controlled().steps().sleep(name, duration)

    def sleep_blocking(self, name: str, duration: timedelta) -> None:
        """`sleep` for a plain handler in a thread."""
        steps = self._controlled().steps()
        steps.blocking(steps.sleep(name, duration))

    @overload
    async def wait_for(self, name: str, type: type[R], *, timeout: timedelta | None = None) -> R: ...
    @overload
    async def wait_for(self, name: str, type: Any = Any, *, timeout: timedelta | None = None) -> Any: ...
    async def wait_for(self, name: str, type: Any = Any, *, timeout: timedelta | None = None) -> Any:
        """Wait for a signal to this job (`Penstock.signal`), and return its value. The job is suspended meanwhile, as by `sleep`.

        The first signal of this name counts, also when it came before the wait. A wait that timed out has done so for every
        further run, and a signal that comes later is refused.

        Args:
            name: Name of the signal, its own among the steps of the job.
            type: Type of the value, as of a payload; `Any`: any JSON.
            timeout: How long to wait, at most ten years; None: for ever.

        Raises:
            TimeoutError: No signal came in time.
            Unreadable: The value does not have this type.
            InvalidInput: The name was used in this run before, or the timeout is not valid.
            Conflict: The job no longer belongs to this worker, or cannot be suspended: it may start only once.
        """
        return await self._controlled().steps().wait_for(name, type, timeout)

    def wait_for_blocking(self, name: str, type: Any = Any, *, timeout: timedelta | None = None) -> Any:
        """`wait_for` for a plain handler in a thread."""
        steps = self._controlled().steps()
        return steps.blocking(steps.wait_for(name, type, timeout))

    async def gather(self, name: str, children: Sequence[ChildJob]) -> list[Any]:
        """Enqueue jobs, suspend this one until all of them have ended, and return their results, in the order of the children.

            @app.job("album")
            async def album(job: Job[list[str]]) -> None:
                sizes = await job.gather("resize", [resize.child(image) for image in job.data])

        The children are those of a job group named `<id of the job>.<name>`: a further run finds them again. They are cancelled
        when this job fails or is cancelled. Their results are what their types keep (`keep_result=True`), otherwise None.

        Args:
            name: Name of the step, its own in the job.
            children: At most 10,000 jobs, as `JobType.child` makes them; use a job group for more.

        Raises:
            JobFailed: A child did not succeed. A further attempt raises it again: children are not repeated.
            InvalidInput: The name was used in this run before, a child is not valid, or the results are larger than 256 KiB.
            Conflict: The job no longer belongs to this worker, cannot be suspended, or had another number of children before.
        """
        return await self._controlled().steps().gather(name, children)

    def gather_blocking(self, name: str, children: Sequence[ChildJob]) -> list[Any]:
        """`gather` for a plain handler in a thread."""
        steps = self._controlled().steps()
        gathered: list[Any] = steps.blocking(steps.gather(name, children))
        return gathered

    async def group(self) -> JobGroupRecord | None:
        """The job group of this job, with the numbers of its children: of the `then` of a group that group, of a child its own.

            @app.job("report")
            async def report(job: Job[None]) -> None:
                group = await job.group()
                print(group.succeeded, "of", group.added)

        Returns:
            The group, which an enqueue takes as `group=`; None: the job is in none.
        """
        return await self._controlled().group()

    def group_blocking(self) -> JobGroupRecord | None:
        """`group` for a plain handler in a thread."""
        return self._controlled().group_blocking()

    @property
    def cancelled(self) -> bool:
        """Whether to stop: the job was cancelled, or its time limit has passed. A plain handler checks this in its loops."""
        return self.control is not None and self.control.cancelled

    def _controlled(self) -> JobControl:
        if self.control is None:
            raise Conflict(
                f"job {self.id} has no connection to its worker in this process",
                hint="extend(), progress(), log(), finish(), group() and steps work in async handlers and in threads, not in "
                "processes.",
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


def running_job() -> Job[Any] | None:
    """The job that runs here; None: none does."""
    return _current.get(None)


def _type_of_job() -> str | None:
    job = _current.get(None)
    return None if job is None else job.name


lending.job_here = _type_of_job


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
        InvalidInput: The handler yields, a process cannot import it, or an async one, which runs on the loop, is declared for
            another executor.
    """
    check_choice("executor", executor, get_args(Executor))
    function, _ = unwrapped(handler)
    check_no_generator(function, name_of(function))
    if is_async(function):
        if executor != "auto":
            raise InvalidInput(
                f"{name_of(function)} is async and runs on the loop, not in a {executor}",
                hint="Make it a plain def, or leave executor out.",
            )
        return "async"
    if executor == "process":
        check_importable(function, 'Define it in a module, outside of functions and objects, or leave executor="process" out.')
        return "process"
    return "thread"


def check_importable(function: Callable[..., Any], hint: str) -> None:
    """Refuse a function that a process cannot import by its name. Raises `InvalidInput`."""
    name = getattr(function, "__qualname__", None)
    bound = isinstance(function, MethodType) and not inspect.isclass(function.__self__)
    if name is None or "<" in name or bound:
        raise InvalidInput(
            f"{name_of(function)} cannot run in a process, which imports it by its name",
            hint=hint,
        )
