"""An application with an encrypted pool, for processes of workers, whose keys PENSTOCK_KEYS has."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from penstock import Job, Penstock, Settings

app = Penstock(settings=Settings(heartbeat_interval=timedelta(seconds=0.5), dead_after=timedelta(seconds=3)))
ledger = app.pool("ledger", encrypted=True, keep_result=True, slots=8)


@ledger.job
async def book(job: Job[Any]) -> int:
    return os.getpid()
