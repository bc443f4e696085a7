"""What a user of some job types may see of a job: nothing of the other types and job groups for which it waits, or waited.

The database names them, with the numbers of their children, in the reason why a job waits and in the error of a job that is
cancelled since one of them did not succeed.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from penstock.core.serialization import load_json
from penstock.errors import Unreadable
from penstock.jobs.http_queries import StoredJob
from penstock.jobs.records import Why

_WAITS = "It waits for the end of other jobs."
_NOT_SUCCEEDED = "DependencyNotSucceeded"
_MESSAGE = "a job after which it was to run did not succeed"


class Limited(Protocol):
    """A user, or what else says which job types are open; None: all."""

    @property
    def types(self) -> frozenset[str] | None:
        """The job types."""


def why_shown_to(user: Limited, why: Why | None) -> Why | None:
    """Why a job waits, without the names of what it waits for."""
    if user.types is None or why is None or why.reason != "dependencies":
        return why
    return replace(why, message=_WAITS, by_job=None, ahead=None)


def job_shown_to(user: Limited, job: StoredJob) -> StoredJob:
    """A job without the ids of the jobs for which it waits and of its group, whose errors do not name them."""
    if user.types is None:
        return job
    job = replace(job, after=[], workflow=None)
    if job.errors is None or _NOT_SUCCEEDED not in job.errors:
        return job
    errors: Any = None
    with suppress(Unreadable):
        errors = load_json(job.errors)
    return replace(job, errors=json.dumps([_bare(error) for error in errors]) if isinstance(errors, list) else None)


def _bare(error: Any) -> Any:
    foreign = isinstance(error, dict) and error.get("type") == _NOT_SUCCEEDED
    return {**error, "message": _MESSAGE} if foreign else error
