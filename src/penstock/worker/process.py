"""Runs one job in a child process (`executor="process"`), whose handler is found by its name."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import reduce
from typing import Any

from penstock.core.dependencies import Solver
from penstock.core.serialization import Codec
from penstock.core.user_code import check_ran, message_of
from penstock.jobs.handler import Job, set_current_job
from penstock.jobs.job_type import JobType
from penstock.jobs.models import ClaimedJob
from penstock.jobs.signature import signature_of_handler


class UnreadablePayload(Exception):
    """The payload of the job cannot be read, so that its handler did not start."""


def call_in_process(module: str, qualname: str, claimed: ClaimedJob) -> Any:
    """Run the handler `module.qualname` for a job. The result or error returns pickled."""
    found = reduce(getattr, qualname.split("."), importlib.import_module(module))
    # The decorator has replaced the function with a job type, unless it was called on it.
    function: Any = found.function if isinstance(found, JobType) else found
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
    )
    set_current_job(job)
    tracing = found.context.tracing if isinstance(found, JobType) else None
    try:
        with nullcontext() if tracing is None else tracing.within(claimed.traceparent):
            result = Solver({Job: job}, {}).call_blocking(signature.plan, lambda dependencies: handler(job, **dependencies))
        check_ran(result, claimed.name)
        return result
    except StopIteration as error:
        # A future cannot carry StopIteration.
        raise RuntimeError(f"the handler raised {error!r}") from error
