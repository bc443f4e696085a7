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
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, overload
from uuid import UUID

import structlog
import uuid_utils.compat
from pydantic import ValidationError

from penstock import lake
from penstock.batches import send_batches
from penstock.callers import enqueue_through
from penstock.declarations import StreamDeclarations
from penstock.errors import InvalidInput, JobFailed, NotFound, PenstockError
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
    PoolOptions,
    RateLimit,
    Status,
    parse_id,
)
from penstock.message import TopicCounts
from penstock.ownership.assign import KeyAssign
from penstock.payload import Codec
from penstock.pools import Pool
from penstock.postgres import jobs, migrate, pool_views, topics
from penstock.postgres.database import Database, lacks_rights
from penstock.postgres.embedded import EmbeddedServer
from penstock.scaling import ScaleAdvice, advise
from penstock.settings import Settings
from penstock.streams import Stream
from penstock.topics import Subscription, Topic, keep_subscribed
from penstock.worker import Worker
from penstock.worker.types import WorkedType

if TYPE_CHECKING:
    from penstock.sync import SyncPenstock

T = TypeVar("T")
log = structlog.get_logger("penstock")


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
        self.subscription: Subscription | None = None
        self.declared = False
        self.pool: Pool[T] | None = None

    @property
    def works(self) -> bool:
        """Whether there is something here for a worker to run."""
        return self.handler is not None or (self.pool is not None and self.pool.works)

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


_Place = tuple[int, asyncio.AbstractEventLoop]


def _place() -> _Place:
    return os.getpid(), asyncio.get_running_loop()


class Penstock(StreamDeclarations):
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
        self.settings = (settings or _settings({})).model_copy(update=_settings(given).model_dump(include=set(given)))
        self.types: dict[str, JobType[Any]] = {}
        self.topics: dict[str, Topic[Any]] = {}
        # Connections belong to the process and loop that opened them: a handler in a thread may call `sync`, a server may fork.
        self._databases: dict[_Place, Database] = {}
        self._opening: dict[_Place, asyncio.Lock] = {}
        self._servers: dict[int, EmbeddedServer] = {}
        self._sync: SyncPenstock | None = None

    # -- declaring

    @overload
    def job(self, name: Callable[[Job[T]], Any]) -> JobType[T]: ...
    @overload
    def job(
        self,
        name: str | None = None,
        *,
        delivery: Delivery | str = ...,
        attempts: int | None = ...,
        concurrency: int | None = ...,
        visibility_timeout: timedelta = ...,
        time_limit: timedelta | None = ...,
        backoff: Backoff | None = ...,
        rate_limit: RateLimit | None = ...,
        keep_result: bool = ...,
        executor: Executor = ...,
    ) -> Callable[[Callable[[Job[T]], Any]], JobType[T]]: ...
    def job(
        self,
        name: str | Callable[[Job[Any]], Any] | None = None,
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
    ) -> Any:
        """Declare a job type by its handler, a function of one `Job[T]`: `@app.job("name", ...)`, or just `@app.job`.

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
        if callable(name):
            return self.job()(name)

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

    def pool(
        self,
        name: str,
        payload: Any = Any,
        *,
        slots: int = 256,
        assign: KeyAssign | None = None,
        assignor: Literal["sticky", "jump"] = "sticky",
        on_retry: Literal["block", "skip"] = "block",
        key_concurrency: int = 1,
        key_rate: RateLimit | None = None,
        weights: Mapping[str, int] | None = None,
        run_ahead: int = 500,
        options: Options = Options(),
    ) -> Pool[Any]:
        """Declare a pool: jobs of one key run in order, one at a time, on the worker that owns the key.

        Args:
            name: Name of the pool and of its job type.
            payload: Payload type; taken from the handler's annotation when there is one.
            slots: Parts into which the keys are divided; the most workers that the pool can keep busy. Can grow later.
            assign: A rule of your own, `assign(key, workers) -> index`; workers come oldest first, with ids and metadata.
                None: nobody now.
            assignor: How slots go to workers without such a rule; see `penstock.ownership.assign`.
            on_retry: "block": a job that is to be retried holds up its key; "skip": later jobs of the key pass it.
            key_concurrency: Jobs of one key at once; more than 1 gives up their order.
            key_rate: Most starts of one key in a period.
            weights: Keys that get more than one job a turn.
            run_ahead: See `PoolOptions`.
            options: How the jobs are delivered, retried and limited; see `Penstock.job`.
        """
        declared = self._declare(name, payload, options, None, "async")
        pool_options = PoolOptions(
            slots, "custom" if assign is not None else assignor, on_retry, key_concurrency, key_rate, weights or {}, run_ahead
        )
        declared.pool = Pool(declared, pool_options, assign)
        return declared.pool

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
        _check_spans(name, options)
        declared: JobType[Any] = JobType(self, name, payload, options, handler, group)
        self.types[name] = declared
        return declared

    @overload
    def topic(self, name: str, payload: type[T], *, keep: int | None = ...) -> Topic[T]: ...
    @overload
    def topic(self, name: str, payload: Any = ..., *, keep: int | None = ...) -> Topic[Any]: ...
    def topic(self, name: str, payload: Any = Any, *, keep: int | None = None) -> Topic[Any]:
        """Declare a topic, or get the declared one.

        Args:
            name: Name of the topic.
            payload: Type of its messages.
            keep: How many of the last messages a new subscriber gets; None: as the database has it, 0 for a new topic.
        """
        if name not in self.topics:
            self.topics[name] = Topic(self, name, payload, keep)
        elif payload is not Any or keep is not None:
            raise InvalidInput(f"topic {name} is declared twice", hint="Declare it once, then get it by its name alone.")
        return self.topics[name]

    # -- opening and closing

    async def open(self, *, patience: timedelta = timedelta(0)) -> None:
        """Connect: start the embedded server if there is no URL, and check (embedded: migrate) the schema.

        Every call opens by itself when needed.

        Args:
            patience: How long to wait for a database that does not answer; what runs for ever gives `settings.start_timeout`.

        Raises:
            DatabaseUnavailable: Nothing answers.
            SchemaMismatch: The schema is not there, or of another version.
            EmbeddedServerError: The embedded server does not start.
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
            except BaseException:
                await database.close()
                raise
            self._databases[place] = database

    async def start_server(self) -> str:
        """The URL of the database, after starting the embedded server when there is none configured."""
        if self.settings.database_url is not None:
            return self.settings.database_url.get_secret_value()
        server = self._servers.setdefault(os.getpid(), EmbeddedServer(self.settings.data_dir))
        return await asyncio.to_thread(server.start)

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
            try:
                if declared.pool is not None:
                    await declared.pool.declare()
                else:
                    await self.subscribe(declared)
                    await jobs.declare_job_type(await self.database(), declared.name, declared.options.as_json())
            except PenstockError as error:
                if not lacks_rights(error):
                    raise
                # A role that only enqueues relies on the workers, or an administrator, to have created the type.
                log.debug("declaration_refused", name=declared.name, error=error.message)
            declared.declared = True
        return declared

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
        await topics.prune_messages(database, keep)
        return dropped

    async def topic_counts(self) -> list[TopicCounts]:
        """How each topic is doing."""
        return await topics.counts(await self.database())

    async def find_stream(self, name: str, payload: Any = Any) -> Stream[Any]:
        """A stream as the database has it, also when this app does not declare it. Raises `NotFound`."""
        if name in self.streams:
            return self.streams[name]
        return await Stream.found(self, name, payload)

    # -- working

    async def worker(self, *names: str) -> Worker:
        """A worker for the handlers and consumers of this app. Run it with `await worker.run()`.

        Args:
            names: Only these job types, pools and consumer groups (`stream/group`), and no schedules; none: all.
        """
        chosen = [self.with_handler(name) for name in names if name not in self.consumers]
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
        parts = [await consumer.consumer(database, self.settings) for consumer in consumers]
        return Worker(database, worked, self.settings, pools, beside, parts, [] if names else list(self.schedules.values()))

    def with_handler(self, name: str) -> JobType[Any]:
        """The declared job type of this name. Raises `NotFound` when it has no handler here."""
        declared = self.types.get(name)
        if declared is None or not declared.works:
            raise NotFound(f"this app has no handler for {name}", hint=f"It has: {', '.join(sorted(self.types)) or 'none'}.")
        return declared


def _check_spans(name: str, options: Options) -> None:
    rate = options.rate_limit
    spans = {
        "visibility_timeout": options.visibility_timeout,
        "time_limit": options.time_limit,
        "backoff.base": options.backoff.base,
        "backoff.cap": options.backoff.cap,
        "rate_limit.period": rate.period if rate is not None else None,
    }
    for option, value in spans.items():
        if value is not None and not isinstance(value, timedelta):
            raise InvalidInput(
                f"{option} of {name} must be a timedelta, not {value!r}", hint=f"For example: {option}=timedelta(seconds=30)"
            )


def _settings(given: dict[str, Any]) -> Settings:
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        variable = place if place.startswith("PENSTOCK_") or place == "DATABASE_URL" else f"PENSTOCK_{place.upper()}"
        raise InvalidInput(
            f"invalid settings{f': {place}' if place else ''}: {first['msg']}",
            hint=f"See the environment variable {variable}." if place else None,
        ) from None


def _delivery(value: Delivery | str) -> Delivery:
    try:
        return Delivery(value)
    except ValueError:
        raise InvalidInput(f"unknown delivery: {value}", hint="Use at_least_once or at_most_once.") from None
