"""Durable steps, as a handler asks for them through its `Job`; `worker/steps.py` does them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, Protocol
from uuid import UUID

from pydantic import ConfigDict

from penstock.core.records import example
from penstock.jobs.child import ChildJob

StepKind = Literal["step", "sleep", "wait", "gather", "signal"]
StepState = Literal["done", "waiting", "begun", "timed-out", "early"]


class Suspended(BaseException):
    """Raised in a handler whose job is suspended: it ends this run, and the job goes on when what it waits for is there.

    It is no `Exception`, so that a handler does not catch it with those. What it passes (`finally`, `async with`) runs.

    Args:
        step: Name of the step for which the job waits.
    """

    def __init__(self, step: str) -> None:
        super().__init__(f"suspended until the end of the step {step}")
        self.step = step


class SuspensionCaught(RuntimeError):
    """A handler returned although this run was to end with a suspension, which it caught: what it waits for has not happened.

    Args:
        step: Name of the step for which the job waits.
    """

    def __init__(self, step: str) -> None:
        super().__init__(
            f"the handler returned although the step {step} had not ended: it caught Suspended, the exception that ends a run. "
            "Catch Exception instead of BaseException, return nothing in finally, and let sleep, wait_for and gather be awaited "
            "where their exception is raised again: not in asyncio.gather(return_exceptions=True), asyncio.wait or a thread."
        )


def suspended_by(error: BaseException) -> str | None:
    """The step for which a job is suspended whose handler raised this error; None: it is another error.

    A task group of the handler raises a group, which counts when nothing else went wrong in it.
    """
    if isinstance(error, Suspended):
        return error.step
    if isinstance(error, BaseExceptionGroup):
        suspended, others = error.split(Suspended)
        found: BaseException | None = suspended
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        return found.step if isinstance(found, Suspended) and others is None else None
    return None


class StepControl(Protocol):
    """The durable steps of one run of a job."""

    async def do(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], connection: Any
    ) -> Any:
        """See `Job.step`."""

    def do_blocking(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], connection: Any
    ) -> Any:
        """See `Job.step_blocking`."""

    async def sleep(self, name: str, duration: timedelta) -> None:
        """See `Job.sleep`."""

    async def wait_for(self, name: str, type: Any, timeout: timedelta | None) -> Any:
        """See `Job.wait_for`."""

    async def gather(self, name: str, children: Sequence[ChildJob]) -> list[Any]:
        """See `Job.gather`."""

    def blocking(self, call: Any) -> Any:
        """Run one of these coroutines on the loop of the worker, from the thread of a handler."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A durable step of a job as it is stored.

    Attributes:
        name: Name of the step.
        kind: `step`, `sleep`, `wait` (for a signal), `gather` (for children), or `signal`: for which the job does not wait yet.
        state: `done`; `waiting`: the job is suspended for this step; `begun`: it has not ended, and the job is not suspended for
            it; `timed-out`: the wait is over without its signal; `early`: a signal for which the job does not wait yet.
        at: Time at which the step was done; of what waits, at which it began to wait.
        due: Time at which a sleep ends, or a wait is over without its signal; None: it has no such time.
        group: Id of the job group of the children, of a step that gathers.
        size: Number of bytes of the result as JSON text in the database; None: there is none.
        result: What the step returned, what was signalled, or the results of the children; None also while it waits. Over HTTP
            the results of a page have 1 MiB together: the largest are left out beyond that.
        signalled_at: Time of the signal, or of the timeout, of a wait; None: it waits, or is no wait.
        cursor: Where the next page begins when this is the last step of a page.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "name": "approved", "kind": "wait", "state": "waiting", "at": "2026-01-11T18:26:26Z", "due": "2026-01-18T18:26:26Z",
        "group": None, "size": None, "result": None, "signalled_at": None,
        "cursor": "1768155986000000:wait:approved",
    })  # fmt: skip

    name: str
    kind: StepKind
    state: StepState
    at: datetime
    due: datetime | None
    group: UUID | None
    size: int | None
    result: Any
    signalled_at: datetime | None
    cursor: str

    @property
    def timed_out(self) -> bool:
        """Whether the wait is over without its signal."""
        return self.state == "timed-out"

    @property
    def about(self) -> str:
        """What became of the step, in words without times."""
        if self.state == "waiting":
            waits = {"sleep": "the job sleeps", "wait": "the job waits for this signal"}
            return waits.get(self.kind, "the job waits for its children")
        others = {"begun": "has not ended", "timed-out": "no signal came in time", "early": "the job does not wait for it yet"}
        return others.get(self.state, "done")
