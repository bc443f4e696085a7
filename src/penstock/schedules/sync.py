"""The blocking half of penstock.schedules.schedule.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from penstock.core.blocking import BackgroundLoop


class SyncSchedule:
    """The blocking half of `Schedule`, for threads without an event loop: `Schedule.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def declare(self) -> None:
        """Write the schedule into the database, with the job type of its runs; its times begin then, when it is new.

        `Penstock.declare`, `penstock declare MODULE:APP` and each worker that runs it do so. Opening the application does not.

        Raises:
            InvalidInput: The database refuses it.
            Conflict: The name of the job type is in use for something else.
        """
        self._loop.run(self._of.declare())
