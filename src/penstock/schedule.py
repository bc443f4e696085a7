"""Timers and cron schedules: when they are due, and what to do about times that passed while nobody worked.

Cron expressions are read by `cronsim`, which follows Debian's cron also where clocks change: a job between 0:00 and 3:00 runs
neither twice nor never on such a night, and one with `*` in its hours runs every real hour.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from penstock.errors import InvalidInput

Missed: TypeAlias = Literal["skip", "once", "all"]
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
class Schedule:
    """What an application declared.

    Attributes:
        name: Its name.
        times: When it is due.
        handler: A function of a `Tick`, or of nothing.
        missed: What to do about times that passed while nobody worked.
        per_worker: Whether each worker runs it for itself, instead of one for all.
    """

    name: str
    times: Every | Cron
    handler: ScheduleHandler
    missed: Missed
    per_worker: bool

    def __post_init__(self) -> None:
        if self.missed not in get_args(Missed):
            raise InvalidInput(f"unknown policy for missed times: {self.missed}", hint="Use skip, once or all.")
        if isinstance(self.times, Every) and self.times.span < timedelta(milliseconds=10):
            raise InvalidInput(f"a timer cannot run every {self.times.span}", hint="Use at least 10 milliseconds.")
        if self.per_worker and self.missed != "skip":
            raise InvalidInput(
                f"schedule {self.name} runs in each worker, and cannot make up for times when there was none",
                hint="Leave missed out, or per_worker.",
            )

    @property
    def takes_tick(self) -> bool:
        """Whether the handler wants the `Tick`."""
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(self.handler).parameters.values()
        return any(each.default is each.empty and each.kind in positional for each in parameters)

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
