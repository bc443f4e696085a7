"""Declarations of timers and cron schedules, as `Penstock` offers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from typing_extensions import Unpack

from penstock.core.checks import check_documentation, check_flag, check_name
from penstock.errors import InvalidInput
from penstock.jobs.declarations import JobDeclarations, JobOptions, options_of
from penstock.jobs.handler import kind_of
from penstock.jobs.job_type import JobType
from penstock.jobs.signature import Signature
from penstock.postgres.context import Context
from penstock.schedules.schedule import Missed, RunsAs, Schedule, ScheduleHandler, Slot, Tick
from penstock.schedules.scheduler import declare as declare_schedule
from penstock.schedules.times import Cron, Every

_OF_SCHEDULES = ("every", "tz", "name", "key", "missed", "as_job", "per_worker")


class ScheduleDeclarations(JobDeclarations):
    """Declares timers and cron schedules."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.schedules: dict[str, Schedule] = {}

    def timer(
        self,
        *,
        every: timedelta,
        name: str | None = None,
        key: str | Callable[[Tick], str | None] | None = None,
        missed: Missed = "skip",
        as_job: bool | None = None,
        per_worker: bool = False,
        **options: Unpack[JobOptions],
    ) -> Callable[[ScheduleHandler], Schedule]:
        """Declare a function that workers of this app run at regular intervals.

        Each run is a job of a type with the schedule's name. A run never overlaps the one before: times that pass while that run
        is queued, running or waiting for a retry are missed.

        Args:
            every: Time from the beginning of one run to the beginning of the next.
            name: Name of the schedule and of the job type of its runs; None: the function's name with dashes.
            key: Name of a field of `Tick`, or a function of it, that gives the job of a run its key, as in
                `key=lambda tick: f"{tick.at:%Y-%m}"`; None: runs have no key.
            missed: Policy for times that passed while no worker ran, or while the run before had not ended: "skip" them, run
                "once" for the latest, or run "all".
            as_job: Whether each run is a job. False: one worker calls the function in place; a run is neither retried nor
                archived, costs less and waits for no place in the worker, which suits intervals of a few seconds. None: True,
                except with `per_worker`.
            per_worker: Whether each worker runs the function in place, by the clock of its machine, instead of one worker for
                all.
            options: Delivery, retries and limits of the runs that are jobs, as for `Penstock.job`; `concurrency` is 1 unless
                given.

        Raises:
            InvalidInput: The function or an option cannot be used.
        """
        return self._schedule(Every(every), name, key, missed, as_job, per_worker, options)

    def cron(
        self,
        expression: str,
        *,
        tz: str = "UTC",
        name: str | None = None,
        key: str | Callable[[Tick], str | None] | None = None,
        missed: Missed = "skip",
        as_job: bool | None = None,
        per_worker: bool = False,
        **options: Unpack[JobOptions],
    ) -> Callable[[ScheduleHandler], Schedule]:
        """Declare a function that workers of this app run at the times of a cron expression, such as "0 4 * * *".

        Args:
            expression: Minute, hour, day, month, day of the week, as in Debian's cron, optionally preceded by seconds.
            tz: Time zone of the expression.
            name: See `timer`.
            key: See `timer`.
            missed: See `timer`.
            as_job: See `timer`.
            per_worker: See `timer`.
            options: See `timer`.

        Raises:
            InvalidInput: The function or an option cannot be used.
        """
        return self._schedule(Cron(expression, tz), name, key, missed, as_job, per_worker, options)

    def _schedule(
        self,
        times: Every | Cron,
        name: str | None,
        key: str | Callable[[Tick], str | None] | None,
        missed: Missed,
        as_job: bool | None,
        per_worker: bool,
        options: JobOptions,
    ) -> Callable[[ScheduleHandler], Schedule]:
        if name is not None:
            check_name("name of a schedule", name, 200)
        if as_job is not None:
            check_flag("as_job", as_job)
        check_flag("per_worker", per_worker)

        def declare(handler: ScheduleHandler) -> Schedule:
            named = name or getattr(handler, "__name__", "").replace("_", "-")
            runs_as: RunsAs = "per-worker" if per_worker else "in-place" if as_job is False else "job"
            if per_worker and as_job:
                raise InvalidInput(
                    f"schedule {named} cannot have both as_job and per_worker", hint="Leave out as_job or per_worker."
                )
            of_jobs = [option for option in options if option not in ("docs_url", "owner")] + (["key"] if key is not None else [])
            if runs_as != "job" and of_jobs:
                raise InvalidInput(
                    f"schedule {named} runs in place and cannot have options of jobs, such as {of_jobs[0]}",
                    hint="Leave them out, or as_job=False and per_worker.",
                )
            check_name("name of a schedule", named, 200)
            docs_url, owner = options.get("docs_url"), options.get("owner")
            check_documentation(f"schedule {named}", docs_url, owner)
            schedule = Schedule(
                named,
                times,
                handler,
                missed,
                runs_as,
                docs_url=docs_url,
                owner=owner,
                key=key,
                context=self.context,
                write=self._write,
            )
            if named in self.schedules:
                raise InvalidInput(f"schedule {named} is declared twice", hint="Give each a name of its own.")
            if runs_as == "job":
                key_of = None if key is None else partial(_key_of_slot, schedule)
                declared: JobType[Any] = JobType(
                    self.context, named, Slot, options_of(named, {"concurrency": 1, **options}, _OF_SCHEDULES), key_of
                )
                signature = Signature(Slot, plan=schedule.signature.plan)
                declared.handled_as(handler, signature, schedule.as_handler(), kind_of(handler, "auto"))
                self.add_type(declared)
            self.schedules[named] = schedule
            return schedule

        return declare

    async def _write(self, schedule: Schedule) -> None:
        if schedule.runs_as == "job":
            await self.types[schedule.name].declare()
        await declare_schedule(await self.context.database(), schedule)


def _key_of_slot(schedule: Schedule, slot: Slot | Mapping[str, Any]) -> str | None:
    """The key of a run that is enqueued as a job, by its type."""
    now = datetime.now(UTC)
    return schedule.key_of((slot.at if isinstance(slot, Slot) else None) or now, now)
