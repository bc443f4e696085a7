"""Running the work of an application in the process of a test."""

from __future__ import annotations

import asyncio
import inspect
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from importlib import resources
from typing import Any, ParamSpec

from pydantic import SecretStr

from penstock.app import Penstock
from penstock.core.blocking import run_without_loop
from penstock.core.encryption import SealedCodec
from penstock.core.user_code import check_ran
from penstock.errors import Conflict, InvalidInput, NotFound
from penstock.groups import queries as ownership
from penstock.groups import rebalance as balance
from penstock.jobs import claim_queries, opening, type_queries, worker_queries
from penstock.jobs.handler import Job, Jobs, set_current_job
from penstock.jobs.job_type import JobCall, JobType
from penstock.jobs.models import make_id
from penstock.jobs.records import JobRecord, parse_id
from penstock.pools import queries as pools
from penstock.pools.pool import Pool
from penstock.postgres.database import Database
from penstock.streams import group_queries
from penstock.streams.consumer.declared import DeclaredConsumer
from penstock.streams.stream import Stream
from penstock.worker import Worker
from penstock.worker.completer import Completer
from penstock.worker.executor import Executor
from penstock.workflows import queries as workflows

P = ParamSpec("P")
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
    keys = app.context.keyring.ids or None
    for declared in chosen:
        if isinstance(declared.declarer, Pool):
            await declared.declarer.declare()
    await app.subscribe(*(app.types[name] for name in worked))
    for worked_type in worked.values():
        worked_type.refresh(await type_queries.declare_job_type(database, worked_type.name, worked_type.declared.as_json()))
    queues = [t.name for t in chosen if not isinstance(t.declarer, Pool)]
    keyed_pools = [t.declarer for t in chosen if isinstance(t.declarer, Pool)]
    completer = Completer(database, app.settings.code_version)
    executor = Executor(database, worked, app.settings, completer.settle, completer.reports)
    completing = asyncio.create_task(completer.run())
    # The executor ends handlers at their time limits, as in a worker.
    watching = asyncio.create_task(executor.run())
    ran: dict[Any, None] = {}
    try:
        while limit > 0:
            while (done := await workflows.resolve(database)) != 0:
                # None: a worker beside this one does it.
                await asyncio.sleep(0 if done else 0.01)
            await worker_queries.promote(database)
            claimed = (await claim_queries.claim(database, "testing", queues, min(limit, 1000), {}, keys)).jobs if queues else []
            for pool in keyed_pools:
                # One job of each key, so that the next job of a key runs after it.
                owned = await _own(database, pool)
                keyed = await pools.claim(database, _MEMBER, pool.name, owned, 1000, 1, None, [], keys=keys)
                claimed += [job for job, _ in keyed.jobs]
            if not claimed:
                # The claim archives what has expired, for which others may wait.
                if await workflows.resolve(database) == 0:
                    break
                continue
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
    found = await opening.find(app.context, list(ran), log=True)
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


async def run_due(app: Penstock, *names: str, timeout: timedelta = timedelta(seconds=30)) -> list[JobRecord]:
    """Run a worker in this process until nothing is due: jobs, runs of schedules, and events of consumer groups.

    What becomes due later (a retry, a job with `run_after`, the next run of a schedule) does not run; see `advance`.

    Args:
        app: An open app.
        names: Job types, pools, consumer groups (`stream/group`) and schedules to work on; none: all.
        timeout: How long it may take.

    Returns:
        Records of the jobs that finished meanwhile, at most 10,000, in the order in which they finished.

    Raises:
        TimeoutError: Something stays due, such as jobs of a paused type or events whose handler keeps failing; the message names
            it.
    """
    database = await app.database()
    types = [name for name, type in app.types.items() if type.works and (not names or name in names)]
    schedules = [name for name, each in app.schedules.items() if each.runs_as != "per-worker" and (not names or name in names)]
    consumers = [consumer for name, consumer in app.consumers.items() if not names or name in names]
    statement = resources.files(__package__).joinpath("due.sql").read_text()
    began = await database.fetchval("select clock_timestamp()")
    deadline = time.monotonic() + timeout.total_seconds()
    # What runs may cause work of another kind, which was looked at before: only two quiet looks in a row say that nothing is due.
    quiet = 0
    async with running_worker(app, *names):
        while quiet < 2:
            behind = [await _behind(consumer) for consumer in consumers]
            due = await database.fetchrow(statement, types, schedules)
            left = [each for each in behind if each] + [
                f"{due[what]} {what}" + (f" of {due['types']}" if what == "jobs" else "")
                for what in ("jobs", "schedules", "ticks")
                if due[what]
            ]
            quiet = 0 if left else quiet + 1
            if left and time.monotonic() > deadline:
                raise TimeoutError(f"still due after {timeout}: {', '.join(left)}")
            await asyncio.sleep(0.01)
    finished = await database.fetch(
        """
        select id from penstock.archived_jobs
        where name = any($1) and finished_at >= $2 order by finished_at, id limit 10000
        """,
        types,
        began,
    )
    found = await opening.find(app.context, [row["id"] for row in finished], log=True)
    return [found[row["id"]] for row in finished]


async def _behind(consumer: DeclaredConsumer) -> str | None:
    """How far a consumer group is behind; None: it is not."""
    try:
        lags = await group_queries.lag(await consumer.stream.context.database(), consumer.stream.name, consumer.group)
    except NotFound:
        return f"{consumer.name}, which does not exist yet"
    events = sum(each.lag for each in lags)
    errors = sorted({each.failing_error for each in lags if each.failing_error})
    return f"{events} events of {consumer.name}" + (f" ({errors[0]})" if errors else "") if events else None


class _Control:
    """Stands in for the worker of a job that `run_job` runs."""

    cancelled = False

    async def extend(self, duration: timedelta | None) -> None:
        """See `JobControl`."""

    def extend_blocking(self, duration: timedelta | None) -> None:
        """See `JobControl`."""

    def progress(self, value: Any) -> None:
        """See `JobControl`."""

    def log(self, line: str) -> None:
        """See `JobControl`."""

    async def finish(self, connection: Any, result: Any) -> None:
        """See `JobControl`: a job that is stored nowhere has no row to finish."""

    def steps(self) -> _Steps:
        """See `JobControl`."""
        return _Steps()

    async def group(self) -> None:
        """See `JobControl`: a job that is stored nowhere is in no group."""

    def group_blocking(self) -> None:
        """See `JobControl`."""


class _Steps:
    """The durable steps of a job that is stored nowhere: each is done, and a sleep is over at once."""

    async def do(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], connection: Any
    ) -> Any:
        """See `StepControl`."""
        result = function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    def do_blocking(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], connection: Any
    ) -> Any:
        """See `StepControl`."""
        return function(*args, **kwargs)

    async def sleep(self, name: str, duration: timedelta) -> None:
        """See `StepControl`."""

    async def wait_for(self, name: str, type: Any, timeout: timedelta | None) -> Any:
        """See `StepControl`."""
        raise self._needs_database(f"wait for the signal {name}")

    async def gather(self, name: str, children: Any) -> list[Any]:
        """See `StepControl`."""
        raise self._needs_database(f"gather the children {name}")

    def blocking(self, call: Coroutine[Any, Any, Any]) -> Any:
        """See `StepControl`."""
        return run_without_loop(call)

    @staticmethod
    def _needs_database(what: str) -> Conflict:
        return Conflict(
            f"a job that is stored nowhere cannot {what}", hint="Enqueue it, and use run_due_jobs: see docs/testing.md."
        )


async def run_job(type: JobType[P] | JobCall[P], *args: P.args, **kwargs: P.kwargs) -> Any:
    """Call the handler of a job as a worker does, without a database.

    For example: `await run_job(resize, path="a.png", width=300)`. The payload is checked and converted as in an enqueue and a
    claim; middleware, dependencies (with their overrides) and the lifespan are around the handler. The job is on its first
    attempt, and is not stored anywhere.

    Args:
        type: The job type, or one with options: `resize.options(key="u1")`.
        args: Arguments of the job.
        kwargs: Arguments of the job by name.

    Returns:
        What the handler returns; for a batch handler the outcome of this job.

    Raises:
        Exception: What the handler raises, such as `Retry` or `Fail`.
        InvalidInput: The arguments do not fit, the type has no handler, or what is given is no job type.
    """
    if not isinstance(type, (JobType, JobCall)):
        raise InvalidInput(
            f"run_job takes a job type, not {type!r:.100}",
            hint="Call the function of a schedule, a consumer or a start-up task itself: await report(Tick(...)).",
        )
    job_type = type if isinstance(type, JobType) else type.type
    worked = job_type.worked()
    if worked is None:
        raise InvalidInput(f"job type {job_type.name} has no handler in this application")
    new = type.new(*args, **kwargs)
    codec = job_type.codec.plain if isinstance(job_type.codec, SealedCodec) else job_type.codec
    data = codec.load(codec.dump(new.data))
    id = make_id() if new.id is None else parse_id(new.id)
    most = new.max_attempts or job_type.declared.as_json()["max_attempts"]
    job: Job[Any] = Job(id, job_type.name, new.key, 1, most, data, datetime.now(UTC), _Control())
    set_current_job(job)
    work: Any = job if worked.batch is None else Jobs([job])

    async def call(dependencies: Mapping[str, Any]) -> Any:
        if worked.kind == "async":
            return await worked.handler(work, **dependencies)
        return await asyncio.to_thread(worked.handler, work, **dependencies)

    hooks = job_type.context.hooks
    async with hooks.running():
        around = hooks.around(job_type.signature.plan, Job if worked.batch is None else Jobs)
        result = await (call({}) if around is None else around(work, call))
    outcome = result[0] if worked.batch is not None and result is not None else result
    check_ran(outcome, job_type.name)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
