"""Penstock: what an application declares, and what it can do with jobs.

    app = Penstock()

    @app.job("invoice-shipments", attempts=3)
    async def invoice_shipment(job: Job[Shipment]) -> None: ...

    await invoice_shipment.enqueue(Shipment("shp_123"))

Everything is async; `app.sync` offers the same to threads without a loop (Django, Flask).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import UUID

from penstock import lake
from penstock.batches import send_batches
from penstock.callers import enqueue_through
from penstock.declaring import JobDeclarations, JobType, ScheduleDeclarations, StreamDeclarations
from penstock.errors import Conflict, InvalidInput, JobFailed, NotFound, PenstockError
from penstock.job import (
    Admission,
    Enqueued,
    JobCounts,
    JobRecord,
    JobTypeRecord,
    NewJob,
    Options,
    Status,
    Why,
    make_id,
    parse_id,
)
from penstock.logs import get_logger
from penstock.message import TopicCounts
from penstock.payload import dump_json
from penstock.postgres import jobs, migrate, pool_views, schedules, topics
from penstock.postgres.database import Database, lacks_rights, unless_refused
from penstock.postgres.embedded import EmbeddedServer
from penstock.scaling import ScaleAdvice, advise
from penstock.schedule import ScheduleRecord
from penstock.settings import Settings
from penstock.streams import Stream
from penstock.topics import keep_subscribed
from penstock.worker import Worker
from penstock.worker.pool import new_member_id
from penstock.worker.types import WorkedType

if TYPE_CHECKING:
    from penstock.sync import SyncPenstock

T = TypeVar("T")
log = get_logger("penstock")


_Place = tuple[int, asyncio.AbstractEventLoop]


def _place() -> _Place:
    return os.getpid(), asyncio.get_running_loop()


class Penstock(JobDeclarations, StreamDeclarations, ScheduleDeclarations):
    """An application's jobs on one database.

    Args:
        database_url: PostgreSQL, 15 or newer; None: `PENSTOCK_DATABASE_URL`, `DATABASE_URL`, or an embedded server.
        data_dir: Folder of the embedded server; None: `PENSTOCK_DATA_DIR`, or `.penstock` in the current folder.
        settings: Everything else; None: from the environment.
    """

    def __init__(
        self, database_url: str | None = None, *, data_dir: Path | str | None = None, settings: Settings | None = None
    ) -> None:
        super().__init__()
        given: dict[str, Any] = {}
        if database_url is not None:
            given["database_url"] = database_url
        if data_dir is not None:
            given["data_dir"] = Path(data_dir)
            if database_url is None:
                given["database_url"] = None
        self.settings = (settings or Settings.read()).model_copy(update=Settings.read(**given).model_dump(include=set(given)))
        # Connections belong to the process and loop that opened them: a handler in a thread may call `sync`, a server may fork.
        self._databases: dict[_Place, Database] = {}
        self._opening: dict[_Place, asyncio.Lock] = {}
        self._servers: dict[int, EmbeddedServer] = {}
        self._held: dict[int, EmbeddedServer] = {}
        self._sync: SyncPenstock | None = None

    # -- opening and closing

    async def open(self, *, patience: timedelta = timedelta(0)) -> None:
        """Connect: start the embedded server if there is no URL, check (embedded: migrate) the schema, and `declare`.

        Every call opens by itself when needed.

        Args:
            patience: How long to wait for a database that does not answer; what runs for ever gives `settings.start_timeout`.

        Raises:
            DatabaseUnavailable: Nothing answers.
            SchemaMismatch: The schema is not there, or of another version.
            EmbeddedServerError: The embedded server does not start.
            InvalidInput, Conflict: The database refuses a declaration.
        """
        place = _place()
        for ended in [place for place in self._opening if place[1].is_closed()]:
            # Each asyncio.run() has a loop of its own, and not everybody closes what was opened in it.
            del self._opening[ended]
            self._databases.pop(ended, None)
        async with self._opening.setdefault(place, asyncio.Lock()):
            if place in self._databases:
                return
            database = Database(await self.start_server(), self.settings)
            try:
                await database.open()
                await database.answering(patience)
                if self.settings.database_url is None:
                    await migrate.migrate(database)
                else:
                    await migrate.check(database)
                self._databases[place] = database
                await self._declare_all()
            except BaseException:
                self._databases.pop(place, None)
                await database.close()
                raise

    @property
    def is_open(self) -> bool:
        """Whether there are open connections here: in this process, on this loop."""
        return _place() in self._databases

    async def declare(self) -> list[str]:
        """Write what this application declares into the database, with the options of the code.

        Job types, pools, topics, streams, and subscriptions without a time to live. Opening the application does it, a worker
        does it when it starts, and `penstock declare MODULE:APP` at deploy. What an administrator changed stays until the code
        says something new.

        Returns:
            What was declared, such as "job invoice-shipments".

        Raises:
            InvalidInput, Conflict: The database refuses a declaration.
            PenstockError: The role may not declare.
        """
        declared = []
        for what, declare in self._declarations():
            await declare()
            declared.append(what)
        return declared

    def _declarations(self) -> list[tuple[str, Callable[[], Awaitable[object]]]]:
        found: list[tuple[str, Callable[[], Awaitable[object]]]] = []
        for topic in self.topics.values():
            found.append((f"topic {topic.name}", topic.declare))
        for type in self.types.values():
            # A subscription with a time to live belongs to the workers that renew it.
            if type.subscription is None or type.subscription.ttl is None:
                found.append((f"{'job' if type.pool is None else 'pool'} {type.name}", type.declare))
        for stream in self.streams.values():
            found.append((f"stream {stream.name}", stream.declare))
        return found

    async def _declare_all(self) -> None:
        """As far as the role may, and the database can now: calls that need a declaration try again."""
        for what, declare in self._declarations():
            try:
                await declare()
            except (InvalidInput, Conflict):
                raise
            except PenstockError as error:
                # A role that only enqueues relies on the workers, or an administrator, to have declared what it uses.
                quiet = lacks_rights(error)
                (log.debug if quiet else log.warning)("declaration_failed", declaration=what, error=error)

    async def start_server(self) -> str:
        """The URL of the database, after starting the embedded server when there is none configured."""
        if self.settings.database_url is not None:
            return self.settings.database_url.get_secret_value()
        server = self._servers.setdefault(os.getpid(), EmbeddedServer(self.settings.data_dir))
        return await asyncio.to_thread(server.start)

    def database_url(self, driver: str | None = None) -> str:
        """The URL of the database for connections of your own, as `create_engine(app.database_url("psycopg"))`.

        Without a database configured this starts the embedded server when it does not run, and uses it until this process ends;
        connections alone would not keep it. Blocks meanwhile.

        Args:
            driver: Of SQLAlchemy: `psycopg`, `asyncpg`, ...; None: a URL for libpq, asyncpg and psycopg themselves.

        Raises:
            EmbeddedServerError: The embedded server does not start.
        """
        if self.settings.database_url is not None:
            url = self.settings.database_url.get_secret_value()
        else:
            url = self._held.setdefault(os.getpid(), EmbeddedServer(self.settings.data_dir)).start()
        return url if driver is None else f"postgresql+{driver}://{url.partition('://')[2]}"

    async def close(self) -> None:
        """Close the connections of this loop, and with the last leave the embedded server, which stops when nobody uses it."""
        place = _place()
        self._opening.pop(place, None)
        database = self._databases.pop(place, None)
        if database is not None:
            await database.close()
        if any(process == place[0] and not loop.is_closed() for process, loop in self._databases):
            return
        server = self._servers.pop(place[0], None)
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
        place = _place()
        if place not in self._databases:
            await self.open()
        return self._databases[place]

    async def migrate(self, *, patience: timedelta = timedelta(0)) -> migrate.Migrated:
        """Bring the schema to this version. `patience` as in `open`."""
        database = Database(await self.start_server(), self.settings)
        await database.open()
        try:
            await database.answering(patience)
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
        declared = self.types.get(type, type) if isinstance(type, str) else type
        if isinstance(declared, str):
            declared = JobType(self, declared, Any, Options(), None, "async")
        elif connection is None or self.is_open:
            await self._ready(declared)
        if connection is not None:
            return await send_batches(declared.name, declared.codec, list(new), lambda batch: enqueue_through(connection, batch))
        database = await self.database()
        return await send_batches(declared.name, declared.codec, list(new), lambda batch: jobs.enqueue_many(database, batch))

    async def _ready(self, declared: JobType[Any]) -> None:
        """See to it that a type which was declared after the application was opened is in the database.

        A role that only enqueues relies on the workers, or an administrator, to have declared it.
        """
        if not await unless_refused(declared.declare()):
            (await self.database()).declared["job", declared.name] = False

    async def subscribe(self, *declared: JobType[Any]) -> None:
        """Subscribe those of the job types that are a subscriber's queue to their topics. A worker does it at start."""
        for type in declared:
            if type.subscription is not None:
                await type.subscription.begin(await self.database(), type.options.as_json())

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

    async def why(self, id: UUID | str) -> Why:
        """Why a job waits: the first thing that has to change for it to start. Raises `NotFound`."""
        return await jobs.why(await self.database(), parse_id(id))

    async def find_many(
        self,
        *,
        name: str | None = None,
        status: Status | str | None = None,
        key: str | None = None,
        reason: str | None = None,
        limit: int = 50,
    ) -> list[JobRecord]:
        """Jobs, latest first, by type, status, key and reason (`quarantined`); at most 1,000."""
        database = await self.database()
        ids = await jobs.list_ids(database, name, None if status is None else str(status), key, limit, reason)
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

    async def replay(
        self, id: UUID | str, *, new_id: UUID | str | None = None, data: Any = None, force: bool = False
    ) -> Enqueued:
        """Enqueue a copy of a running or finished job, with `data` as its payload, or (None) with its own.

        Args:
            id: The job.
            new_id: Id of the copy, so that a repeated call replays once; None: a new UUIDv7.
            data: The payload of the copy; None: that of the job.
            force: Also while an earlier replay of the job waits, runs or has succeeded.

        Raises:
            NotFound: There is no such job.
            Conflict: It is queued, was replayed already, or its own payload is one that nobody can read.
        """
        new = parse_id(new_id) if new_id is not None else make_id()
        text = None if data is None else dump_json(data, f"the copy of {id}")
        return Enqueued(await jobs.replay(await self.database(), parse_id(id), new, text, force=force), Admission.QUEUED)

    async def job_types(self) -> list[JobTypeRecord]:
        """All job types in the database."""
        return await jobs.job_types(await self.database())

    async def create_job_type(self, name: str, **options: Any) -> JobTypeRecord:
        """Create a job type in the database, options by their names in SQL. Raises `Conflict`, `InvalidInput`."""
        return await jobs.create_job_type(await self.database(), name, options)

    async def change_job_type(self, name: str, **options: Any) -> JobTypeRecord:
        """Change options of a job type in the database, by their names in SQL. Raises `NotFound`, `InvalidInput`."""
        return await jobs.change_job_type(await self.database(), name, options)

    async def pause(self, name: str) -> None:
        """Claim no more jobs of a type; running ones go on. Raises `NotFound`."""
        await jobs.pause(await self.database(), name)

    async def resume(self, name: str) -> None:
        """End a pause. Raises `NotFound`, `Conflict`."""
        await jobs.resume(await self.database(), name)

    async def list_schedules(self) -> list[ScheduleRecord]:
        """All schedules in the database: when they are due, and what became of their last run."""
        return await schedules.schedules(await self.database())

    async def drop_schedule(self, name: str) -> None:
        """Forget a schedule that left the code; the job type and the history of its runs stay.

        Raises:
            NotFound: There is no such schedule.
            Conflict: A running worker declares it.
        """
        await schedules.drop(await self.database(), name)

    async def counts(self) -> list[JobCounts]:
        """How each job type is doing."""
        return await jobs.counts(await self.database())

    async def scale_advice(self, *, wait_s: float = 5.0, over: timedelta = timedelta(minutes=1)) -> list[ScaleAdvice]:
        """For each job type: how long jobs wait, and how many workers it needs for them to wait `wait_s` at most."""
        return [advise(load, wait_s) for load in await pool_views.load_of_types(await self.database(), over)]

    async def prune(self, keep: timedelta) -> dict[str, int]:
        """Drop the days of the archive that ended longer ago than `keep`, and topic messages that nothing refers to then.

        Returns jobs by partition dropped.
        """
        database = await self.database()
        dropped = await jobs.prune(database, keep)
        while await topics.prune_messages(database, keep):
            pass
        return dropped

    async def topic_counts(self) -> list[TopicCounts]:
        """How each topic is doing."""
        return await topics.counts(await self.database())

    async def find_stream(self, name: str, payload: Any = Any) -> Stream[Any]:
        """A stream as the database has it, also when this app does not declare it. Raises `NotFound`."""
        if name in self.streams:
            return self.streams[name]
        return await Stream.found(self, name, payload)

    async def drop_stream(self, name: str, *, force: bool = False) -> None:
        """Drop a stream with its events and groups, also one that this app does not declare. See `Stream.drop`."""
        await (await self.find_stream(name)).drop(force=force)

    # -- working

    async def worker(self, *names: str) -> Worker:
        """A worker for the handlers and consumers of this app. Run it with `await worker.run()`.

        Args:
            names: Only these job types, pools, consumer groups (`stream/group`) and schedules; none: all.
        """
        scheduled = [schedule for name, schedule in self.schedules.items() if not names or name in names]
        beside_types = {*self.consumers, *(schedule.name for schedule in scheduled if schedule.runs_as != "job")}
        chosen = [self.with_handler(name) for name in names if name not in beside_types]
        consumers = [self.consumers[name] for name in names if name in self.consumers]
        if not names:
            chosen = [t for t in self.types.values() if t.works]
            consumers = list(self.consumers.values())
        worked = {
            t.name: WorkedType(t.name, t.options, t.codec, t.handler, t.group)
            for t in chosen
            if t.handler is not None and t.pool is None
        }
        pools = [t.pool.worked() for t in chosen if t.pool is not None]
        database = await self.database()
        await self.subscribe(*chosen)
        subscribed = [(t.subscription, t.options.as_json()) for t in chosen if t.subscription is not None]
        beside = {"renewal": lambda: keep_subscribed(database, subscribed)} if subscribed else {}
        process = new_member_id()
        parts = [
            await consumer.consumer(database, self.settings, f"{process}.c{number}")
            for number, consumer in enumerate(consumers, 1)
        ]
        return Worker(database, worked, self.settings, pools, beside, parts, scheduled, process)
