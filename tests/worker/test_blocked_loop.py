"""A handler that blocks the event loop: the heartbeat beside the loop keeps what the process owns, and says what blocks it."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg

from penstock import Penstock, Status
from penstock.worker import fleets
from tests.waiting import eventually

APP = """
import asyncio, os, time
from datetime import timedelta
from penstock import Job, Options, Penstock, Settings
app = Penstock(settings=Settings(dead_after=2.0, heartbeat_interval=0.4, maintenance_interval=0.2))
LEASE = timedelta(seconds=float(os.environ.get("LEASE_S", "300")))

def note(job, word):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{word} {job.name} {job.key or '-'} {os.getpid()} {job.attempt}\\n")

async def work(job: Job[float]) -> None:
    note(job, "began")
    time.sleep(job.data)
    note(job, "ended")

app.job("plain", visibility_timeout=LEASE)(work)
app.pool("keyed", slots=8, visibility_timeout=LEASE).job(work)
"""


class Workers:
    def __init__(self, url: str, folder: Path, **environment: str) -> None:
        (folder / "blocking_app.py").write_text(APP)
        self.notes = folder / "notes"
        self.notes.touch()
        self.log = folder / "log"
        self._folder = folder
        self._environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "NOTES": str(self.notes), **environment}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "penstock", "worker", "blocking_app:app"],
                    env=self._environment, cwd=self._folder, stdout=log, stderr=log,
                )
            )  # fmt: skip

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.notes.read_text().splitlines()]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


async def _members(sql: asyncpg.Connection[Any], count: int) -> bool:
    return bool(await sql.fetchval("select count(distinct owner) from penstock.slots where owner is not null") == count)


async def test_a_handler_that_blocks_the_loop_keeps_its_key_and_its_job(
    url: str, sql: asyncpg.Connection[Any], tmp_path: Path
) -> None:
    """For more than twice the silence after which a worker counts as dead, with another worker that would take over."""
    async with Penstock(url) as app:
        with Workers(url, tmp_path) as workers:
            workers.start()
            workers.start()
            await eventually(lambda: _members(sql, 2), "two members")
            pool = app.pool("keyed", slots=8, visibility_timeout=timedelta(seconds=300))
            keyed = [await pool.enqueue("acme", 5.0), await pool.enqueue("acme", 0.0)]
            plain = await app.enqueue("plain", 5.0)
            await eventually(lambda: sum(line[0] == "began" for line in workers.lines()) >= 1, "the handler")

            async def blocked() -> Any:
                return await sql.fetchval("select blocked_by from penstock.workers where blocked_since is not null")

            said = await eventually(blocked, "the word that a loop is blocked")
            assert said.split()[0] in ("keyed", "plain")
            database = await app.database()
            listed = {worker.id: worker for worker in await fleets.workers(database)}
            assert said in [worker.blocked_by for worker in listed.values()]
            assert all(worker.alive for worker in listed.values())
            assert all((worker.blocked_since is None) == (worker.blocked_by is None) for worker in listed.values())
            for receipt in [*keyed, plain]:
                record = await app.wait(receipt.id)
                assert (record.status, record.errors) == (Status.SUCCEEDED, [])
            began = [line for line in workers.lines() if line[0] == "began"]
            assert len(began) == 3, began
            of_key = [line for line in workers.lines() if line[2] == "acme"]
            assert [line[0] for line in of_key] == ["began", "ended", "began", "ended"]
            log = workers.log.read_text()
            assert "loop_blocked" in log and "blocking_app.py" in log
            assert "worker_was_declared_dead" not in log and "member_was_evicted" not in log

            async def free() -> bool:
                return not await blocked()

            await eventually(free, "the word that the loops go on")


async def test_the_visibility_timeout_ends_a_wedged_worker_and_its_late_result_is_refused(
    url: str, sql: asyncpg.Connection[Any], tmp_path: Path
) -> None:
    async with Penstock(url) as app:
        with Workers(url, tmp_path, LEASE_S="3") as workers:
            # The other one has to be there before the handler ends.
            workers.start()
            workers.start()
            await eventually(lambda: _members(sql, 2), "two members")
            pool = app.pool("keyed", slots=8, visibility_timeout=timedelta(seconds=3))
            first = await pool.enqueue("acme", 12.0)
            await eventually(lambda: workers.lines(), "the handler")
            await sql.execute("update penstock.queued_jobs set data = '0' where id = $1", first.id)
            record = await app.wait(first.id)
            assert record.status is Status.SUCCEEDED
            assert [error["attempt"] for error in record.errors] == [1]
            (began, late) = [line for line in workers.lines() if line[0] == "began"]
            assert began[3] != late[3] and late[4] == "2"
            await eventually(lambda: sum(line[0] == "ended" for line in workers.lines()) == 2, "the late end")
            later = await pool.enqueue("acme", 0.0)
            assert (await app.wait(later.id)).status is Status.SUCCEEDED
            assert (await app.find(first.id)) == record
