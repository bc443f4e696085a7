"""Penstock: the application object, which declares job types and other objects, and operates on jobs.

All calls are async; `app.sync`, `orders.sync` and so on offer the same calls to threads without an event loop (Django, Flask).
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from pydantic import SecretStr

from penstock.core.checks import LONGEST_SPAN, check_secrets, check_span, check_text, storable_text
from penstock.core.logs import get_logger
from penstock.core.serialization import Codec
from penstock.errors import Conflict, InvalidInput, JobFailed, NotFound, PenstockError
from penstock.history import lake, lake_queries
from penstock.jobs import opening, type_queries, worker_queries
from penstock.jobs.administration import JobAdministration
from penstock.jobs.hook_declarations import HookDeclarations
from penstock.jobs.job_type import JobType
from penstock.jobs.records import HandlerRecord, JobRecord, Status, parse_id
from penstock.jobs.scaling import ScaleAdvice, advise
from penstock.operations.operations import Operations
from penstock.pools import views as pool_views
from penstock.pools.administration import PoolAdministration
from penstock.pools.pool import Pool
from penstock.pools.service import new_member_id
from penstock.postgres.context import Context
from penstock.postgres.database import Database
from penstock.postgres.migrate import Migrated, MigrationPlan
from penstock.postgres.translation import lacks_rights
from penstock.schedules.administration import ScheduleAdministration
from penstock.schedules.schedule import Schedule, Tick
from penstock.settings import Settings
from penstock.streams.administration import StreamAdministration
from penstock.streams.consumer.declared import DeclaredConsumer
from penstock.sync import SyncPenstock
from penstock.topics import queries as topics
from penstock.topics.administration import TopicAdministration
from penstock.topics.subscription import renew_subscriptions, subscription_of
from penstock.worker import Work, Worker, stop_on
from penstock.worker.administration import WorkerAdministration
from penstock.worker.leader import LeaderTask
from penstock.worker.pulling import PullingWorker
from penstock.workflows.administration import WorkflowAdministration
from penstock.workflows.spark_job import SparkJobDeclarations

log = get_logger("penstock")


class Penstock(
    JobAdministration,
    PoolAdministration,
    TopicAdministration,
    StreamAdministration,
    ScheduleAdministration,
    WorkerAdministration,
    WorkflowAdministration,
    SparkJobDeclarations,
    HookDeclarations,
):
    """An application's jobs on one database.

        app = Penstock()

        @app.job("invoice-shipments", max_attempts=3)
        async def invoice_shipment(job: Job[Shipment]) -> None: ...

        await invoice_shipment.enqueue(Shipment("shp_123"))

    Args:
        database_url: URL of PostgreSQL 15 or newer; None: `PENSTOCK_DATABASE_URL`, `DATABASE_URL`, or an embedded server.
        data_dir: Folder of the embedded server; None: `PENSTOCK_DATA_DIR`, or `.penstock` in the current folder.
        keys: Keys of encrypted payloads, as base64 text or 32 bytes each: the first encrypts, all decrypt. None: `PENSTOCK_KEYS`.
        settings: Other settings; None: settings from the environment.
    """

    def __init__(
        self,
        database_url: str | None = None,
        *,
        data_dir: Path | str | None = None,
        keys: Iterable[str | bytes | SecretStr] | None = None,
        settings: Settings | None = None,
    ) -> None:
        if settings is not None and not isinstance(settings, Settings):
            raise InvalidInput(
                f"settings must be Settings, not of type {type(settings).__name__}", hint="For example: Settings(threads=4)"
            )
        if keys is not None:
            check_secrets("keys", keys, 'keys=["<32 bytes in base64>"]')
        given: dict[str, Any] = {}
        if database_url is not None:
            if not isinstance(database_url, str):
                raise InvalidInput(f"database_url must be text, not of type {type(database_url).__name__}")
            given["database_url"] = database_url
        if data_dir is not None:
            if not isinstance(data_dir, (str, Path)) or not data_dir or not storable_text(str(data_dir)):
                raise InvalidInput(f"data_dir must be the path of a folder, not {data_dir!r:.100}")
            given["data_dir"] = Path(data_dir)
            if database_url is None:
                given["database_url"] = None
        if keys is not None:
            given["keys"] = tuple(keys)
        chosen = (settings or Settings.read()).model_copy(update=Settings.read(**given).model_dump(include=set(given)))
        super().__init__(Context(chosen, self._declare_all))
        self.make_pulling = PullingWorker

    @property
    def settings(self) -> Settings:
        """The settings of this application."""
        return self.context.settings

    # -- opening and closing

    async def open(self, *, timeout: timedelta = timedelta(0)) -> None:
        """Connect: start the embedded server if no URL is configured, check (embedded: migrate) the schema, and `declare`.

        Every call opens the application implicitly when needed.

        Args:
            timeout: How long to wait for a database that does not answer; services give `settings.start_timeout`.

        Raises:
            DatabaseUnavailable: The database does not answer.
            SchemaMismatch: The schema is missing, or of another version.
            EmbeddedServerError: The embedded server does not start.
            InvalidInput, Conflict: The database refuses a declaration.
        """
        check_span("timeout", timeout, zero=True)
        await self.context.open(timeout=timeout)

    @property
    def is_open(self) -> bool:
        """Whether connections are open in this process and on this event loop."""
        return self.context.is_open

    async def declare(self) -> list[str]:
        """Write the declarations of this application into the database, with the options in the code.

        These are job types, pools, topics, streams, subscriptions without a time to live, schedules, and tasks of the leader.
        `penstock declare MODULE:APP` writes them at deployment, and a worker those that it works on when it starts. `open` writes
        all but schedules and tasks. An administrator's change remains in effect until the code declares other options. What was
        dropped is created again by all of these, but not by a call that opens the application implicitly, such as an enqueue.

        Returns:
            Names of the declared objects, such as "job invoice-shipments".

        Raises:
            InvalidInput, Conflict: The database refuses a declaration.
            PenstockError: The role may not declare.
        """
        declared = []
        for what, declare in [*self._declarations(JobType.declare), *self._worked_declarations()]:
            await declare()
            declared.append(what)
        return declared

    def _declarations(
        self, declare_type: Callable[[JobType[Any]], Awaitable[None]]
    ) -> list[tuple[str, Callable[[], Awaitable[object]]]]:
        found: list[tuple[str, Callable[[], Awaitable[object]]]] = []
        for topic in self.topics.values():
            found.append((f"topic {topic.name}", topic.declare))
        for type in self.types.values():
            # A subscription with a time to live belongs to the workers that renew it.
            subscription = subscription_of(type)
            if subscription is None or subscription.ttl is None:
                found.append((f"{'pool' if isinstance(type.declarer, Pool) else 'job'} {type.name}", partial(declare_type, type)))
        for stream in self.streams.values():
            found.append((f"stream {stream.name}", stream.declare))
        return found

    def _worked_declarations(self) -> list[tuple[str, Callable[[], Awaitable[object]]]]:
        """What workers alone need. A process that only enqueues leaves it to them, and to the deployment."""
        return [
            *((f"schedule {schedule.name}", schedule.declare) for schedule in self.schedules.values()),
            *((f"leader {task.name}", task.declare) for task in self.leader_tasks.values()),
        ]

    async def _declare_all(self, called: bool) -> None:
        """Write declarations as far as the role may and the database can; calls that need a declaration try again.

        What was dropped is created again only when `open` was called, as at the start of a program.
        """
        for what, declare in self._declarations(partial(JobType.ensure, again=called)):
            try:
                await declare()
            except (InvalidInput, Conflict):
                raise
            except PenstockError as error:
                # A role that only enqueues relies on the workers, or an administrator, to have declared what it uses.
                quiet = lacks_rights(error)
                (log.debug if quiet else log.warning)("declaration_failed", declaration=what, error=error)

    async def start_server(self) -> str:
        """Return the URL of the database, and start the embedded server when no URL is configured."""
        return await self.context.start_server()

    def database_url(self, driver: str | None = None) -> str:
        """The URL of the database for the program's own connections, as in `create_engine(app.database_url("psycopg"))`.

        Without a configured database this starts the embedded server, unless it runs, and keeps it running until this process
        ends, since connections alone do not keep it. The call blocks meanwhile.

        Args:
            driver: Driver of SQLAlchemy: `psycopg`, `asyncpg`, ...; None: a URL for libpq, asyncpg and psycopg themselves.

        Raises:
            EmbeddedServerError: The embedded server does not start.
        """
        url = self.context.held_url()
        return url if driver is None else f"postgresql+{driver}://{url.partition('://')[2]}"

    async def close(self) -> None:
        """Close the connections of this loop. The embedded server stops when no process uses it any more."""
        await self.context.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def sync(self) -> SyncPenstock:
        """The blocking half, for threads without an event loop. Declared objects have one too, such as `orders.sync`."""
        return SyncPenstock(self, self.context.background)

    async def database(self) -> Database:
        """The open database."""
        return await self.context.database()

    async def migrate(self, *, timeout: timedelta = timedelta(0)) -> Migrated:
        """Bring the schema to this version. `timeout` as in `open`."""
        check_span("timeout", timeout, zero=True)
        return await self.context.migrate(timeout=timeout)

    async def plan_migration(self) -> MigrationPlan:
        """What `migrate` would change now, and the statements with which it would: it runs them, and rolls them back.

        Raises:
            SchemaMismatch: `migrate` would be refused.
        """
        return await self.context.plan_migration()

    # -- looking and steering

    async def find(self, id: UUID | str) -> JobRecord:
        """The record of a job, from a lake of history when the archive no longer has it. Raises `NotFound`.

        What is encrypted is decrypted with the keys of this application; see `JobRecord`.

        Args:
            id: Id of the job.
        """
        job_id = parse_id(id)
        database = await self.database()
        found = await opening.find(self.context, [job_id], log=True)
        if job_id not in found:
            if (record := await lake.find(database, job_id)) is not None:
                return opening.opened(record, self.context.keyring)
            raise NotFound(f"no such job: {job_id}", hint="Its day may have been pruned from the archive.")
        return found[job_id]

    async def wait(self, id: UUID | str, *, timeout: timedelta = timedelta(minutes=1)) -> JobRecord:
        """Wait until a job is finished.

        Args:
            id: Id of the job.
            timeout: How long to wait.

        Raises:
            JobFailed: The job ended without success.
            NotFound: The job does not exist.
            TimeoutError: The job was not finished in time.
        """
        check_span("timeout", timeout, zero=True)
        pause = 0.01
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                while not (record := await self.find(id)).status.finished:
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.5, 1.0)
        except TimeoutError:
            raise TimeoutError(f"job {id} has not finished within {timeout}: `penstock jobs show {id}` says why") from None
        if record.status is not Status.SUCCEEDED:
            message = record.errors[-1].get("message") if record.errors else None
            raise JobFailed(f"job {record.id} {record.status}" + (f": {message}" if message else ""))
        return record

    async def scale_advice(
        self, *, wait: timedelta = timedelta(seconds=5), over: timedelta = timedelta(minutes=1)
    ) -> list[ScaleAdvice]:
        """Scaling advice for each job type: how long jobs wait, and how many workers keep the wait below `wait`.

        Args:
            wait: How long a ready job may wait.
            over: Length of the recent past whose load is measured.
        """
        check_span("wait", wait, shortest=timedelta(milliseconds=1), longest=timedelta(days=366))
        check_span("over", over, longest=timedelta(days=366))
        return [advise(load, wait.total_seconds()) for load in await pool_views.load_of_types(await self.database(), over)]

    async def prune(self, keep: timedelta | None = None) -> dict[str, int]:
        """Drop the parts of the archive whose jobs were kept for long enough, and topic messages that no copy refers to then.

        Also deletes what came back from lakes and is older than the setting `keep_history`. Returns the number of dropped jobs by
        partition.

        Args:
            keep: How long finished jobs are kept whose type does not say it, and messages; None: for ever.
        """
        if keep is not None:
            check_span("keep", keep, zero=True, longest=LONGEST_SPAN)
        database = await self.database()
        dropped = await worker_queries.prune(database, keep)
        while keep is not None and await topics.prune_messages(database, keep):
            pass
        history = self.settings.keep_history
        while history is not None and await lake_queries.prune_history(database, history):
            pass
        return dropped

    # -- working

    async def subscribe(self, *declared: JobType[Any]) -> None:
        """Subscribe those of the job types that are queues of subscribers to their topics. A worker does so when it starts.

        Args:
            declared: Job types; those that are no queues of subscribers are left out.
        """
        for type in declared:
            if (subscription := subscription_of(type)) is not None:
                await subscription.begin(await self.database(), type.declared.as_json())

    @property
    def operations(self) -> Operations:
        """Operations on all jobs that match a filter: cancel, replay or purge them."""
        return Operations(self.context)

    async def worker(self, *names: str) -> Worker:
        """A worker for the handlers and consumers of this app. Run it with `await worker.run()`.

        Args:
            names: Job types, pools, consumer groups (`stream/group`), schedules and tasks of the leader to work on; none: all.
        """
        for name in names:
            check_text("a name of work", name)
        scheduled = [
            replace(schedule, around=self.context.hooks.around(schedule.signature.plan, Tick))
            for name, schedule in self.schedules.items()
            if not names or name in names
        ]
        leading = [task for name, task in self.leader_tasks.items() if not names or name in names]
        beside_types = {
            *self.consumers,
            *self.leader_tasks,
            *(schedule.name for schedule in scheduled if schedule.runs_as != "job"),
        }
        chosen = [self.with_handler(name) for name in names if name not in beside_types]
        consumers = [self.consumers[name] for name in names if name in self.consumers]
        if not names:
            chosen = [t for t in self.types.values() if t.works]
            consumers = list(self.consumers.values())
        worked = {t.name: w for t in chosen if not isinstance(t.declarer, Pool) and (w := t.worked()) is not None}
        pools = [t.declarer.worked() for t in chosen if isinstance(t.declarer, Pool)]
        database = await self.database()
        await self.subscribe(*chosen)
        subscribed = [(s, t.declared.as_json()) for t in chosen if (s := subscription_of(t)) is not None]
        beside = {"renewal": lambda: renew_subscriptions(database, subscribed)} if subscribed else {}
        await type_queries.note_handlers(database, [*map(self._said_of, chosen), *_said_of_others(consumers, scheduled, leading)])
        process = new_member_id()
        parts = [
            await consumer.consumer(database, self.settings, f"{process}.c{number}")
            for number, consumer in enumerate(consumers, 1)
        ]
        return Worker(
            database,
            self.settings,
            Work(worked, pools, parts, scheduled, leading),
            process=process,
            beside=beside,
            lifespan=self.context.hooks.running,
            keyring=self.context.keyring,
            tracing=self.context.tracing,
        )

    def _said_of(self, type: JobType[Any]) -> HandlerRecord:
        if isinstance(type.declarer, Pool):
            kind = "pool"
        elif subscription_of(type) is not None:
            kind = "subscriber"
        else:
            kind = "schedule" if type.name in self.schedules else "job"
        schema = Codec[Any](type.signature.payload, type.name).schema()
        return HandlerRecord(kind, type.name, schema, type.declared.docs_url, type.declared.owner)

    async def run_worker(self, *names: str) -> None:
        """Run a worker until SIGTERM or SIGINT: `asyncio.run(app.run_worker())`. The application is opened and closed.

        Args:
            names: See `worker`.

        Raises:
            PenstockError: See `Worker.run`.
        """
        async with self:
            worker = await self.worker(*names)
            stop_on(worker.stop, asyncio.get_running_loop())
            await worker.run()

    def run_worker_sync(self, *names: str) -> None:
        """`run_worker` for a program without an event loop."""
        asyncio.run(self.run_worker(*names))


def _said_of_others(
    consumers: Iterable[DeclaredConsumer], schedules: Iterable[Schedule], tasks: Iterable[LeaderTask]
) -> list[HandlerRecord]:
    said = [HandlerRecord("consumer", c.name, c.stream.encoding.schema(), c.docs_url, c.owner) for c in consumers]
    said += [HandlerRecord("leader", task.name, None, task.docs_url, task.owner) for task in tasks]
    # Runs that are jobs have a job type, which is said.
    return said + [HandlerRecord("schedule", s.name, None, s.docs_url, s.owner) for s in schedules if s.runs_as != "job"]


def load(target: str) -> Penstock:
    """The app at MODULE:APP. Raises `InvalidInput` when it does not exist, or when its module cannot be imported."""
    module_name, _, attribute = target.partition(":")
    hint = "Give MODULE:APP, as seen from this folder, such as shop.jobs:app for shop/jobs.py."
    if not module_name or module_name.startswith("."):
        raise InvalidInput(f"there is no module {module_name or repr(target)}", hint=hint)
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, NameError, AttributeError) as error:
        # Unlike those of others, the messages of these errors name things of the source and hold no values.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (module_name == missing or module_name.startswith(missing + ".")):
            raise InvalidInput(f"there is no module {module_name}", hint=hint) from None
        raise InvalidInput(f"{module_name} cannot be imported: {error}", hint=f"See {_place_of(error)}.") from None
    found = getattr(module, attribute or "app", None)
    if not isinstance(found, Penstock):
        raise InvalidInput(f"{target} is not a Penstock app", hint="Give MODULE:APP, such as shop.jobs:app.")
    return found


def _place_of(error: Exception) -> str:
    """File and line where an import failed."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen ")]
    return f"{frames[-1].filename}, line {frames[-1].lineno}"
