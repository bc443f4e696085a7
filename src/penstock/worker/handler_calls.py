"""Calls of handlers, where their kind says: on the event loop, in a thread or in a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from penstock.core.user_code import in_thread
from penstock.jobs.handler import Job, Jobs, check_importable
from penstock.jobs.worked import WorkedType
from penstock.settings import Settings
from penstock.worker.children import Children
from penstock.worker.process import StandIns, call_in_process
from penstock.worker.running import Running, plain_text_of

HANDLER_THREADS = "penstock-handler"
_PROCESS_ENDS_S = 5


class HandlerCalls:
    """Calls handlers, and owns the threads and processes in which they run.

    Args:
        settings: Number of threads and processes.

    Attributes:
        threads: The threads for plain functions.
    """

    def __init__(self, settings: Settings) -> None:
        self.threads = ThreadPoolExecutor(settings.threads, thread_name_prefix=HANDLER_THREADS)
        self._children = Children(settings.processes_for_handlers)
        self._database_url = settings.database_url

    async def call(self, running: Running, job: Job[Any], dependencies: Mapping[str, Any]) -> Any:
        """Call a handler with its dependencies, within its middleware."""
        worked = running.worked
        if worked.kind == "async":
            return await worked.handler(job, **dependencies)
        if worked.kind == "process":
            return await self.in_process(running)
        return await in_thread(self.threads, partial(worked.handler, **dependencies), job)

    async def call_batch(self, worked: WorkedType, taken: Callable[[], Jobs[Any]], dependencies: Mapping[str, Any]) -> Any:
        """Call a batch handler with its dependencies, within its middleware, and with the batch as it is at this moment."""
        if worked.kind == "async":
            batch = taken()
            return await worked.handler(batch, **dependencies) if batch else None

        def call() -> Any:
            batch = taken()
            return worked.handler(batch, **dependencies) if batch else None

        return await in_thread(self.threads, call)

    async def in_process(self, running: Running) -> Any:
        """Call a handler in a child process, which is killed when the job has passed its time limit."""
        handler = running.worked.handler
        # The task is cancelled when the time is over; later than that, the event loop is blocked.
        limit_s = max(running.deadline - time.monotonic(), 0.1) + _PROCESS_ENDS_S
        # Decrypted here: the process has no keys.
        claimed = running.claimed._replace(data=plain_text_of(running), traceparent=running.traceparent)
        overrides = running.worked.overrides()
        for stand_in in overrides.values():
            check_importable(stand_in, "Define it in a module, outside of functions and objects, or call the handler by run_job.")
        stand_ins = StandIns(self._database_url, overrides)
        return await self._children.call(limit_s, call_in_process, handler.__module__, handler.__qualname__, claimed, stand_ins)

    def close(self) -> None:
        """End threads and processes without waiting for them."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self._children.close()
