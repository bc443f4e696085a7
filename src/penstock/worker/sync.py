"""The blocking half of penstock.worker.leader.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from penstock.core.blocking import BackgroundLoop


class SyncLeaderTask:
    """The blocking half of `LeaderTask`, for threads without an event loop: `LeaderTask.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def declare(self) -> None:
        """Write the task into the database, where `penstock leaders` lists it.

        `Penstock.declare`, `penstock declare MODULE:APP` and each worker that may lead do so. Opening the application does not.
        """
        self._loop.run(self._of.declare())
