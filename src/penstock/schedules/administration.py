"""What people and programs do with schedules by their names, declared here or not: a part of `Penstock`."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from penstock.core.checks import check_choice, check_number, check_text
from penstock.jobs.records import Status
from penstock.schedules import queries as schedules
from penstock.schedules.declarations import ScheduleDeclarations
from penstock.schedules.schedule import ScheduleRecord, ScheduleRun


class ScheduleAdministration(ScheduleDeclarations):
    """Lists, runs and drops schedules."""

    async def list_schedules(self) -> list[ScheduleRecord]:
        """All schedules in the database, with their next time and the outcome of their last run."""
        return await schedules.schedules(await self.context.database())

    async def schedule_runs(self, name: str, *, status: Status | str | None = None, limit: int = 20) -> list[ScheduleRun]:
        """The last runs of a schedule, latest first, as far as the archive goes; none when it runs in place.

        Args:
            name: Name of the schedule.
            status: Only runs with this status, such as "failed"; None: all.
            limit: Maximum number of runs, at most 1,000.

        Raises:
            NotFound: The schedule does not exist.
        """
        check_text("name", name)
        if status is not None:
            check_choice("status", status, list(Status))
        check_number("limit", limit, 1, 1_000)
        wanted = None if status is None else str(status)
        return await schedules.runs(await self.context.database(), name, wanted, limit)

    async def run_schedule(self, name: str, *, key: str | None = None) -> UUID | None:
        """Run a schedule now, beside its times.

        Args:
            name: Name of the schedule.
            key: Key of the run; None: that of the declared rule, where this application declares the schedule, or none.

        Returns:
            The job of the run; None when a worker runs the schedule in place, as soon as it can.

        Raises:
            NotFound: The schedule does not exist.
            Conflict: A run has not ended, or each worker runs the schedule by itself.
            InvalidInput: The key is not valid, or the schedule runs in place, so that a run has no key.
        """
        check_text("name", name)
        if key is not None:
            check_text("key", key)
        elif (declared := self.schedules.get(name)) is not None:
            key = declared.key_of(now := datetime.now(UTC), now)
        return await schedules.run_now(await self.context.database(), name, key)

    async def drop_schedule(self, name: str) -> None:
        """Drop a schedule that was removed from the code; the job type and the history of its runs remain.

        Args:
            name: Name of the schedule.

        Raises:
            NotFound: The schedule does not exist.
            Conflict: A running worker declares it.
        """
        check_text("name", name)
        await schedules.drop(await self.context.database(), name)
