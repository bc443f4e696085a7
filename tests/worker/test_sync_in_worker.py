"""The blocking side of an app where the async side is in use too, and in a process that was forked."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from penstock import Job, Penstock, Status
from penstock.testing import running_worker

FORK = """
import os, sys
from penstock import Penstock
app = Penstock()
app.sync.counts()
child = os.fork()
if child == 0:
    app.sync.counts()
    app.sync.close()
    os._exit(7)
_, status = os.waitpid(child, 0)
app.sync.counts()
app.sync.close()
print(os.waitstatus_to_exitcode(status))
"""


async def test_a_plain_handler_can_enqueue_through_sync(app: Penstock) -> None:
    @app.job("first", keep_result=True, max_attempts=1)
    def first(job: Job[Any]) -> str:
        assert app.sync.counts()
        return str(app.sync.enqueue(second, {}).id)

    @app.job("second")
    async def second(job: Job[Any]) -> None: ...

    async with running_worker(app, at_once=True):
        record = await app.wait((await first.enqueue()).id)
        assert (await app.wait(record.result)).status is Status.SUCCEEDED
    app.sync.close()
    assert await app.counts()


def test_sync_works_in_a_fork_of_a_process_that_used_it(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], env={**os.environ, "PENSTOCK_DATABASE_URL": url},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "7", done.stderr
