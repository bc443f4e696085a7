"""Replacing worker processes that have run many jobs or taken much memory, as those of handlers that leak do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import psutil
import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from penstock.core.logs import get_logger
from penstock.worker import Worker

log = get_logger("penstock.worker")
_EVERY_S = 1.0

MaxJobs = Annotated[int | None, typer.Option("--max-jobs", min=1, help="Replace a worker process that has run so many jobs.")]
MaxMemory = Annotated[
    str | None,
    typer.Option("--max-memory", metavar="SIZE", help="Replace a worker process that takes more memory, such as 512MiB."),
]


@dataclass(frozen=True, slots=True)
class ReplaceAfter:
    """When a worker process is to be replaced.

    Attributes:
        jobs: Number of jobs that it has run; None: any.
        memory: Bytes of memory that it and its child processes take together; None: any.
    """

    jobs: int | None
    memory: int | None

    def reached(self, worker: Worker) -> str | None:
        """Why it is to be replaced now; None: it is not."""
        if self.jobs is not None and worker.settled >= self.jobs:
            return f"{worker.settled} jobs"
        if self.memory is not None and (taken := memory_taken()) > self.memory:
            return f"{taken // 2**20} MiB"
        return None

    async def ask(self, worker: Worker, replace: Callable[[], None]) -> None:
        """Ask for a successor once it is time, and again for as long as none has come."""
        said = False
        while True:
            await asyncio.sleep(_EVERY_S)
            if not worker.stopping and (reason := self.reached(worker)):
                if not said:
                    log.info("worker_to_be_replaced", worker=worker.id, after=reason)
                    said = True
                replace()


def replace_after(jobs: int | None, memory: str | None) -> ReplaceAfter | None:
    """The bounds that options give; None: there are none.

    Raises:
        typer.BadParameter: The size is none.
    """
    if jobs is None and memory is None:
        return None
    try:
        size = None if memory is None else int(TypeAdapter(ByteSize).validate_python(memory))
    except ValidationError:
        size = 0
    if size is not None and size <= 0:
        raise typer.BadParameter(f"{memory!r} is no size, such as 512MiB or 2GB", param_hint="--max-memory")
    return ReplaceAfter(jobs, size)


def memory_taken() -> int:
    """Bytes of memory that this process and its child processes take: the sum of their resident sets."""
    process = psutil.Process()
    taken: int = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            taken += child.memory_info().rss
        except psutil.Error:
            continue  # it has ended
    return taken
