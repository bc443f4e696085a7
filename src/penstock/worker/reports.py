"""Reports: what running jobs say of themselves, their progress and the lines of their logs, written about once a second.

A handler may run in a thread, so lines come from any thread. The last lines of a job are written before its settlement, which
moves its row into the archive.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol
from uuid import UUID

from penstock.core.coalescing import in_halves
from penstock.core.logs import get_logger
from penstock.core.serialization import plain_text
from penstock.errors import InvalidInput, PenstockError
from penstock.jobs import claim_queries
from penstock.jobs.models import Settlement
from penstock.jobs.records import LONGEST_LINE, MOST_LINES
from penstock.jobs.worked import Held
from penstock.postgres.database import Database

log = get_logger("penstock.worker")
_EVERY_S = 1.0


class Lines:
    """The lines of one job that are not written yet: the newest ones, each with the monotonic time at which it was logged."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=MOST_LINES)

    def add(self, line: Any) -> None:
        """Add a line, from any thread. Raises `InvalidInput` when it is not text."""
        if not isinstance(line, str):
            raise InvalidInput(
                f"a line of a log must be text, not {line!r:.100}", hint='For example: job.log(f"{done} of {total}")'
            )
        self._lines.append((time.monotonic(), plain_text(line[:LONGEST_LINE])))

    def take(self) -> list[tuple[float, str]]:
        """Remove and return the lines. Another thread may add some meanwhile."""
        taken = []
        while self._lines:
            taken.append(self._lines.popleft())
        return taken

    def give_back(self, lines: Sequence[tuple[float, str]]) -> None:
        """Put lines back in front of those that came meanwhile, the newest of them when there is no place for all."""
        if (places := MOST_LINES - len(self._lines)) > 0:
            self._lines.extendleft(reversed(lines[-places:]))


class Logging(Held, Protocol):
    """A claimed job whose handler can log lines. It has `lines` from the first one on."""

    lines: Lines | None

    def sealed_line(self, line: str) -> str:
        """A line as it is stored: encrypted when the type of the job is."""


_making = threading.Lock()


def lines_of(job: Logging) -> Lines:
    """The lines of a job, from any thread. Few jobs log any, so a job does not have a buffer before."""
    if job.lines is None:
        with _making:
            if job.lines is None:
                job.lines = Lines()
    return job.lines


class Reports:
    """Writes what the jobs of one process report.

    Args:
        database: Database to write to.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._progress: dict[UUID, tuple[Held, str]] = {}
        # Progress that is being written.
        self._reporting: dict[UUID, tuple[Held, str]] = {}
        self._logging: dict[UUID, Logging] = {}
        # Jobs whose lines are being written: they are not settled before that, since a line of a finished job is dropped.
        self._writing: dict[UUID, Logging] = {}
        self._written = asyncio.Event()

    def progress(self, id: UUID, held: Held, text: str) -> None:
        """Accept the progress of a running job as JSON text. The last one of a second is written, under the lease of then."""
        self._progress[id] = (held, text)

    def log(self, id: UUID, job: Logging) -> None:
        """Accept that a job has lines to be written."""
        self._logging[id] = job

    async def run(self) -> None:
        """Write until cancelled, once a second."""
        while True:
            await asyncio.sleep(_EVERY_S)
            if self._progress:
                progress, self._progress = self._progress, {}
                await self._write_progress(progress)
            if self._logging:
                self._writing, self._logging = self._logging, {}
                self._written.clear()
                try:
                    await self._write_lines(self._writing, wait=False)
                finally:
                    self._writing = {}
                    self._written.set()

    async def ended(self, results: Sequence[Settlement]) -> None:
        """Forget the progress of jobs that are about to be settled, and write the last lines of their logs."""
        if self._progress or self._reporting:
            for result in results:
                self._progress.pop(result.id, None)
                self._reporting.pop(result.id, None)
        if self._writing and any(result.id in self._writing for result in results):
            await self._written.wait()
        if self._logging:
            ended = [(result.id, self._logging.pop(result.id, None)) for result in results]
            logging = {id: job for id, job in ended if job is not None}
            if logging:
                await self._write_lines(logging, wait=True)

    async def _write_lines(self, logging: dict[UUID, Logging], *, wait: bool) -> None:
        now = time.monotonic()
        taken = {id: (job, job.lines.take()) for id, job in logging.items() if job.lines is not None}
        lines = [
            claim_queries.Line(id, job.lease, job.sealed_line(text), now - at)
            for id, (job, some) in taken.items()
            for at, text in some
        ]
        if not lines:
            return
        try:
            locked = await claim_queries.append_log(self._database, lines, wait=wait)
        except PenstockError as error:
            log.warning("job_log_refused", jobs=len(taken), error=error)
            return
        for id in locked:
            job, some = taken[id]
            lines_of(job).give_back(some)
            self._logging.setdefault(id, job)

    async def _write_progress(self, progress: dict[UUID, tuple[Held, str]]) -> None:
        async def refused(progress: Sequence[tuple[UUID, int, str]], error: PenstockError) -> list[UUID]:
            log.warning("job_progress_refused", job_id=str(progress[0][0]), error=error)
            return []

        self._reporting = progress
        try:
            reported = [(id, held.lease, text) for id, (held, text) in progress.items()]
            locked = await in_halves(reported, partial(claim_queries.report_progress, self._database), refused)
        finally:
            self._reporting = {}
        for id in chain.from_iterable(locked):
            # The next round writes it, unless the handler has reported something newer, or the job is about to be settled.
            if id in progress:
                self._progress.setdefault(id, progress[id])
