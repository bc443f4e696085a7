"""Timers and cron schedules: when they are due, what to do about times that passed while nobody worked, and how a run is a job.

Cron expressions are read by `cronsim`, which follows Debian's cron also where clocks change: a job between 0:00 and 3:00 runs
neither twice nor never on such a night, and one with `*` in its hours runs every real hour.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias, cast, get_args
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from pydantic import AwareDatetime

from penstock.errors import InvalidInput
from penstock.handler import Handler, Job

Missed: TypeAlias = Literal["skip", "once", "all"]
RunsAs: TypeAlias = Literal["job", "in-place", "per-worker"]
ScheduleHandler: TypeAlias = Callable[..., Any]
_TOLERANCE = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Tick:
    """One run of a schedule.

    Attributes:
        name: The schedule.
        at: The time for which it runs.
        late: How long after that it began.
    """

    name: str
    at: datetime
    late: timedelta


@dataclass(frozen=True, slots=True)
class Every:
    """Again and again after the same span."""

    span: timedelta

    @property
    def kind(self) -> str:
        """See `schedules.kind`."""
        return "every"

    @property
    def spec(self) -> str:
        """See `schedules.spec`."""
        return f"{self.span.total_seconds():g}"

    def after(self, moment: datetime, base: datetime) -> datetime:
        """The first time after `moment` that is a whole number of spans from `base`."""
        return base + (((moment - base) // self.span) + 1) * self.span

    def latest(self, moment: datetime, base: datetime) -> datetime:
        """The last time up to `moment`."""
        return self.after(moment, base) - self.span


@dataclass(frozen=True, slots=True)
class Cron:
    """At the times of a cron expression in a time zone."""

    expression: str
    tz: str

    def __post_init__(self) -> None:
        try:
            CronSim(self.expression, datetime.now(UTC))
        except CronSimError as error:
            raise InvalidInput(f"invalid cron expression {self.expression!r}: {error}", hint='For example "0 4 * * *".') from None
        try:
            ZoneInfo(self.tz)
        except (ZoneInfoNotFoundError, ValueError):
            raise InvalidInput(f"unknown time zone: {self.tz!r}", hint='For example "Europe/Berlin" or "UTC".') from None

    @property
    def kind(self) -> str:
        """See `schedules.kind`."""
        return "cron"

    @property
    def spec(self) -> str:
        """See `schedules.spec`."""
        return f"{self.expression} {self.tz}"

    def after(self, moment: datetime, base: datetime) -> datetime:
        """The first time after `moment`."""
        return next(CronSim(self.expression, moment.astimezone(ZoneInfo(self.tz)))).astimezone(UTC)

    def latest(self, moment: datetime, base: datetime) -> datetime:
        """The last time up to `moment`, from `base` on, which is one."""
        # Backwards at first, since there may be millions between; then forwards, which alone is right when clocks change.
        latest = base
        for _, before in zip(
            range(3), CronSim(self.expression, moment.astimezone(ZoneInfo(self.tz)), reverse=True), strict=False
        ):
            latest = max(base, before.astimezone(UTC))
        while (following := self.after(latest, base)) <= moment:
            latest = following
        return latest


@dataclass(frozen=True, slots=True)
class Slot:
    """The payload of a run that is a job. A job without a time, enqueued by hand, runs for the time at which it was enqueued."""

    at: AwareDatetime | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """What an application declared.

    Attributes:
        name: Its name.
        times: When it is due.
        handler: A function of a `Tick`, of a `Job[Tick]` (when its runs are jobs), or of nothing.
        missed: What to do about times that passed while nobody worked.
        runs_as: "job": each run is a job; "in-place": one worker calls the function itself; "per-worker": every worker does.
    """

    name: str
    times: Every | Cron
    handler: ScheduleHandler
    missed: Missed
    runs_as: RunsAs = "job"

    def __post_init__(self) -> None:
        if self.missed not in get_args(Missed):
            raise InvalidInput(f"unknown policy for missed times: {self.missed}", hint="Use skip, once or all.")
        if isinstance(self.times, Every) and self.times.span < timedelta(milliseconds=10):
            raise InvalidInput(f"{self.name} cannot run every {self.times.span}", hint="At most 100 times a second.")
        if self.runs_as == "per-worker" and self.missed != "skip":
            raise InvalidInput(
                f"schedule {self.name} runs in each worker, and cannot make up for times when there was none",
                hint="Leave missed out, or per_worker.",
            )
        wanted = len(_required(self.handler))
        if wanted > 1:
            raise InvalidInput(
                f"the function of schedule {self.name} takes {wanted} arguments",
                hint="It takes one, a Tick, or none: async def report(tick: Tick) -> None",
            )
        if self.runs_as != "job" and self.takes_job:
            raise InvalidInput(
                f"the function of schedule {self.name} takes a Job, but its runs are none",
                hint="Let it take a Tick, or leave as_job=False and per_worker out.",
            )

    @property
    def takes_tick(self) -> bool:
        """Whether the handler wants the `Tick`, by itself or in a `Job`."""
        return bool(_required(self.handler))

    @property
    def takes_job(self) -> bool:
        """Whether the handler wants a `Job[Tick]`."""
        required = _required(self.handler)
        if not required:
            return False
        try:
            hint = typing.get_type_hints(self.handler).get(required[0].name)
        except (NameError, TypeError):  # an annotation that only a type checker sees; an object that has none
            return False
        return hint is Job or typing.get_origin(hint) is Job

    def as_handler(self) -> Handler:
        """A handler of jobs, each of which is a run."""
        handler, takes_tick, takes_job = self.handler, self.takes_tick, self.takes_job

        def arguments(job: Job[Slot]) -> tuple[Any, ...]:
            if not takes_tick:
                return ()
            at = (job.data.at or job.created_at).astimezone(UTC)
            tick = Tick(self.name, at, max(datetime.now(UTC) - at, timedelta(0)))
            return (replace(cast("Job[Any]", job), data=tick),) if takes_job else (tick,)

        async def run(job: Job[Slot]) -> Any:
            return await handler(*arguments(job))

        def run_plain(job: Job[Slot]) -> Any:
            return handler(*arguments(job))

        return run if inspect.iscoroutinefunction(handler) else run_plain

    def decide(self, due: datetime, now: datetime) -> tuple[datetime | None, datetime]:
        """For which time to run now, if at all, and when it is due next.

        A time is missed when another one has passed since, or when it is more than a minute ago.
        """
        following = self.times.after(due, due)
        late = following <= now or now - due > _TOLERANCE
        if not late or self.missed == "all":
            return due, following
        after_now = self.times.after(now, due)
        if self.missed == "skip":
            return None, after_now
        return self.times.latest(now, due), after_now


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """A schedule with its last run, as the database has it.

    Attributes:
        name: Its name; with `runs_as` "job" that of its job type too.
        runs_as: "job", "in-place", or "per-worker".
        kind: "every" or "cron".
        spec: The seconds between two runs, or the cron expression with its time zone.
        next_at: When it is due next; None: each worker runs it by itself.
        last_at: The time for which it ran last.
        last_outcome: What became of that: "queued", "in-progress", "succeeded", "failed", "expired", "cancelled", or "lost" (its
            worker fell silent in the middle of a run in place); None: it has not run, or its job is no longer in the archive.
        last_error: The error of the last run, or attempt, that failed.
        last_error_at: When that was.
        last_started_at: When the last run started.
        last_finished_at: When it ended.
        last_worker: The worker that ran it.
        job_id: The job of the last run.
        declared: Whether a running worker declares it. False: it left the code, or no worker of that code runs.
        declared_at: When one last did.
    """

    name: str
    runs_as: str
    kind: str
    spec: str
    next_at: datetime | None
    last_at: datetime | None
    last_outcome: str | None
    last_error: str | None
    last_error_at: datetime | None
    last_started_at: datetime | None
    last_finished_at: datetime | None
    last_worker: str | None
    job_id: UUID | None
    declared: bool
    declared_at: datetime | None


def _required(handler: ScheduleHandler) -> list[inspect.Parameter]:
    """The parameters that have to be given by place."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(handler).parameters.values()
    return [each for each in parameters if each.default is each.empty and each.kind in positional]
