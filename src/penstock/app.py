"""Penstock: what an application declares, and what it can do with jobs.

    app = Penstock()

    @app.job("invoice-shipments", attempts=3)
    async def invoice_shipment(job: Job[Shipment]) -> None: ...

    await invoice_shipment.enqueue(Shipment("shp_123"))

Everything is async; `app.sync` offers the same to threads without a loop (Django, Flask).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload
from uuid import UUID

import uuid_utils.compat

from penstock import lake
from penstock.batches import send_batches
from penstock.callers import enqueue_through
from penstock.errors import InvalidInput, JobFailed, NotFound
from penstock.handler import Group, Handler, Job, group_of, payload_type
from penstock.job import (
    Admission,
    Backoff,
    Delivery,
    Enqueued,
    Executor,
    JobCounts,
    JobRecord,
    JobTypeRecord,
    NewJob,
    Options,
    RateLimit,
    Status,
    parse_id,
)
from penstock.payload import Codec
from penstock.postgres import jobs, migrate
from penstock.postgres.database import Database
from penstock.postgres.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.worker import Worker
from penstock.worker.types import WorkedType

if TYPE_CHECKING:
    from penstock.sync import SyncPenstock

T = TypeVar("T")


class JobType(Generic[T]):
    """A declared job type: enqueue through it, and call it like the function it was made from.

    Made by `Penstock.job` and `Penstock.job_type`.
    """

    def __init__(self, app: Penstock, name: str, payload: Any, options: Options, handler: Handler | None, group: Group) -> None:
        self.app = app
        self.name = name
        self.options = options
        self.handler = handler
        self.group: Group = group
        self.codec: Codec[T] = Codec(payload, name)
        self.declared = False

    def __call__(self, job: Job[T]) -> Any:
        """Run the handler itself, as a plain function."""
        if self.handler is None:
            raise InvalidInput(f"job type {self.name} has no handler here")
        return self.handler(job)

    async def enqueue(
        self,
        data: T | None = None,
        *,
        id: UUID | str | None = None,
        key: str | None = None,
        priority: int = 0,
        run_after: datetime | timedelta | None = None,
        expires_at: datetime | timedelta | None = None,
        unique: str | None = None,
        connection: Any = None,
    ) -> Enqueued:
        """Enqueue one job. See `Penstock.enqueue`."""
        return await self.app.enqueue(
            self,
            data,
            id=id,
            key=key,
            priority=priority,
            run_after=run_after,
            expires_at=expires_at,
            unique=unique,
            connection=connection,
        )

    async def enqueue_many(self, new: Iterable[NewJob | T], *, connection: Any = None) -> list[Enqueued]:
        """Enqueue many jobs. See `Penstock.enqueue_many`."""
        return await self.app.enqueue_many(self, new, connection=connection)


class Penstock:
    """An application's jobs on one database.

    Args:
        database_url: PostgreSQL, 15 or newer; None: `PENSTOCK_DATABASE_URL`, `DATABASE_URL`, or an embedded server.
        data_dir: Folder of the embedded server; None: `PENSTOCK_DATA_DIR`, or `.penstock` in the current folder.
        settings: Everything else; None: from the environment.
    """

    def __init__(
        self, database_url: str | None = None, *, data_dir: Path | str | None = None, settings: Settings | None = None
    ) -> None:
        given: dict[str, Any] = {}
        if database_url is not None:
            given["database_url"] = database_url
        if data_dir is not None:
            given["data_dir"] = Path(data_dir)
            if database_url is None:
                given["database_url"] = None
        self.settings = (settings or Settings()).model_copy(update=Settings(**given).model_dump(include=set(given)))
        self.types: dict[str, JobType[Any]] = {}
        self._database: Database | None = None
        self._server: EmbeddedServer | None = None
        self._opening = asyncio.Lock()
        self._sync: SyncPenstock | None = None

    # -- declaring

    def job(
        self,
        name: str | None = None,
        *,
        delivery: Delivery | str = Delivery.AT_LEAST_ONCE,
        attempts: int | None = None,
        concurrency: int | None = None,
        visibility_timeout: timedelta = timedelta(minutes=5),
        time_limit: timedelta | None = None,
        backoff: Backoff | None = None,
        rate_limit: RateLimit | None = None,
        keep_result: bool = False,
        executor: Executor = "auto",
    ) -> Callable[[Callable[[Job[T]], Any]], JobType[T]]:
        """Declare a job type by its handler, a function of one `Job[T]`.

        Args:
            name: Name of the type; None: the function's name with dashes.
            delivery: `at_least_once`, or `at_most_once`.
            attempts: How often a job is started at most; None: 5, or 1 for `at_most_once`.
            concurrency: Most jobs in flight over all workers; None: no limit, 0: paused.
            visibility_timeout: How long a claimed job belongs to its worker.
            time_limit: How long the handler may run; None: nine tenths of the visibility timeout.
            backoff: Delays between attempts; None: 2, 4, 8, ... s up to an hour.
            rate_limit: Most starts in a period over all workers.
            keep_result: Whether to keep what the handler returns.
            executor: "auto": async handlers on the loop, plain ones in threads; "process": in processes.

        Raises:
            InvalidInput: The handler or an option cannot be used.
        """

        def declare(handler: Callable[[Job[T]], Any]) -> JobType[T]:
            return self._declare(
                name or getattr(handler, "__name__", "").replace("_", "-"),
                payload_type(handler),
                Options(
                    _delivery(delivery), attempts, concurrency, visibility_timeout, time_limit,
                    backoff or Backoff(), rate_limit, keep_result,
                ),
                handler,
                group_of(handler, executor),
            )  # fmt: skip

        return declare

    @overload
    def job_type(self, name: str, payload: type[T], options: Options = ...) -> JobType[T]: ...
    @overload
    def job_type(self, name: str, payload: Any = ..., options: Options = ...) -> JobType[Any]: ...
    def job_type(self, name: str, payload: Any = Any, options: Options = Options()) -> JobType[Any]:
        """Declare a job type without a handler, where jobs are only enqueued."""
        return self._declare(name, payload, options, None, "async")

    def _declare(self, name: str, payload: Any, options: Options, handler: Handler | None, group: Group) -> JobType[Any]:
        if name in self.types:
            raise InvalidInput(f"job type {name} is declared twice", hint="Give each handler a name of its own.")
        declared: JobType[Any] = JobType(self, name, payload, options, handler, group)
        self.types[name] = declared
        return declared

    # -- opening and closing

    async def open(self) -> None:
        """Connect: start the embedded server if there is no URL, and check (embedded: migrate) the schema.

        Every call opens by itself when needed. Raises `DatabaseUnavailable`, `SchemaMismatch`, `EmbeddedServerError`.
        """
        async with self._opening:
            if self._database is not None:
                return
            database = Database(await self.start_server(), self.settings)
            try:
                await database.open()
                if self._server is not None:
                    await migrate.migrate(database)
                else:
                    await migrate.check(database)
            except BaseException:
                await database.close()
                raise
            self._database = database

    async def start_server(self) -> str:
        """The URL of the database, after starting the embedded server when there is none configured."""
        if self.settings.database_url is not None:
            return self.settings.database_url.get_secret_value()
        if self._server is None:
            self._server = EmbeddedServer(self.settings.data_dir)
        return await asyncio.to_thread(self._server.start)

    async def close(self) -> None:
        """Close the connections, and leave the embedded server, which stops when nobody uses it."""
        database, self._database = self._database, None
        if database is not None:
            await database.close()
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.stop)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def sync(self) -> SyncPenstock:
        """The same for threads without an event loop."""
        if self._sync is None:
            from penstock.sync import SyncPenstock

            self._sync = SyncPenstock(self)
        return self._sync

    async def database(self) -> Database:
        """The open database."""
        if self._database is None:
            await self.open()
        assert self._database is not None  # noqa: S101
        return self._database

    async def migrate(self) -> migrate.Migrated:
        """Bring the schema to this version."""
        database = Database(await self.start_server(), self.settings)
        await database.open()
        try:
            return await migrate.migrate(database)
        finally:
            await database.close()

    # -- enqueueing

    async def enqueue(
        self,
        type: JobType[T] | str,
        data: T | None = None,
        *,
        id: UUID | str | None = None,
        key: str | None = None,
        priority: int = 0,
        run_after: datetime | timedelta | None = None,
        expires_at: datetime | timedelta | None = None,
        unique: str | None = None,
        connection: Any = None,
    ) -> Enqueued:
        """Enqueue one job.

        Args:
            type: The job type, or its name.
            data: The payload; None: an empty object.
            id: Identity; enqueueing the same id again is the same job. None: a new UUIDv7.
            key: Whose job it is.
            priority: -100 to 100, lower first.
            run_after: Not to be started before: a time, or a span from now by the database's clock.
            expires_at: Not to be started after: a time, or a span from now by the database's clock.
            unique: While a job of the type with this key is queued, return that one instead.
            connection: Enqueue through this connection, in its transaction: of asyncpg, psycopg, SQLAlchemy (connection or
                session, sync or async), or Django. The job exists when that transaction commits.

        Returns:
            The receipt, with the id of the job.

        Raises:
            InvalidInput: Something about the call is wrong; nothing was written.
            NotFound: There is no such job type.
            DatabaseUnavailable: Not known whether it was written: retry with the same id.
        """
        new = NewJob({} if data is None else data, id, key, priority, run_after, expires_at, unique)
        return (await self.enqueue_many(type, [new], connection=connection))[0]

    async def enqueue_many(self, type: JobType[T] | str, new: Iterable[NewJob | T], *, connection: Any = None) -> list[Enqueued]:
        """Enqueue many jobs of one type, in batches of 10,000, each all or none.

        When one cannot be enqueued, the batches before it are there and the error is raised; give ids to repeat the call safely.

        Args:
            type: The job type, or its name.
            new: Payloads, or `NewJob` for what else a job can have.
            connection: See `enqueue`.

        Returns:
            A receipt for each, in order.
        """
        declared = await self._ready(type, connection)
        if connection is not None:
            return await send_batches(declared.name, declared.codec, list(new), lambda batch: enqueue_through(connection, batch))
        database = await self.database()
        return await send_batches(declared.name, declared.codec, list(new), lambda batch: jobs.enqueue_many(database, batch))

    async def _ready(self, type: JobType[Any] | str, connection: Any) -> JobType[Any]:
        declared = self.types.get(type) if isinstance(type, str) else type
        if declared is None:
            return JobType(self, str(type), Any, Options(), None, "async")
        if not declared.declared and connection is None:
            await jobs.declare_job_type(await self.database(), declared.name, declared.options.as_json())
            declared.declared = True
        return declared

    # -- looking and steering

    async def find(self, id: UUID | str) -> JobRecord:
        """Everything known of a job, from a lake of history when the archive no longer has it. Raises `NotFound`."""
        job_id = parse_id(id)
        database = await self.database()
        found = await jobs.find(database, [job_id])
        if job_id not in found:
            if (record := await lake.find(database, job_id)) is not None:
                return record
            raise NotFound(f"no such job: {job_id}", hint="Its day may have been pruned from the archive.")
        return found[job_id]

    async def find_many(
        self, *, name: str | None = None, status: Status | str | None = None, key: str | None = None, limit: int = 50
    ) -> list[JobRecord]:
        """Jobs, latest first, by type, status and key; at most 1,000."""
        database = await self.database()
        ids = await jobs.list_ids(database, name, None if status is None else str(status), key, limit)
        found = await jobs.find(database, ids)
        return [found[id] for id in ids if id in found]

    async def wait(self, id: UUID | str, *, timeout: timedelta = timedelta(minutes=1)) -> JobRecord:
        """Wait until a job is finished.

        Raises:
            JobFailed: It ended without success.
            NotFound: There is no such job.
            TimeoutError: It was not finished in time.
        """
        pause = 0.01
        async with asyncio.timeout(timeout.total_seconds()):
            while not (record := await self.find(id)).status.finished:
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, 1.0)
        if record.status is not Status.SUCCEEDED:
            message = record.errors[-1].get("message") if record.errors else None
            raise JobFailed(f"job {record.id} {record.status}" + (f": {message}" if message else ""))
        return record

    async def cancel(self, id: UUID | str) -> str:
        """Cancel a job: "cancelled" when it was queued, "cancelling" when its handler is being told, else its status."""
        return await jobs.cancel(await self.database(), parse_id(id))

    async def replay(self, id: UUID | str, *, new_id: UUID | str | None = None) -> Enqueued:
        """Enqueue a copy of a running or finished job. Raises `NotFound`, or `Conflict` while it is queued."""
        new = parse_id(new_id) if new_id is not None else uuid_utils.compat.uuid7()
        return Enqueued(await jobs.replay(await self.database(), parse_id(id), new), Admission.QUEUED)

    async def job_types(self) -> list[JobTypeRecord]:
        """All job types in the database."""
        return await jobs.job_types(await self.database())

    async def change_job_type(self, name: str, **options: Any) -> JobTypeRecord:
        """Change options of a job type in the database, by their names in SQL. Raises `NotFound`, `InvalidInput`."""
        return await jobs.change_job_type(await self.database(), name, options)

    async def pause(self, name: str) -> None:
        """Claim no more jobs of a type; running ones go on. Raises `NotFound`."""
        await jobs.pause(await self.database(), name)

    async def resume(self, name: str) -> None:
        """End a pause. Raises `NotFound`, `Conflict`."""
        await jobs.resume(await self.database(), name)

    async def counts(self) -> list[JobCounts]:
        """How each job type is doing."""
        return await jobs.counts(await self.database())

    async def prune(self, keep: timedelta) -> dict[str, int]:
        """Drop the days of the archive that ended longer ago than `keep`. Returns jobs by partition dropped."""
        return await jobs.prune(await self.database(), keep)

    # -- working

    async def worker(self, *names: str) -> Worker:
        """A worker for the handlers of this app (only of these types, when named). Run it with `await worker.run()`."""
        chosen = [self.with_handler(name) for name in names] or [t for t in self.types.values() if t.handler is not None]
        worked = {t.name: WorkedType(t.name, t.options, t.codec, t.handler, t.group) for t in chosen if t.handler is not None}
        return Worker(await self.database(), worked, self.settings)

    def with_handler(self, name: str) -> JobType[Any]:
        """The declared job type of this name. Raises `NotFound` when it has no handler here."""
        declared = self.types.get(name)
        if declared is None or declared.handler is None:
            raise NotFound(f"this app has no handler for {name}", hint=f"It has: {', '.join(sorted(self.types)) or 'none'}.")
        return declared


def _delivery(value: Delivery | str) -> Delivery:
    try:
        return Delivery(value)
    except ValueError:
        raise InvalidInput(f"unknown delivery: {value}", hint="Use at_least_once or at_most_once.") from None
