"""Declarations of job types, as `Penstock` offers them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypedDict, TypeVar, overload

from typing_extensions import Unpack

from penstock.core.checks import check_flag, check_names, check_number, check_span
from penstock.core.keys import PayloadForm
from penstock.errors import InvalidInput, NotFound
from penstock.jobs.checks import check_options, check_type_name
from penstock.jobs.handler import Job, Jobs
from penstock.jobs.job_type import JobType
from penstock.jobs.models import Executor
from penstock.jobs.options import Backoff, Delivery, Options, RateLimit
from penstock.jobs.worked import BatchOptions
from penstock.postgres.context import Context, Declarations
from penstock.settings import Keep

T = TypeVar("T")
P = ParamSpec("P")
_OF_HANDLERS = ("key", "executor", "max_batch_size", "linger", "batch_by_key")
_LONGEST_LINGER = timedelta(seconds=10)


class Decorator(Protocol):
    """Declares the handler of a job type."""

    @overload
    def __call__(self, handler: Callable[Concatenate[Job[T], ...], Any], /) -> JobType[[T]]: ...
    @overload
    def __call__(self, handler: Callable[Concatenate[Jobs[T], ...], Any], /) -> JobType[[T]]: ...
    @overload
    def __call__(self, handler: Callable[P, Any], /) -> JobType[P]: ...


class JobOptions(TypedDict, total=False):
    """Options of a job type, with the same names wherever handlers of jobs are declared: see `Options` for what they mean."""

    delivery: Delivery | str
    max_attempts: int | None
    concurrency: int | None
    visibility_timeout: timedelta
    time_limit: timedelta | None
    backoff: Backoff | None
    rate_limit: RateLimit | None
    keep: Keep | timedelta | None
    keep_result: bool
    encrypted: bool
    max_waiting: int | None
    max_crashes: int | None
    docs_url: str | None
    owner: str | None


def options_of(what: str, given: Mapping[str, Any], also: Iterable[str] = ()) -> Options:
    """The options of a job type, as they are given by name.

    Args:
        what: What is declared, for messages.
        given: Options by their names.
        also: Names of further options of the declaration, which `given` does not have; errors name them too.

    Raises:
        InvalidInput: An option does not exist or is not valid.
    """
    check_names(what, given, [*JobOptions.__annotations__, *also])
    values = dict(given)
    if values.get("backoff", values) is None:
        del values["backoff"]
    if "delivery" in values:
        values["delivery"] = _delivery(values["delivery"])
    options = Options(**values)
    check_options(what, options)
    return options


class JobDeclarations(Declarations):
    """Declares job types.

    Args:
        context: Open databases and settings, which the declared job types share.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.types: dict[str, JobType[Any]] = {}

    @overload
    def job(self, name: Callable[Concatenate[Job[T], ...], Any]) -> JobType[[T]]: ...
    @overload
    def job(self, name: Callable[P, Any]) -> JobType[P]: ...
    @overload
    def job(
        self,
        name: str | None = None,
        *,
        key: str | Callable[[Any], str | None] | None = None,
        executor: Executor = "auto",
        max_batch_size: int | None = None,
        linger: timedelta = timedelta(0),
        batch_by_key: bool = False,
        **options: Unpack[JobOptions],
    ) -> Decorator: ...
    def job(
        self,
        name: str | Callable[..., Any] | None = None,
        *,
        key: str | Callable[[Any], str | None] | None = None,
        executor: Executor = "auto",
        max_batch_size: int | None = None,
        linger: timedelta = timedelta(0),
        batch_by_key: bool = False,
        **options: Unpack[JobOptions],
    ) -> Any:
        """Declare a job type by its handler: `@app.job("name", ...)`, or just `@app.job`.

        The handler takes the payload (a pydantic model or dataclass), a `Job[...]` with it, or its fields as parameters; and
        dependencies (`Depends`, `inject`). See `penstock.jobs.signature`.

        Args:
            name: Name of the type; None: the function's name with dashes instead of underscores.
            key: Name of a field of the payload, or a function of it, that gives a job its key, unless a call gives one.
            executor: "auto" runs async handlers on the loop and plain ones in threads; "process" runs them in processes.
            max_batch_size: Largest number of jobs that one call of the handler gets. It then takes a list, `jobs: list[Job[T]]`,
                and returns nothing, or an outcome for each job: its result, or an exception such as `Retry`. None: it takes one.
            linger: How long the first job of a batch waits for others, at most 10 s.
            batch_by_key: Whether all jobs of a batch have the same key.
            options: How its jobs are delivered, retried and limited: `JobOptions`.

        Raises:
            InvalidInput: The handler or an option cannot be used.
        """
        if callable(name):
            return self.job()(name)
        if name is not None:
            check_type_name(name)

        chosen = options_of(name or "a job type", options, _OF_HANDLERS)
        batch = batch_options_of(name or "a job type", max_batch_size, linger, batch_by_key)

        def declare(handler: Callable[..., Any]) -> JobType[Any]:
            named = name or getattr(handler, "__name__", "").replace("_", "-")
            declared: JobType[Any] = JobType(self.context, named, Any, chosen, key)
            declared.handled_by(handler, executor, batch)
            return self.add_type(declared)

        return declare

    @overload
    def job_type(
        self, name: str, payload: type[T], *, key: str | Callable[[T], str | None] | None = ..., **options: Unpack[JobOptions]
    ) -> JobType[[T]]: ...
    @overload
    def job_type(
        self,
        name: str,
        payload: PayloadForm = ...,
        *,
        key: str | Callable[[Any], str | None] | None = ...,
        **options: Unpack[JobOptions],
    ) -> JobType[...]: ...
    @overload
    def job_type(
        self,
        name: str,
        payload: object,
        *,
        key: str | Callable[[T], str | None] | None = ...,
        **options: Unpack[JobOptions],
    ) -> JobType[...]: ...
    def job_type(
        self,
        name: str,
        payload: Any = Any,
        *,
        key: str | Callable[[Any], str | None] | None = None,
        **options: Unpack[JobOptions],
    ) -> JobType[...]:
        """Declare a job type without a handler, in a process that only enqueues its jobs.

        Args:
            name: Name of the type.
            payload: Type of its payloads.
            key: See `job`.
            options: As for `job`.

        Raises:
            InvalidInput: The name or an option is not valid, or the name is already declared.
        """
        return self.add_type(JobType(self.context, name, payload, options_of(name, options, ("key",)), key))

    def add_type(self, declared: JobType[P]) -> JobType[P]:
        """Add a job type to those of the application; `job` and `job_type` do so. Raises `InvalidInput` for its name.

        Args:
            declared: Job type to add.
        """
        check_type_name(declared.name)
        if declared.name in self.types:
            raise InvalidInput(f"job type {declared.name} is declared twice", hint="Give each handler a name of its own.")
        self.types[declared.name] = declared
        return declared

    def with_handler(self, name: str) -> JobType[Any]:
        """The declared job type of this name. Raises `NotFound` when this application has no handler for it.

        Args:
            name: Name of the job type.
        """
        declared = self.types.get(name)
        if declared is None or not declared.works:
            raise NotFound(f"this app has no handler for {name}", hint=f"It declares: {', '.join(sorted(self.types)) or 'none'}.")
        return declared


def batch_options_of(what: str, max_batch_size: int | None, linger: timedelta, by_key: bool) -> BatchOptions | None:
    """How the handler of a job type gets batches; None: it takes one job. Raises `InvalidInput`."""
    check_span(f"linger of {what}", linger, zero=True)
    check_flag(f"batch_by_key of {what}", by_key)
    if max_batch_size is None:
        if linger or by_key:
            raise InvalidInput(f"linger and batch_by_key of {what} need max_batch_size", hint="For example: max_batch_size=100")
        return None
    check_number(f"max_batch_size of {what}", max_batch_size, 1, 10_000)
    if linger > _LONGEST_LINGER:
        raise InvalidInput(f"linger of {what} must be at most {_LONGEST_LINGER}, not {linger}")
    return BatchOptions(max_batch_size, linger, by_key)


def _delivery(value: Delivery | str) -> Delivery:
    try:
        return Delivery(value)
    except ValueError:
        raise InvalidInput(f"unknown delivery: {value!r:.100}", hint="Use at_least_once or at_most_once.") from None
