"""Timers and cron schedules: the policy for missed times, and the job handler of a run."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast, get_args

from pydantic import AwareDatetime, ConfigDict, Field

from penstock.core.dependencies import (
    Depends,
    Given,
    Plan,
    annotations_of,
    check_dependencies,
    depends_of,
    given_of,
    signature_of,
    unwrapped,
)
from penstock.core.hooks import Around
from penstock.core.keys import check_key, key_by
from penstock.core.records import example
from penstock.core.user_code import check_no_generator
from penstock.errors import InvalidInput
from penstock.jobs.handler import Handler, Job
from penstock.jobs.records import JobId, Status
from penstock.postgres.context import Context
from penstock.schedules.sync import SyncSchedule
from penstock.schedules.times import Cron, Every, times_of

Missed: TypeAlias = Literal["skip", "once", "all"]
RunsAs: TypeAlias = Literal["job", "in-place", "per-worker"]
ScheduleHandler: TypeAlias = Callable[..., Any]
_AT = "2026-01-11T18:26:26Z"
_TOLERANCE = timedelta(seconds=60)
# Times that differ by less fall on one instant: see `penstock.schedules.times`.
_ONE_INSTANT = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Tick:
    """One run of a schedule.

    Attributes:
        name: Name of the schedule.
        at: Time for which it runs, in the time zone of the schedule; of a timer, in UTC.
        late: How long after that time the run began.
    """

    name: str
    at: datetime
    late: timedelta


@dataclass(frozen=True, slots=True)
class Slot:
    """The payload of a run that is a job. A job without a time, enqueued manually, runs for the time of its enqueue."""

    at: AwareDatetime | None = None


@dataclass(frozen=True, slots=True)
class ScheduleSignature:
    """How the function of a schedule takes its run.

    Attributes:
        function: The function itself.
        parameter: Name of the parameter that takes the run; None: none does.
        takes_job: Whether it takes a `Job[Tick]` instead of a `Tick`.
        plan: Its dependencies.
    """

    function: ScheduleHandler
    parameter: str | None
    takes_job: bool
    plan: Plan

    def call(self, run: Any, dependencies: Mapping[str, Any]) -> Any:
        """Call the function for a `Tick` or a `Job[Tick]`."""
        return self.function(**({} if self.parameter is None else {self.parameter: run}), **dependencies)


def signature_of_schedule(name: str, handler: ScheduleHandler, runs_as: RunsAs) -> ScheduleSignature:
    """Read how a function takes its run. Raises `InvalidInput` when a parameter cannot be filled."""
    function, injected = unwrapped(handler)
    check_no_generator(function, getattr(function, "__qualname__", name))
    annotations = annotations_of(function)
    filled: dict[str, Depends | Given] = dict(injected)
    parameter: str | None = None
    takes_job = False
    for each, details in signature_of(function).parameters.items():
        annotation = annotations.get(each, Any)
        if each in injected:
            continue
        if (depends := depends_of(annotation)) is not None:
            filled[each] = depends
        elif details.default is not details.empty or details.kind in (details.VAR_POSITIONAL, details.VAR_KEYWORD):
            continue
        elif parameter is not None:
            raise InvalidInput(
                f"the function of schedule {name} cannot take {each} besides {parameter}",
                hint="It must take one, a Tick, or none, and dependencies: async def report(tick: Tick) -> None",
            )
        else:
            parameter, takes_job = each, given_of(annotation, (Job,)) is not None
    if runs_as != "job" and takes_job:
        raise InvalidInput(
            f"the function of schedule {name} takes a Job, but its runs are not jobs",
            hint="Let it take a Tick, or leave out as_job=False and per_worker.",
        )
    plan = check_dependencies(filled, (Job if runs_as == "job" else Tick,))
    return ScheduleSignature(function, parameter, takes_job, plan)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A declared schedule, callable like the function that it was made from.

    Attributes:
        name: Name of the schedule.
        times: Times at which it is due.
        handler: Function of a `Tick`, of a `Job[Tick]` (when its runs are jobs), or without arguments, and dependencies.
        missed: Policy for times that passed while no worker ran.
        runs_as: "job": each run is a job; "in-place": one worker calls the function itself; "per-worker": every worker does.
        around: How the function is called in place: middleware and dependencies; None: it has none.
        docs_url: Address of its documentation, or None.
        owner: Who answers for it, or None.
        key: Name of a field of a `Tick`, or a function of it, that gives a run its key; None: runs have no key.
        context: Open databases of its application; None: it belongs to none.
        write: Writes it into the database of its application.
    """

    name: str
    times: Every | Cron
    handler: ScheduleHandler
    missed: Missed
    runs_as: RunsAs = "job"
    around: Around | None = None
    docs_url: str | None = None
    owner: str | None = None
    key: str | Callable[[Tick], str | None] | None = None
    context: Context | None = field(default=None, repr=False, compare=False)
    write: Callable[[Schedule], Awaitable[None]] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_key(f"schedule {self.name}", Tick, self.key)
        if self.missed not in get_args(Missed):
            raise InvalidInput(f"unknown policy for missed times: {self.missed!r:.100}", hint="Use skip, once or all.")
        if self.runs_as == "per-worker" and self.missed != "skip":
            raise InvalidInput(
                f"schedule {self.name} runs in each worker and cannot make up for missed times",
                hint="Leave out missed or per_worker.",
            )
        self.signature  # noqa: B018 - it refuses a function that cannot be called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, with all of its arguments."""
        return self.handler(*args, **kwargs)

    async def declare(self) -> None:
        """Write the schedule into the database, with the job type of its runs; its times begin then, when it is new.

        `Penstock.declare`, `penstock declare MODULE:APP` and each worker that runs it do so. Opening the application does not.

        Raises:
            InvalidInput: The database refuses it.
            Conflict: The name of the job type is in use for something else.
        """
        if self.write is None:
            raise self._without_application()
        await self.write(self)

    @property
    def sync(self) -> SyncSchedule:
        """The blocking half, for threads without an event loop."""
        if self.context is None:
            raise self._without_application()
        return SyncSchedule(self, self.context.background)

    def _without_application(self) -> InvalidInput:
        return InvalidInput(f"schedule {self.name} belongs to no application", hint="Declare it with app.timer or app.cron.")

    @property
    def signature(self) -> ScheduleSignature:
        """How the function takes its run."""
        return signature_of_schedule(self.name, self.handler, self.runs_as)

    def tick(self, at: datetime, now: datetime) -> Tick:
        """A run, as the function takes it.

        Args:
            at: Time for which it runs.
            now: Time at which it begins.
        """
        return Tick(self.name, self.times.local(at), max(now - at, timedelta(0)))

    def key_of(self, at: datetime, now: datetime) -> str | None:
        """The key of a run by the declared rule, or None.

        Args:
            at: Time for which it runs.
            now: Time at which it is enqueued.

        Raises:
            InvalidInput: The rule fails, or its result is no key.
        """
        if self.key is None:
            return None
        tick = self.tick(at, now)
        if isinstance(self.key, str):
            return str(getattr(tick, self.key))
        return key_by(f"a run of schedule {self.name}", self.key)(tick)

    def as_handler(self) -> Handler:
        """The handler of the jobs that are runs of this schedule."""
        signature = self.signature

        @functools.wraps(signature.function)
        def run(job: Job[Slot], /, **dependencies: Any) -> Any:
            tick = self.tick(job.data.at or job.created_at, datetime.now(UTC))
            return signature.call(replace(cast("Job[Any]", job), data=tick) if signature.takes_job else tick, dependencies)

        return run

    def decide(self, due: datetime, now: datetime) -> tuple[datetime | None, datetime]:
        """Return the time for which to run now (None: no run), and the time at which the schedule is due next.

        A time is missed when a later one has passed, or when it is more than a minute ago.

        Args:
            due: Time at which the schedule was due.
            now: Time of the database.
        """
        following = self.times.after(due, due)
        passed = following <= now and following - due >= _ONE_INSTANT
        late = passed or now - due > _TOLERANCE
        if not late or self.missed == "all":
            return due, following
        after_now = self.times.after(now, due)
        if self.missed == "skip":
            return None, after_now
        return self.times.latest(now, due), after_now


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """A schedule with its last run, as it is stored.

    Attributes:
        name: Name of the schedule; with `runs_as` "job" also that of its job type.
        runs_as: "job", "in-place", or "per-worker".
        kind: "every" or "cron".
        spec: Seconds between two runs, or the cron expression with its time zone.
        next_at: Time at which it is due next; None: each worker runs it by itself.
        last_at: Time for which it ran last.
        last_outcome: Outcome of that run: "queued", "in-progress", "succeeded", "failed", "expired", "cancelled", or "lost" (its
            worker became silent during a run in place); None: it has not run, or its job is no longer in the archive.
        last_error: Error of the last failed run or attempt.
        last_error_at: Time of that error.
        last_started_at: Time at which the last run started.
        last_finished_at: Time at which it ended.
        last_worker: Worker that ran it.
        job_id: Job of the last run.
        declared: Whether a running worker declares it. False: it was removed from the code, or no worker with that code runs.
        declared_at: Time of the last declaration by a worker.
        failures: Runs in a row that failed, expired or were lost.
        requested_at: Time at which a run in place was requested that has not ended.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "name": "close-the-day", "runs_as": "job", "kind": "cron", "spec": "0 0 * * * Europe/Berlin", "next_at": _AT,
        "last_at": _AT, "last_outcome": "failed", "last_error": "ValueError: no takings", "last_error_at": _AT,
        "last_started_at": _AT, "last_finished_at": _AT, "last_worker": "web-3-4711",
        "job_id": "job_282227eb-3c76-4ef7-af7e-25dff933077f", "declared": True, "declared_at": _AT, "failures": 1,
        "requested_at": None,
    })  # fmt: skip

    name: str
    runs_as: Annotated[
        str, Field(description="job: of the type of the same name; in-place: by one worker; per-worker: by each of them.")
    ]
    kind: Annotated[str, Field(description="every or cron.")]
    spec: Annotated[str, Field(description="Seconds between two runs, or the cron expression with its time zone.")]
    next_at: Annotated[datetime | None, Field(description="When it is due next; null: each worker runs it by itself.")]
    last_at: Annotated[datetime | None, Field(description="The time for which it ran last.")]
    last_outcome: Annotated[
        str | None,
        Field(
            description="queued, in-progress, succeeded, failed, expired, cancelled, or lost (with its worker); null: unknown."
        ),
    ]
    last_error: Annotated[str | None, Field(description="The error of the last run, or attempt, that failed.")]
    last_error_at: datetime | None
    last_started_at: datetime | None
    last_finished_at: datetime | None
    last_worker: str | None
    job_id: Annotated[JobId | None, Field(description="The job of the last run.")]
    declared: Annotated[
        bool, Field(description="Whether a running worker declares it; false: it left the code, or no such worker runs.")
    ]
    declared_at: datetime | None
    failures: Annotated[int, Field(description="Runs in a row that failed, expired or were lost.")] = 0
    requested_at: Annotated[
        datetime | None, Field(description="When a run in place was asked for that has not ended; null: none is.")
    ] = None

    def upcoming(self, count: int = 3) -> list[datetime]:
        """The next times at which it is due, at most `count`, in its time zone; none for one that each worker runs by itself.

        A schedule whose times this library cannot read, since another program declared them, has only the time that is stored.
        """
        if self.next_at is None:
            return []
        try:
            times = times_of(self.kind, self.spec)
        except InvalidInput:
            return [self.next_at][:count]
        found = [times.local(self.next_at)]
        while len(found) < count:
            found.append(times.local(times.after(found[-1], self.next_at)))
        return found[:count]


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """One run of a schedule whose runs are jobs.

    Attributes:
        id: The job.
        status: Status of the job.
        at: Time for which it ran, or is to run.
        started_at: Time at which its last attempt started.
        finished_at: Time at which it ended.
        worker: Worker of its last attempt.
        attempt: Number of its last attempt, or, while it waits, of the next one.
        error: Error of its last failed attempt.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "id": "job_282227eb-3c76-4ef7-af7e-25dff933077f", "status": "failed", "at": _AT, "started_at": _AT, "finished_at": _AT,
        "worker": "web-3-4711", "attempt": 5, "error": "ValueError: no takings",
    })  # fmt: skip

    id: JobId
    status: Status
    at: Annotated[datetime, Field(description="The time for which it ran, or is to run.")]
    started_at: datetime | None
    finished_at: datetime | None
    worker: str | None
    attempt: int
    error: Annotated[str | None, Field(description="The error of its last failed attempt.")]
