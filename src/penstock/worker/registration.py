"""The row of a worker: the id under which it claims, and the time until which no other worker can have taken it for dead."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from contextlib import suppress
from typing import Literal
from uuid import UUID

from penstock._version import __version__
from penstock.groups.membership import monotonic
from penstock.jobs import claim_queries, worker_queries
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.settings import Settings
from penstock.worker.work import Work

_FENCE_SHARE = 0.8


class Registration:
    """The row of one worker. A `Kept`, which the heartbeat beside the loop keeps alive.

    Args:
        database: Database of the row.
        settings: Concurrency, and the silence after which the worker counts as dead.
        work: What the worker works on.
        process: Id of the process, with which the ids of its members begin.
        holds_as: "worker": it runs the jobs that it claims; "dispatcher": it sends them elsewhere. See `tables/0002_jobs.sql`.
        listener: Listens on the channel of the row.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        work: Work,
        process: str,
        holds_as: Literal["worker", "dispatcher"],
        listener: Listener,
    ) -> None:
        self.id = process
        self.beat_now = asyncio.Event()
        """Set when the heartbeat of the loop must be sent at once."""
        self.supervisor: str | None = None
        """The supervisor that started the process; None: it has none."""
        self._database = database
        self._settings = settings
        self._work = work
        self._process = process
        self._holds_as = holds_as
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._registrations = 0
        # The time, by this process's clock, until which no other worker can take this one for dead.
        self._fence_at = float("-inf")

    async def register(self) -> None:
        """Insert the row. A worker that was declared dead gets a new id, since its old one is never used again."""
        if self._registrations:
            self._listener.remove(self._channel)
        self._registrations += 1
        self.id = self._process if self._registrations == 1 else f"{self._process}.{self._registrations}"
        self._listener.add(self._channel)
        sent_at = monotonic()
        await claim_queries.promise_to_begin(self._database, self.id, self._holds_as)
        await worker_queries.register_worker(
            self._database,
            self.id,
            list(self._work.types),
            re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()),
            os.getpid(),
            self._settings.concurrency,
            self._settings.dead_after,
            self._work.told,
            version=__version__,
            code_version=self._settings.code_version,
            supervisor=self.supervisor,
        )
        self.kept(sent_at, self._settings.dead_after.total_seconds())

    def may_start(self) -> bool:
        """Whether the jobs that were claimed under this registration still belong to it."""
        return monotonic() < self._fence_at

    # -- the heartbeat's thread calls these, see `groups.heartbeat.Kept`

    @property
    def keep_s(self) -> float:
        """See `Kept`: the longest visibility timeout of its job types, since each lease ends by itself."""
        longest = [worked.declared.visibility_timeout for worked in list(self._work.types.values())]
        return max([self._settings.wedged_after, *longest]).total_seconds()

    def pulse(self) -> tuple[str, str, UUID] | None:
        """See `Kept`."""
        return ("", self.id, UUID(int=0)) if self._registrations else None

    def unknown(self) -> None:
        """See `Kept`: the heartbeat of the loop then registers the worker again."""
        self._fence_at = float("-inf")
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.beat_now.set)

    def kept(self, sent_at: float, dead_after_s: float) -> None:
        """See `Kept`."""
        self._fence_at = max(self._fence_at, sent_at + dead_after_s * _FENCE_SHARE)

    @property
    def _channel(self) -> str:
        return f"penstock_{self.id}"
