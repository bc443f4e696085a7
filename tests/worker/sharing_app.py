"""An application with two types in processes, one of which lasts until a file says so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from penstock import Job, Penstock, Settings

app = Penstock(settings=Settings(processes_for_handlers=2, threads=3))


def last(job: Job[dict[str, Any]]) -> None:
    """Last until the file of the payload exists."""
    (Path(job.data["folder"]) / str(job.id)).touch()
    while not (Path(job.data["folder"]) / "end").exists():
        time.sleep(0.02)


def end_at_once(job: Job[dict[str, Any]]) -> None:
    """Nothing."""


app.job("long", executor="process")(last)
app.job("other", executor="process")(end_at_once)
app.job("long-thread")(last)
app.job("other-thread")(end_at_once)
