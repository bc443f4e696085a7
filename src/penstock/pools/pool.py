"""Pools: jobs of one key run in order, one at a time, on the one worker that owns the key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload

from penstock.core.checks import (
    check_flag,
    check_function,
    check_many,
    check_mapping,
    check_name,
    check_number,
    check_span,
    check_text,
)
from penstock.core.serialization import Codec, dump_json
from penstock.errors import InvalidInput
from penstock.groups.assignors import KeyAssign, slot_of
from penstock.jobs.declarations import Decorator
from penstock.jobs.handler import Job
from penstock.jobs.job_type import JobType
from penstock.jobs.models import Enqueued, Executor, KeyedJobOptions, NewJob, new_job, the_only
from penstock.jobs.options import Options, PoolOptions
from penstock.pools.models import StandingState
from penstock.pools.pool_control import PoolControl
from penstock.pools.pull_worker import MakePulling, PoolWorker
from penstock.pools.service import declare
from penstock.pools.standing_control import StandingControl
from penstock.pools.sync import SyncPool
from penstock.pools.worked import WorkedPool
from penstock.postgres.database import Database

T = TypeVar("T")
D = TypeVar("D")
P = ParamSpec("P")
StandingFunction = TypeVar("StandingFunction", bound=Callable[[Any], Any])


class Pool(PoolControl, Generic[T]):
    """A declared pool. `Penstock.pool` makes it.

        fibonacci = app.pool("fibonacci", payload=int)

        @fibonacci.job
        async def fib(job: Job[int]) -> None: ...

        await fibonacci.enqueue("key", 42)

    Keys are divided into slots, and slots among the live workers. Different keys run in parallel, and take turns.
    """

    def __init__(self, type: JobType[Any], options: PoolOptions, assign: KeyAssign | None, make_pulling: MakePulling) -> None:
        super().__init__(type.context, type.name, options, assign)
        self._type = type
        self._make_pulling = make_pulling
        # Whether it was looked up by its name: then the options here are not those of its declaration.
        self.found = False
        self._control = StandingControl(type)
        self._standing: Callable[[Any], Any] | None = None
        self._standing_codec: Codec[Any] = Codec(Any, self.name)

    @property
    def sync(self) -> SyncPool[T]:
        """The blocking half, for threads without an event loop."""
        return SyncPool(self, self._context.background)

    # -- declaring

    @overload
    def job(self, handler: Callable[Concatenate[Job[D], ...], Any], /) -> JobType[[D]]: ...
    @overload
    def job(self, handler: Callable[P, Any], /) -> JobType[P]: ...
    @overload
    def job(self, handler: None = None, /, *, executor: Executor = ...) -> Decorator: ...
    def job(self, handler: Callable[..., Any] | None = None, /, *, executor: Executor = "auto", **misplaced: Any) -> Any:
        """Declare the handler of the pool's jobs, as `Penstock.job` does: `@pool.job`, or `@pool.job(executor="process")`.

        Args:
            handler: The handler.
            executor: See `Penstock.job`.
            misplaced: Other options are refused: those of its jobs are options of the pool, `app.pool("work", max_attempts=3)`.

        Returns:
            The job type of the pool, which enqueues by the handler's arguments: `fib.options(key="u1").enqueue(42)`.

        Raises:
            InvalidInput: The handler cannot be used, or the pool has one already.
        """
        for name, value in misplaced.items():
            raise InvalidInput(
                f"the handler of pool {self.name} has no option {name} (it was given {value!r:.100})",
                hint=f'The options of its jobs are those of the pool: app.pool("{self.name}", {name}=...).',
            )

        def declare(handler: Callable[..., Any]) -> JobType[Any]:
            self._type.handled_by(handler, executor)
            return self._type

        return declare if handler is None else declare(handler)

    @overload
    def standing(self, handler: StandingFunction) -> StandingFunction: ...
    @overload
    def standing(self, handler: None = None, *, payload: Any = ...) -> Callable[[StandingFunction], StandingFunction]: ...
    def standing(self, handler: Callable[[Any], Any] | None = None, *, payload: Any = Any) -> Any:
        """Declare the handler of the pool's standing jobs: a function of one `Standing`.

        It is an async generator that yields once, between its start side and its stop side; an async function that runs until it
        is cancelled; or any function that returns an async context manager. Used as `@pool.standing` or
        `@pool.standing(payload=Tenant)`.

        Args:
            handler: The function, in `@pool.standing`.
            payload: Type of the payloads of standing jobs.

        Raises:
            InvalidInput: The pool has one already.
        """
        if handler is None:
            return lambda function: self.standing(function, payload=payload)
        check_function("the handler of standing jobs", handler, "async def tenant(standing: Standing) -> None")
        if self._standing is not None:
            raise InvalidInput(f"pool {self.name} has a handler for standing jobs already")
        self._standing = handler
        self._standing_codec = Codec(payload, self.name)
        return handler

    # -- standing jobs

    async def start(self, key: str, data: Any = None, *, replace: bool = False, timeout: timedelta | None = None) -> str:
        """Start the standing job of a key: it runs on the owner of the key, and moves with it, until `stop`.

        Args:
            key: Key of the standing job.
            data: Payload.
            replace: Whether to replace the payload when the standing job exists with another one.
            timeout: How long to wait until its start side has succeeded on a worker; None: return when the start is written.

        Returns:
            "starting", "unchanged" when it exists with this payload, or "replaced"; with a timeout "started" for "starting".

        Raises:
            Conflict: It exists with another payload, and `replace` is not given.
            JobFailed: Its start side failed, it is quarantined, or the owner of its key has no handler for standing jobs. It runs
                later by itself, unless it is quarantined.
            TimeoutError: It did not run in time, for example because there is no worker.
        """
        check_text("key", key)
        check_flag("replace", replace)
        if timeout is not None:
            check_span("timeout", timeout, zero=True)
        text = self._standing_codec.dump(self._standing_codec.or_empty(data))
        return await self._control.start(key, text, replace, timeout)

    async def stop(self, key: str) -> bool:
        """Stop the standing job of a key, wherever it runs. False when there was none.

        Args:
            key: Key of the standing job.
        """
        check_text("key", key)
        return await self._control.stop(key)

    async def notify(self, key: str, message: Any) -> None:
        """Send a message, any JSON, to the standing job of a key. Raises `NotFound`.

        Args:
            key: Key of the standing job.
            message: Any JSON value.
        """
        check_text("key", key)
        await self._control.notify(key, dump_json(message, f"a message to {key}"))

    async def reconcile(self, wanted: Mapping[str, Any]) -> tuple[int, int, int]:
        """Make the standing jobs equal to a wanted set, payloads by key, in one transaction.

        Args:
            wanted: Payload of each standing job that has to run, by key.

        Returns:
            How many were started, replaced because their payload differs, and stopped.
        """
        check_mapping("wanted standing jobs", wanted, '{"acme": {"plan": "gold"}}')
        for key in wanted:
            check_text("a key of wanted standing jobs", key)
        return await self._control.reconcile({key: self._standing_codec.dump(data) for key, data in wanted.items()})

    async def standing_jobs(self) -> list[StandingState]:
        """All standing jobs, and where they run. Raises `NotFound`."""
        return await self._control.all()

    # -- enqueueing

    async def enqueue(
        self,
        key: str,
        data: T | None = None,
        *,
        connection: Any = None,
        **options: Unpack[KeyedJobOptions],
    ) -> Enqueued:
        """Enqueue one job behind the others of its key. See `Penstock.enqueue`.

        A job for later (`run_after`) joins the jobs of its key when it is due.

        Args:
            key: Key of the job.
            data: Payload; None: an empty object, unless the type of the payload has None.
            connection: See `Penstock.enqueue`.
            options: Fields of `NewJob`: `id`, `run_after`, `expires_at`, `unique`, ...
        """
        if not isinstance(key, str):
            raise InvalidInput(
                f"the key of a job of {self.name} must be text, not {key!r:.100}",
                hint="Give the key before the payload: pool.enqueue(key, payload). The handler's enqueue"
                " takes the key from the payload.",
            )
        new = new_job(self.name, self._type.codec.or_empty(data), options, key)
        return the_only(await self._type.enqueue_many([new], connection=connection))

    async def enqueue_many(self, new: Iterable[NewJob | tuple[str, T]], *, connection: Any = None) -> list[Enqueued]:
        """Enqueue many jobs: `NewJob` with a key, or pairs of key and payload. See `Penstock.enqueue_many`."""
        check_many("new jobs", new, 'enqueue_many([("acme", {"a": 1}), NewJob({"a": 2}, key="bolt")])')
        items = [NewJob(item[1], key=item[0]) if isinstance(item, tuple) else item for item in new]
        return await self._type.enqueue_many(items, connection=connection)

    def slot_of(self, key: str) -> int:
        """The slot of a key, unless another program has resized the pool.

        Args:
            key: The key.
        """
        check_text("key", key)
        return slot_of(key, self.options.slots)

    # -- working

    def worker(self, id: str | None = None, *, prefetch: int = 10, metadata: Mapping[str, Any] | None = None) -> PoolWorker[T]:
        """A pull worker: the program asks for jobs, instead of declaring a handler.

            async with pool.worker("my-worker") as worker:
                async for job in worker.jobs():
                    ...
                    await job.ack()

        Args:
            id: Id of the worker, unique in the pool; None: a new one.
            prefetch: The largest number of jobs claimed and not settled at once, each of another key.
            metadata: Metadata that the worker publishes, for the pool's `assign`.
        """
        if id is not None:
            check_name("id of a worker", id, 50)
        check_number("prefetch", prefetch, 1, 10_000)
        if self.found:
            raise InvalidInput(f"pool {self.name} is not declared in this application", hint="Declare it: app.pool(...).")
        return PoolWorker(self._context, self.worked(metadata=metadata), self._type.codec, id, prefetch, self._make_pulling)

    def worked(self, *, metadata: Mapping[str, Any] | None = None) -> WorkedPool:
        """The pool as a part of a worker.

        Args:
            metadata: Metadata of this worker, which `assign` gets.
        """
        if metadata is not None:
            check_mapping("metadata", metadata, '{"clients": ["ada"]}')
            dump_json(dict(metadata), "metadata")
        sealer = self._type.sealer()
        return WorkedPool(
            self.name,
            self._type.declared,
            self.options,
            self._type.worked(sealer),
            self._assign,
            self._standing,
            self._standing_codec,
            dict(metadata or {}),
            sealer=sealer,
        )

    @property
    def works(self) -> bool:
        """Whether the pool has a handler for jobs or standing jobs in this application."""
        return self._type.handler is not None or self._standing is not None

    # -- declaring in the database

    async def declare(self) -> None:
        """Create the pool in the database, or change it when this declaration differs from the last one."""
        if not self.found:
            await declare(await self._context.database(), self.worked())

    async def declare_type(self, database: Database, options: Options, *, again: bool = True) -> None:
        """See `Declarer`.

        Args:
            database: Database to declare the type in.
            options: Options of the job type, as JSON.
            again: Whether to create the pool again when it was dropped.
        """
        await declare(database, self.worked(), again=again)
