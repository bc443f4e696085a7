"""Tools for tests of applications: temporary databases, and workers in the test's own process. See docs/testing.md.

@pytest.fixture(scope="session")
def databases():
    with TemporaryDatabases() as databases:
        yield databases

@pytest.fixture
async def database(databases):
    with databases.database() as url, on_database(app, url):
        async with app:
            yield url

async def test_it(database):
    await send_mail.enqueue("ada@example.com")
    [job] = await run_due_jobs(app)
    assert job.status == "succeeded"
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
from pydantic import SecretStr

from penstock.app import Penstock
from penstock.errors import InvalidInput, NotFound
from penstock.groups import queries as ownership
from penstock.groups import rebalance as balance
from penstock.jobs import queries as jobs
from penstock.jobs.models import JobRecord
from penstock.pools import queries as pools
from penstock.pools.pool import Pool
from penstock.postgres import migrate
from penstock.postgres.database import Database
from penstock.postgres.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.streams.stream import Stream
from penstock.worker import Worker
from penstock.worker.completer import Completer
from penstock.worker.executor import Executor

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only folders with random names are made there
_MEMORY_FREE_BYTES = 4 * 2**30


class TemporaryDatabases:
    """Makes databases with the Penstock schema, each in well under a second, as copies of one template.

    Args:
        server_url: URL of a server on which databases may be created; None: an embedded server in a temporary folder.
        bin_dir: Folder of PostgreSQL's programs for the embedded server; None: those of the wheel.
        parent: Parent of the temporary folder; None: a folder in memory where the system has one, which makes databases several
            times faster, otherwise a folder on disk.

    Attributes:
        server: The embedded server; None: the databases are on a server that was given.
        server_url: URL of the server.
    """

    def __init__(self, server_url: str | None = None, *, bin_dir: Path | None = None, parent: Path | None = None) -> None:
        self._given_url = server_url
        self._parent = parent or _in_memory()
        self._bin_dir = bin_dir
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.server: EmbeddedServer | None = None
        self._template = f"penstock_template_{secrets.token_hex(4)}"
        self.server_url = ""

    def __enter__(self) -> TemporaryDatabases:
        if self._given_url is None:
            self._folder = tempfile.TemporaryDirectory(prefix="penstock-test-", dir=self._parent, ignore_cleanup_errors=True)
            self.server = EmbeddedServer(Path(self._folder.name), bin_dir=self._bin_dir)
            self.server_url = self.server.start()
        else:
            self.server_url = self._given_url
        asyncio.run(self._make_template())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.server is not None:
            self.server.stop()
            deadline = time.monotonic() + 30
            while (self.server.data_dir / "postgres" / "postmaster.pid").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
        else:
            asyncio.run(self.execute(f'drop database if exists "{self._template}" with (force)'))
        if self._folder is not None:
            self._folder.cleanup()

    @contextmanager
    def database(self) -> Iterator[str]:
        """A fresh database; yields its URL and drops it at the end."""
        name = f"penstock_test_{secrets.token_hex(6)}"
        # A file copy needs a checkpoint, which costs little on the embedded server, and far less than the write-ahead log.
        strategy = "strategy file_copy" if self.server is not None else ""
        self._run(f'create database "{name}" template "{self._template}" {strategy}')
        if self.server is None:
            # The same setting as on the embedded server: tables of the application are never created in Penstock's schema,
            # whatever the name of the user.
            self._run(f'alter database "{name}" set search_path = public')
        try:
            yield self._url(name)
        finally:
            self._run(f'drop database if exists "{name}" with (force)')

    def _run(self, statement: str) -> None:
        # The statement runs in a thread of its own, since the caller may be inside an event loop.
        failure: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(self.execute(statement))
            except BaseException as error:
                failure.append(error)

        import threading

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failure:
            raise failure[0]

    async def _make_template(self) -> None:
        await self.execute(f'create database "{self._template}"')
        database = Database(self._url(self._template), Settings())
        await migrate.migrate(database)

    async def execute(self, statement: str) -> None:
        """Run a statement on the server, as its owner."""
        connection: asyncpg.Connection[Any] = await asyncpg.connect(self.server_url)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    def _url(self, database: str) -> str:
        parts = urlsplit(self.server_url)
        return urlunsplit(parts._replace(path=f"/{database}"))


_MEMBER = "testing"
_SESSION = uuid.uuid4()


async def _own(database: Database, pool: Pool[Any]) -> dict[int, int]:
    """Take all slots of a pool, whose only worker is the test."""
    await balance.join(database, pool.name, _MEMBER, _SESSION, timedelta(hours=1), {}, pool._assign)
    await balance.rebalance(database, pool.name, pool._assign)
    beat = await ownership.heartbeat(database, pool.name, _MEMBER, _SESSION)
    return beat.owned | await ownership.take(database, pool.name, _MEMBER, _SESSION, sorted(beat.available))


async def run_due_jobs(app: Penstock, *names: str, limit: int = 10_000) -> list[JobRecord]:
    """Run all jobs that are due now, in this process, and those that they enqueue, until none is left.

    Args:
        app: An open app.
        names: Job types to run; none: all that have a handler.
        limit: Maximum number of runs, in case jobs enqueue each other for ever.

    Returns:
        Records of the jobs after their runs, in the order of their first run.
    """
    async with app.context.hooks.running():
        return await _run_due_jobs(app, names, limit)


async def _run_due_jobs(app: Penstock, names: Collection[str], limit: int) -> list[JobRecord]:
    database = await app.database()
    chosen = [t for t in app.types.values() if t.handler is not None and (not names or t.name in names)]
    worked = {t.name: w for t in chosen if (w := t.worked()) is not None}
    for declared in chosen:
        if isinstance(declared.declarer, Pool):
            await declared.declarer.declare()
    await app.subscribe(*(app.types[name] for name in worked))
    for worked_type in worked.values():
        worked_type.refresh(await jobs.declare_job_type(database, worked_type.name, worked_type.declared.as_json()))
    queues = [t.name for t in chosen if not isinstance(t.declarer, Pool)]
    keyed_pools = [t.declarer for t in chosen if isinstance(t.declarer, Pool)]
    completer = Completer(database)
    executor = Executor(database, worked, app.settings, completer.settle, completer.progress)
    completing = asyncio.create_task(completer.run())
    # The executor ends handlers at their time limits, as in a worker.
    watching = asyncio.create_task(executor.run())
    ran: dict[Any, None] = {}
    try:
        while limit > 0:
            await jobs.promote(database)
            claimed = (await jobs.claim(database, "testing", queues, min(limit, 1000), {})).jobs if queues else []
            for pool in keyed_pools:
                # One job of each key, so that the next job of a key runs after it.
                keyed = await pools.claim(database, _MEMBER, pool.name, await _own(database, pool), 1000, 1, None, [])
                claimed += [job for job, _ in keyed.jobs]
            if not claimed:
                break
            limit -= len(claimed)
            ran.update(dict.fromkeys(job.id for job in claimed))
            executor.submit(claimed, time.monotonic())
            # A thread may continue after the time limit of its job.
            while not await executor.finished(0.05):
                await asyncio.sleep(0)
            drained = asyncio.create_task(completer.drained())
            await asyncio.wait([drained, completing], return_when=asyncio.FIRST_COMPLETED)
            if completing.done():
                drained.cancel()
                completing.result()
    finally:
        completing.cancel()
        watching.cancel()
        await asyncio.gather(completing, watching, return_exceptions=True)
        executor.close()
        for pool in keyed_pools:
            await balance.leave(database, pool.name, _MEMBER, _SESSION, None)
    found = await jobs.find(database, list(ran))
    return [found[id] for id in ran]


@contextmanager
def on_database(app: Penstock, url: str) -> Iterator[Penstock]:
    """Let an application use another database within the block, whatever its settings. The application must not be open.

    Raises:
        InvalidInput: The application is open on this loop.
    """
    _refuse_open(app)
    before = app.settings
    app.context.settings = before.model_copy(update={"database_url": SecretStr(url)})
    try:
        yield app
    finally:
        app.sync.close()
        app.context.settings = before


def _refuse_open(app: Penstock) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if app.is_open:
        raise InvalidInput("the application is already open", hint="Choose its database before you open it.")


@asynccontextmanager
async def running_worker(app: Penstock, *names: str, at_once: bool = False) -> AsyncIterator[Worker]:
    """A worker in this process, for what `run_due_jobs` does not run: consumers, schedules, standing jobs.

    It stops at the end of the block.

    Args:
        app: An open app.
        names: Job types to work on; none: all that have a handler.
        at_once: Whether it stops without waiting for running handlers; otherwise they get the grace period to finish.
    """
    worker = await app.worker(*names)
    running = asyncio.create_task(worker.run(), name="penstock worker of a test")
    try:
        starting = asyncio.create_task(worker.started())
        await asyncio.wait([running, starting], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            starting.cancel()
            await running
        yield worker
    finally:
        worker.stop()
        if at_once:
            worker.stop()
        await running


async def consumed(stream: Stream[Any], group: str, *, timeout: timedelta = timedelta(seconds=30)) -> None:
    """Wait until a consumer group has committed everything that was appended before this call.

    Raises:
        NotFound: The group did not exist within the timeout: no worker that consumes it has started.
        TimeoutError: The group was too slow; the message has its positions, and the error at which it stopped.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    ends: dict[int, int] | None = None
    while True:
        late = time.monotonic() > deadline
        try:
            found = await stream.lag(group)
        except NotFound:
            # Its first consumer creates the group shortly after its worker has started.
            if late:
                raise
            found = []
        if found:
            ends = ends or {part.partition: part.end for part in found}
            behind = [part for part in found if part.next < ends.get(part.partition, 0)]
            if not behind:
                return
            if late:
                at = ", ".join(
                    f"partition {part.partition} at {part.next} of {ends[part.partition]}"
                    + (f" ({part.failing_error})" if part.failing_error else "")
                    for part in behind
                )
                raise TimeoutError(f"group {group} of stream {stream.name} is behind: {at}")
        await asyncio.sleep(0.02)


def _in_memory() -> Path | None:
    """A folder in memory with enough space for databases; None where there is none, as in many containers."""
    if not os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) or shutil.disk_usage(_SHARED_MEMORY).free < _MEMORY_FREE_BYTES:
        return None
    return _SHARED_MEMORY
