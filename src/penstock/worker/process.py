"""Runs one job in a child process (`executor="process"`), whose handler is found by its name."""

from __future__ import annotations

import importlib
from functools import reduce
from typing import Any

from penstock.core.serialization import Codec
from penstock.core.user_code import message_of
from penstock.jobs.handler import Job, payload_type
from penstock.jobs.models import ClaimedJob


class UnreadablePayload(Exception):
    """The payload of the job cannot be read, so that its handler did not start."""


def call_in_process(module: str, qualname: str, claimed: ClaimedJob) -> Any:
    """Run the handler `module.qualname` for a job. The result or error returns pickled."""
    found = reduce(getattr, qualname.split("."), importlib.import_module(module))
    # The decorator has replaced the function with a job type.
    handler: Any = getattr(found, "handler", found)
    codec: Codec[Any] = Codec(payload_type(handler), claimed.name)
    try:
        data = codec.load(claimed.data)
    except Exception as error:
        raise UnreadablePayload(message_of(error)) from None
    job: Job[Any] = Job(
        claimed.id,
        claimed.name,
        claimed.key,
        claimed.max_attempts - claimed.attempts + 1,
        claimed.attempts,
        data,
        claimed.created_at,
    )
    try:
        return handler(job)
    except StopIteration as error:
        # A future cannot carry StopIteration.
        raise RuntimeError(f"the handler raised {error!r}") from error
