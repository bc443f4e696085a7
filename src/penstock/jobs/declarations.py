"""Declarations of job types, as `Penstock` offers them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, overload

from penstock.errors import InvalidInput, NotFound
from penstock.jobs.checks import check_options
from penstock.jobs.handler import Handler, HandlerKind, Job, kind_of, payload_type
from penstock.jobs.job_type import JobType
from penstock.jobs.models import Backoff, Delivery, Executor, Options, RateLimit
from penstock.postgres.context import Context, Declarations

T = TypeVar("T")


class JobDeclarations(Declarations):
    """Declares job types.

    Args:
        context: Open databases and settings, which the declared job types share.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.types: dict[str, JobType[Any]] = {}

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
            name: Name of the type; None: the function's name with dashes instead of underscores.
            delivery: `at_least_once`, or `at_most_once`.
            attempts: Maximum number of attempts of a job; None: 5, or 1 for `at_most_once`.
            concurrency: Maximum number of jobs in flight over all workers; None: no limit, 0: paused.
            visibility_timeout: How long a claimed job belongs to its worker.
            time_limit: How long the handler may run; None: nine tenths of the visibility timeout.
            backoff: Delays between attempts; None: 2, 4, 8, ... s up to an hour.
            rate_limit: Maximum number of starts in a period over all workers.
            keep_result: Whether to keep the value that the handler returns.
            executor: "auto" runs async handlers on the loop and plain ones in threads; "process" runs them in processes.

        Raises:
            InvalidInput: The handler or an option cannot be used.
        """
        if callable(name):
            return self.job()(name)

        def declare(handler: Callable[[Job[T]], Any]) -> JobType[T]:
            return self.declare_type(
                name or getattr(handler, "__name__", "").replace("_", "-"),
                payload_type(handler),
                Options(
                    _delivery(delivery), attempts, concurrency, visibility_timeout, time_limit,
                    backoff or Backoff(), rate_limit, keep_result,
                ),
                handler,
                kind_of(handler, executor),
            )  # fmt: skip

        return declare

    @overload
    def job_type(self, name: str, payload: type[T], options: Options = ...) -> JobType[T]: ...
    @overload
    def job_type(self, name: str, payload: Any = ..., options: Options = ...) -> JobType[Any]: ...
    def job_type(self, name: str, payload: Any = Any, options: Options = Options()) -> JobType[Any]:
        """Declare a job type without a handler, in a process that only enqueues its jobs."""
        return self.declare_type(name, payload, options, None, "async")

    def declare_type(self, name: str, payload: Any, options: Options, handler: Handler | None, kind: HandlerKind) -> JobType[Any]:
        """Declare a job type, with or without a handler. `job` and `job_type` are for applications.

        Raises:
            InvalidInput: An option is not valid, or the name is already declared.
        """
        if name in self.types:
            raise InvalidInput(f"job type {name} is declared twice", hint="Give each handler a name of its own.")
        check_options(name, options)
        _check_spans(name, options)
        declared: JobType[Any] = JobType(self.context, name, payload, options, handler, kind)
        self.types[name] = declared
        return declared

    def with_handler(self, name: str) -> JobType[Any]:
        """The declared job type of this name. Raises `NotFound` when this application has no handler for it."""
        declared = self.types.get(name)
        if declared is None or not declared.works:
            raise NotFound(f"this app has no handler for {name}", hint=f"It declares: {', '.join(sorted(self.types)) or 'none'}.")
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
