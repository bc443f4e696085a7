"""Assertions about what was enqueued, also in a transaction that the test rolls back."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from typing import Any
from uuid import UUID

from penstock.app import Penstock
from penstock.core.serialization import dump_json, load_json
from penstock.core.transactional import fetch_document
from penstock.jobs.checks import no_such_type
from penstock.jobs.job_type import JobType
from penstock.pools.pool import Pool


@dataclass(frozen=True, slots=True)
class EnqueuedJob:
    """A job that waits or runs, as a test looks at it.

    Attributes:
        id: Identity of the job.
        key: Key of the job.
        priority: Priority of the job.
        run_after: Earliest start.
        data: Payload, as plain JSON.
    """

    id: UUID
    key: str | None
    priority: int
    run_after: datetime
    data: Any


async def enqueued(
    app: Penstock, type: JobType[Any] | Pool[Any] | str, data: Any = None, *, key: str | None = None, connection: Any = None
) -> list[EnqueuedJob]:
    """The jobs of a type that wait or run, oldest first, at most 1,000.

    Args:
        app: The application; it is open, unless a connection is given.
        type: Job type or pool, or its name.
        data: Only jobs whose payload contains this document, such as `{"path": "a.png"}`; None: all.
        key: Only jobs with this key; None: all.
        connection: Connection or session of the test, in whose transaction to look; see `Penstock.enqueue`.

    Raises:
        NotFound: No job type or pool has this name.
    """
    name = type if isinstance(type, str) else type.name
    wanted = "null" if data is None else dump_json(data, f"the payload of {name}")
    rows = await _rows(app, connection, "enqueued.sql", name, wanted)
    if not rows and isinstance(type, str) and type not in app.types:
        known = [row[0] for row in await _rows(app, connection, "known_types.sql", name, "all")]
        if name not in known:
            raise no_such_type(name, [*known, *app.types])
    found = [EnqueuedJob(UUID(str(row[0])), row[1], row[2], row[3], load_json(row[4])) for row in rows]
    return [job for job in found if key is None or job.key == key]


async def _rows(app: Penstock, connection: Any, file: str, name: str, document: str) -> Any:
    statement = resources.files(__package__).joinpath(file).read_text()
    if connection is None:
        return await (await app.database()).fetch(statement.format("$1", "$2"), name, document)
    return await fetch_document(connection, statement, name, document)


async def assert_enqueued(
    app: Penstock,
    type: JobType[Any] | Pool[Any] | str,
    data: Any = None,
    *,
    key: str | None = None,
    count: int | None = None,
    connection: Any = None,
) -> list[EnqueuedJob]:
    """Assert that jobs of a type wait or run. Arguments as for `enqueued`.

    Args:
        app: See `enqueued`.
        type: See `enqueued`.
        data: See `enqueued`.
        key: See `enqueued`.
        count: How many there must be; None: at least one.
        connection: See `enqueued`.

    Returns:
        These jobs.

    Raises:
        AssertionError: There are none, or another number; the message lists all jobs of the type.
        NotFound: No job type or pool has this name.
    """
    found = await enqueued(app, type, data, key=key, connection=connection)
    if len(found) == count or (count is None and found):
        return found
    name = type if isinstance(type, str) else type.name
    others = await enqueued(app, type, connection=connection)
    wanted = f"{'a job' if count is None else f'{count} jobs'} of {name}"
    wanted += (f" with {data!r}" if data is not None else "") + (f" and key {key!r}" if key is not None else "")
    listed = "".join(f"\n  {job.data!r}" + (f", key {job.key!r}" if job.key is not None else "") for job in others[:20])
    raise AssertionError(f"expected {wanted}, and found {len(found)}; enqueued of {name}: {listed or 'none'}")


async def assert_not_enqueued(
    app: Penstock, type: JobType[Any] | Pool[Any] | str, data: Any = None, *, key: str | None = None, connection: Any = None
) -> None:
    """Assert that no such job waits or runs. Arguments as for `enqueued`.

    Raises:
        AssertionError: There are such jobs; the message lists them.
        NotFound: No job type or pool has this name.
    """
    await assert_enqueued(app, type, data, key=key, count=0, connection=connection)
