"""What an application declares about timers and cron schedules: a part of `Penstock`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from penstock.errors import InvalidInput
from penstock.handler import group_of
from penstock.job import Options
from penstock.schedule import Cron, Every, Missed, RunsAs, Schedule, ScheduleHandler, Slot

if TYPE_CHECKING:
    from penstock.app import Penstock


class ScheduleDeclarations:
    """Declares timers and cron schedules."""

    def __init__(self) -> None:
        super().__init__()
        self.schedules: dict[str, Schedule] = {}

    def timer(
        self,
        *,
        every: timedelta,
        name: str | None = None,
        missed: Missed = "skip",
        options: Options | None = None,
        as_job: bool | None = None,
        per_worker: bool = False,
    ) -> Callable[[ScheduleHandler], ScheduleHandler]:
        """Declare a function that workers of this app run again and again.

        Each run is a job, of a type that has the schedule's name. A run never overlaps the one before: times that pass while that
        one waits, runs or is to be retried are missed.

        Args:
            every: From the beginning of one run to that of the next.
            name: Its name, and that of the job type of its runs; None: the function's with dashes.
            missed: What to do about times that passed while no worker ran, or while the run before had not ended: "skip" them,
                run "once" for the latest, or run "all".
            options: How the runs are delivered, retried and limited, as `Penstock.job` has it; None: 5 attempts, within five
                minutes each. `concurrency` is 1 unless given.
            as_job: False: one worker calls the function in place: nothing is retried and nothing archived, but each run costs
                less and waits for no place in the worker, as beats of every few seconds want it. None: a job, except with
                `per_worker`.
            per_worker: Each worker runs it for itself, in place, by the clock of its machine, instead of one of them for all.

        Raises:
            InvalidInput: The function or an option cannot be used.
        """
        return self._schedule(Every(every), name, missed, options, as_job, per_worker)

    def cron(
        self,
        expression: str,
        *,
        tz: str = "UTC",
        name: str | None = None,
        missed: Missed = "skip",
        options: Options | None = None,
        as_job: bool | None = None,
        per_worker: bool = False,
    ) -> Callable[[ScheduleHandler], ScheduleHandler]:
        """Declare a function that workers of this app run at the times of a cron expression, such as "0 4 * * *".

        Args:
            expression: Minute, hour, day, month, day of the week; as Debian's cron has it, with seconds before them if wanted.
            tz: The time zone in which it is meant.
            name: See `timer`.
            missed: See `timer`.
            options: See `timer`.
            as_job: See `timer`.
            per_worker: See `timer`.
        """
        return self._schedule(Cron(expression, tz), name, missed, options, as_job, per_worker)

    def _schedule(
        self,
        times: Every | Cron,
        name: str | None,
        missed: Missed,
        options: Options | None,
        as_job: bool | None,
        per_worker: bool,
    ) -> Callable[[ScheduleHandler], ScheduleHandler]:
        def declare(handler: ScheduleHandler) -> ScheduleHandler:
            named = name or getattr(handler, "__name__", "").replace("_", "-")
            runs_as: RunsAs = "per-worker" if per_worker else "in-place" if as_job is False else "job"
            if per_worker and as_job:
                raise InvalidInput(
                    f"schedule {named} runs in each worker for itself, which no job does", hint="Leave as_job out, or per_worker."
                )
            if runs_as != "job" and options is not None:
                raise InvalidInput(
                    f"schedule {named} runs in place, where options of jobs mean nothing",
                    hint="Leave options out, or as_job=False and per_worker.",
                )
            schedule = Schedule(named, times, handler, missed, runs_as)
            if named in self.schedules:
                raise InvalidInput(f"schedule {named} is declared twice", hint="Give each a name of its own.")
            if runs_as == "job":
                given = options or Options()
                limited = given if given.concurrency is not None else replace(given, concurrency=1)
                app = cast("Penstock", self)
                app._declare(named, Slot, limited, schedule.as_handler(), group_of(handler, "auto"))
            self.schedules[named] = schedule
            return handler

        return declare
