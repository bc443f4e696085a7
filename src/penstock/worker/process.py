"""Runs one job in a child process (`executor="process"`), whose handler is found by its name.

The process imports the application itself, as its code declares it. What a test has put in place of that (`on_database`,
`dependency_overrides`), or a program that sets the database while it runs, exists in the worker alone, so each call brings it: a
handler or a dependency in a process would otherwise use the database and the services of production.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import reduce
from types import ModuleType
from typing import Any, NamedTuple

from pydantic import SecretStr

from penstock.core.dependencies import Overrides, Solver
from penstock.core.serialization import Codec
from penstock.core.user_code import check_ran, message_of
from penstock.jobs.handler import Job, set_current_job
from penstock.jobs.hook_declarations import HookDeclarations
from penstock.jobs.job_type import JobType
from penstock.jobs.models import ClaimedJob
from penstock.jobs.signature import signature_of_handler


class StandIns(NamedTuple):
    """What the application of the worker has in place of what its code says.

    Attributes:
        database_url: Its database; None: the embedded one, or that of the environment.
        overrides: Functions that stand in for dependencies.
    """

    database_url: SecretStr | None
    overrides: Overrides


class UnreadablePayload(Exception):
    """The payload of the job cannot be read, so that its handler did not start."""


def call_in_process(module: str, qualname: str, claimed: ClaimedJob, stand_ins: StandIns) -> Any:
    """Run the handler `module.qualname` for a job. The result or error returns pickled."""
    imported = importlib.import_module(module)
    found = reduce(getattr, qualname.split("."), imported)
    # The decorator has replaced the function with a job type, unless it was called on it.
    function: Any = found.function if isinstance(found, JobType) else found
    _use_database(found, imported, stand_ins.database_url)
    signature, handler = signature_of_handler(function, blocking=True)
    codec: Codec[Any] = Codec(signature.payload, claimed.name)
    try:
        data = codec.load(claimed.data)
    except Exception as error:
        raise UnreadablePayload(message_of(error)) from None
    job: Job[Any] = Job(
        claimed.id,
        claimed.name,
        claimed.key,
        claimed.attempt,
        claimed.max_attempts,
        data,
        claimed.created_at,
        snoozes=claimed.snoozes,
        traceparent=claimed.traceparent,
        lease=claimed.lease,
    )
    set_current_job(job)
    tracing = found.context.tracing if isinstance(found, JobType) else None
    try:
        with nullcontext() if tracing is None else tracing.within(claimed.traceparent):
            result = Solver({Job: job}, stand_ins.overrides).call_blocking(
                signature.plan, lambda dependencies: handler(job, **dependencies)
            )
        check_ran(result, claimed.name)
        return result
    except StopIteration as error:
        # A future cannot carry StopIteration.
        raise RuntimeError(f"the handler raised {error!r}") from error


def _use_database(found: Any, module: ModuleType, url: SecretStr | None) -> None:
    """Let the application of a handler use the database of the worker's."""
    if isinstance(found, JobType):
        contexts = [found.context]
    else:
        # A function that was declared by a call does not know its application, which is in its module. By the class, since an
        # `isinstance` evaluates what is lazy.
        contexts = [each.context for each in vars(module).values() if issubclass(type(each), HookDeclarations)]
    for context in contexts:
        if url is not None and context.settings.database_url != url:
            context.settings = context.settings.model_copy(update={"database_url": url})
