"""Tells the database how worker processes ended, so that their jobs are recovered at once and not after their silence.

A supervisor that says so also shows that its node lives: the loss then counts for a job that the process ran alone.
"""

from __future__ import annotations

import asyncio
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence

from penstock.app import Penstock
from penstock.core.logs import get_logger
from penstock.errors import PenstockError
from penstock.jobs import worker_queries

log = get_logger("penstock.worker")
# What ends several processes at once ends them within this time.
_TOGETHER_S = 1.0


def how_it_ended(exit_code: int) -> str:
    """The end of a process in words, from its exit code, which is negative for a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


class EndedProcesses:
    """Reports ended processes in a thread of its own, so that the supervisor never waits for the database.

    Args:
        supervisor: Id of the supervisor.
        app: Makes an application on the database of the workers.
    """

    def __init__(self, supervisor: str, app: Callable[[], Penstock]) -> None:
        self._supervisor = supervisor
        self._app = app
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        threading.Thread(target=self._report, name="penstock-ended", daemon=True).start()

    def ended(self, pid: int, exit_code: int) -> None:
        """A process has ended."""
        self._ended.put((pid, exit_code))

    def _report(self) -> None:
        while True:
            ended = [self._ended.get()]
            time.sleep(_TOGETHER_S)
            while not self._ended.empty():
                ended.append(self._ended.get())
            try:
                asyncio.run(self._tell(ended))
            except (PenstockError, OSError) as error:
                # Their silence tells it too, only later.
                log.warning("ended_processes_not_reported", error=error)

    async def _tell(self, ended: Sequence[tuple[int, int]]) -> None:
        async with self._app() as app:
            database = await app.database()
            pids, how = [pid for pid, _ in ended], [how_it_ended(code) for _, code in ended]
            if lost := await worker_queries.end_workers(database, self._supervisor, pids, how):
                log.warning("worker_processes_lost", workers=lost, pids=pids, how=how)
