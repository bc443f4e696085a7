"""How the signature of a handler is read: what of it is the payload, and what is filled by dependencies.

One parameter that is a pydantic model or a dataclass is the payload, and so is the `data` of a `Job[...]`; in any other signature
the parameters are the fields of the payload, a JSON object. Parameters with a dependency, and `Job` beside a payload, are no part
of it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import typing_extensions
from pydantic import BaseModel, ConfigDict

from penstock.core.dependencies import (
    Depends,
    Given,
    Plan,
    annotations_of,
    bare,
    check_dependencies,
    depends_of,
    given_of,
    name_of,
    signature_of,
    taking,
    unwrapped,
)
from penstock.errors import InvalidInput
from penstock.jobs.handler import Handler, Job, Jobs
from penstock.jobs.models import NewJobOptions

_OPTIONS = (*NewJobOptions.__annotations__, "connection")


@dataclass(frozen=True, slots=True)
class Signature:
    """How a handler takes its job, and how callers give the payload.

    Attributes:
        payload: Type of the payload.
        form: "job": the handler takes a `Job`; "batch": a list of jobs; "whole": the payload; "fields": the payload's fields.
        parameter: Name of the parameter that takes the job or the payload.
        fields: The fields of the payload as a signature, in the form "fields".
        plan: Its dependencies.
    """

    payload: Any = Any
    form: Literal["job", "batch", "whole", "fields"] = "job"
    parameter: str = "data"
    fields: inspect.Signature = field(default_factory=inspect.Signature)
    plan: Plan = field(default_factory=lambda: Plan({}))

    def payload_of(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The payload that the arguments of an enqueue give; None: they give none, or None.

        Raises:
            InvalidInput: They do not fit the handler.
        """
        if self.form == "fields":
            try:
                return self.fields.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise _wrong_arguments(name, str(error), self, kwargs) from None
        if len(args) == 1 and not kwargs:
            return args[0]
        if not args and not kwargs:
            return None
        if not args and list(kwargs) == [self.parameter]:
            return kwargs[self.parameter]
        given = f"{len(args)} arguments" if args[1:] else f"an argument {next(iter(kwargs))!r}" if kwargs else "no payload"
        raise _wrong_arguments(name, f"it takes one payload, not {given}", self, kwargs)


def _wrong_arguments(name: str, why: str, signature: Signature, kwargs: Mapping[str, Any]) -> InvalidInput:
    options = [given for given in kwargs if given in _OPTIONS and given not in signature.fields.parameters]
    if options:
        hint = f"Options of a job come before: .options({', '.join(f'{option}=...' for option in options)}).enqueue(...)"
    elif signature.form == "fields":
        hint = f"Its arguments are {signature.fields}."
    else:
        hint = "For example: .enqueue(payload)"
    return InvalidInput(f"the arguments of {name} do not fit: {why}", hint=hint)


def signature_of_handler(handler: Callable[..., Any], *, blocking: bool = False) -> tuple[Signature, Handler]:
    """How a handler takes its job, and the handler as a function of the job and its dependencies.

    Args:
        handler: The handler, as it is declared.
        blocking: Whether it runs in a process without an event loop.

    Raises:
        InvalidInput: A parameter cannot be filled.
    """
    function, injected = unwrapped(handler)
    annotations = annotations_of(function)
    filled: dict[str, Depends | Given] = dict(injected)
    jobs: list[str] = []
    batches: dict[str, Any] = {}
    payload: dict[str, inspect.Parameter] = {}
    for name, parameter in signature_of(function).parameters.items():
        annotation = annotations.get(name, Any)
        if name in injected:
            continue
        if (depends := depends_of(annotation)) is not None:
            filled[name] = depends
        elif (job := _job_of_batch(annotation)) is not None:
            batches[name] = job
        elif given_of(annotation, (Job,)) is not None:
            jobs.append(name)
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InvalidInput(
                f"the parameter {name} of {name_of(function)} cannot be filled by name",
                hint="Give each field of the payload a parameter of its own, or take the whole payload: job: Job[dict[str, Any]]",
            )
        else:
            payload[name] = parameter
    if batches:
        (batch, job), *others = batches.items()
        if others or jobs or payload:
            raise InvalidInput(
                f"{name_of(function)} takes a list of jobs, and {', '.join([*dict(others), *jobs, *payload])} besides",
                hint="A batch handler takes the jobs, and dependencies.",
            )
        plan = check_dependencies(filled, (Jobs,))
        return Signature(_data_of(job) or Any, "batch", batch, plan=plan), taking(function, batch)
    if len(jobs) > 1:
        raise InvalidInput(f"{name_of(function)} takes {len(jobs)} jobs", hint="Give it one parameter of type Job.")
    typed = _data_of(annotations[jobs[0]]) if jobs else None
    required = {name: parameter for name, parameter in payload.items() if parameter.default is parameter.empty}
    if jobs and (typed is not None or not payload):
        if required:
            raise InvalidInput(
                f"{name_of(function)} takes a Job with a payload, and {', '.join(required)} besides",
                hint="Annotate dependencies with Depends(...); to take the fields of the payload, write Job without a type.",
            )
        signature = Signature(typed or Any, "job", jobs[0], plan=check_dependencies(filled, (Job,), blocking=blocking))
        return signature, taking(function, jobs[0])
    if jobs:
        filled[jobs[0]] = Given(Job)
    plan = check_dependencies(filled, (Job,), blocking=blocking)
    whole = next(iter(payload)) if len(payload) == 1 else None
    if whole is not None and _is_record(annotations.get(whole, Any)):
        return Signature(annotations[whole], "whole", whole, plan=plan), _taking_whole(function, whole)
    hints = {name: annotations.get(name, Any) for name in payload}
    fields = inspect.Signature([each.replace(annotation=hints[name]) for name, each in payload.items()])
    record = _record_of(name_of(function), hints, set(required))
    return Signature(record, "fields", fields=fields, plan=plan), _taking_fields(function)


def _data_of(annotation: Any) -> Any:
    """The T of `Job[T]`; None for `Job` and `Job[Any]`."""
    (data,) = typing.get_args(bare(annotation)) or (None,)
    return None if data is Any else data


def _job_of_batch(annotation: Any) -> Any:
    """The `Job[T]` of `list[Job[T]]`, `Sequence[Job[T]]` or `Jobs[T]`; None for other annotations."""
    if typing.get_origin(annotation) is Annotated:
        annotation = annotation.__origin__
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Jobs or origin is Jobs:
        return Job[inner[0]] if inner else Job  # type: ignore[valid-type]
    if origin in (list, Sequence) and given_of(inner[0], (Job,)) is not None:
        return inner[0]
    return None


def _is_record(annotation: Any) -> bool:
    """Whether a type is a pydantic model or a dataclass, which is a payload by itself."""
    if typing.get_origin(annotation) is Annotated:
        annotation = annotation.__origin__
    kind = typing.get_origin(annotation) or annotation
    return inspect.isclass(kind) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))


def _record_of(name: str, hints: Mapping[str, Any], required: set[str]) -> Any:
    """The type of a payload that consists of the parameters of a handler; other fields are refused."""
    optional: Any = typing_extensions.NotRequired
    make: Any = typing_extensions.TypedDict
    record = make(name, {each: hint if each in required else optional[hint] for each, hint in hints.items()})
    record.__pydantic_config__ = ConfigDict(extra="forbid")
    return record


def _taking_whole(function: Callable[..., Any], parameter: str) -> Handler:
    @functools.wraps(function)
    def handle(job: Job[Any], /, **dependencies: Any) -> Any:
        return function(**{parameter: job.data}, **dependencies)

    return handle


def _taking_fields(function: Callable[..., Any]) -> Handler:
    @functools.wraps(function)
    def handle(job: Job[Any], /, **dependencies: Any) -> Any:
        return function(**job.data, **dependencies)

    return handle
