"""Payloads that name results of other steps of a workflow: they are read when the job starts, and never carried."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

from penstock.core.encryption import is_envelope, owned_by
from penstock.core.serialization import dump_json, load_json
from penstock.errors import DatabaseUnavailable, Fail, InvalidInput, KeyMissing, Unreadable
from penstock.jobs.models import ClaimedJob
from penstock.jobs.worked import NotStarted, WorkedType
from penstock.postgres.database import Database
from penstock.worker.process import UnreadablePayload
from penstock.workflows import queries
from penstock.workflows.models import RESULT

NAMED = f'"{RESULT}"'
"""What the text of a payload contains that names a result. Others may contain it too."""

LARGEST_PAYLOAD = 16 * 1024 * 1024
"""The largest payload with the results that it names, as JSON text in bytes: one that names a result often grows with it."""

PAUSE_WITHOUT_KEY_S = 1.0
"""Pause before such a job is released: it comes back at once, and this worker still does not have the key."""

_TOO_LARGE = "at most 16 MiB are possible: name a result once, or let the step before return a reference to what is large"


async def with_results(database: Database, claimed: ClaimedJob, worked: WorkedType) -> ClaimedJob:
    """A claimed job whose payload has the results that it names. That of a job in no run of a workflow stays as it is.

    Args:
        database: Database that has the results.
        claimed: The job, whose payload may name results.
        worked: Its type, with the keys of results that are encrypted.

    Raises:
        NotStarted: The results cannot be read now, or not here: the database did not answer, the key of one is missing, or the
            job was told to stop meanwhile.
        UnreadablePayload: No worker can read them.
        Fail: With them the payload is larger than `LARGEST_PAYLOAD`.
    """
    try:
        return await _with_results(database, claimed, worked)
    except KeyMissing:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(PAUSE_WITHOUT_KEY_S)
        raise NotStarted from None
    except Unreadable as error:
        raise UnreadablePayload(error.message) from error
    except (DatabaseUnavailable, asyncio.CancelledError):
        raise NotStarted from None


async def _with_results(database: Database, claimed: ClaimedJob, worked: WorkedType) -> ClaimedJob:
    data = load_json(claimed.data)
    if not (times := Counter(_named(data))):
        return claimed
    try:
        rows = await queries.step_results(database, claimed.id, list(times))
    except InvalidInput as error:
        raise Fail(f"{error.message}; {_TOO_LARGE}") from error
    if (size := sum(times[name] * len(result.encode()) for name, _, _, result in rows if result is not None)) > LARGEST_PAYLOAD:
        most = max(times, key=lambda name: times[name])
        raise Fail(
            f"the payload of job {claimed.id} of {claimed.name} has {size:,} bytes with the results that it names, "
            f"{sum(times.values()):,} times, {most} alone {times[most]:,} times; {_TOO_LARGE}"
        )
    found = {name: None if result is None else _opened(worked, type, job, result) for name, type, job, result in rows}
    return claimed._replace(data=dump_json(_replaced(data, found), claimed.name)) if found else claimed


def _opened(worked: WorkedType, type: str, job: UUID, text: str) -> Any:
    value = load_json(text)
    return load_json(worked.sealer.keyring.open(text, owned_by("result", type, str(job)))) if is_envelope(value) else value


def _named(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        if len(data) == 1 and isinstance(name := data.get(RESULT), str):
            yield name
        for value in data.values():
            yield from _named(value)
    elif isinstance(data, list):
        for value in data:
            yield from _named(value)


def _replaced(data: Any, found: dict[str, Any]) -> Any:
    if isinstance(data, dict):
        if len(data) == 1 and (name := data.get(RESULT)) in found:
            return found[name]
        return {name: _replaced(value, found) for name, value in data.items()}
    return [_replaced(value, found) for value in data] if isinstance(data, list) else data
