"""What an application declares about jobs, pools and topics: a part of `Penstock`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload
from uuid import UUID

from penstock.checks import check_number, check_options, check_pool
from penstock.errors import InvalidInput, NotFound
from penstock.handler import Group, Handler, Job, group_of, payload_type
from penstock.job import Backoff, Delivery, Enqueued, Executor, NewJob, Options, PoolOptions, RateLimit
from penstock.ownership.assign import KeyAssign
from penstock.payload import Codec
from penstock.pools import Pool
from penstock.postgres import jobs
from penstock.topics import Subscription, Topic

if TYPE_CHECKING:
    from penstock.app import Penstock

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
        self.subscription: Subscription | None = None
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

    async def declare(self) -> None:
        """Write the job type with its options into the database, with its pool or its subscription where it has one.

        Once for each database; an enqueue without `connection=` does it by itself.

        Raises:
            InvalidInput: An option is not valid.
            Conflict: The name is taken by something else.
        """
        database = await self.app.database()
        if ("job", self.name) in database.declared:
            return
        if self.pool is not None:
            await self.pool.declare()
        else:
            if self.subscription is not None:
                await self.subscription.begin(database, self.options.as_json())
            await jobs.declare_job_type(database, self.name, self.options.as_json())
        database.declared["job", self.name] = True

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


class JobDeclarations:
    """Declares job types, pools and topics."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, JobType[Any]] = {}
        self.topics: dict[str, Topic[Any]] = {}

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
        check_options(name, options)
        check_pool(name, slots, assign, assignor, on_retry, key_concurrency, key_rate, weights, run_ahead)
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
        check_options(name, options)
        _check_spans(name, options)
        declared: JobType[Any] = JobType(cast("Penstock", self), name, payload, options, handler, group)
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
        if keep is not None:
            check_number(f"keep of topic {name}", keep, 0, 100_000)
        if name not in self.topics:
            self.topics[name] = Topic(cast("Penstock", self), name, payload, keep)
        elif payload is not Any or keep is not None:
            raise InvalidInput(f"topic {name} is declared twice", hint="Declare it once, then get it by its name alone.")
        return self.topics[name]

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


def _delivery(value: Delivery | str) -> Delivery:
    try:
        return Delivery(value)
    except ValueError:
        raise InvalidInput(f"unknown delivery: {value}", hint="Use at_least_once or at_most_once.") from None
