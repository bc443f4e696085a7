"""What people and programs do with schedules by their names, declared here or not: a part of `Penstock`."""

from __future__ import annotations

from penstock.schedules import queries as schedules
from penstock.schedules.declarations import ScheduleDeclarations
from penstock.schedules.schedule import ScheduleRecord


class ScheduleAdministration(ScheduleDeclarations):
    """Lists and drops schedules."""

    async def list_schedules(self) -> list[ScheduleRecord]:
        """All schedules in the database, with their next time and the outcome of their last run."""
        return await schedules.schedules(await self.context.database())

    async def drop_schedule(self, name: str) -> None:
        """Drop a schedule that was removed from the code; the job type and the history of its runs remain.

        Raises:
            NotFound: The schedule does not exist.
            Conflict: A running worker declares it.
        """
        await schedules.drop(await self.context.database(), name)
