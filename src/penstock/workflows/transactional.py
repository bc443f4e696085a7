"""In the caller's transaction: signals that count when it commits."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import orjson

from penstock.core.transactional import fetch_document, in_callers_task

_SIGNAL = """
    select penstock.signal(cast({0} as uuid), given.name, given.value)
    from jsonb_to_record(cast({1} as jsonb)) as given (name text, value jsonb)
"""

_ENCRYPTED_TYPE = """
    select job.name
    from penstock.find_jobs(array[cast({0} as uuid)], cast({1} as jsonb) = 'true') as job
    join penstock.jobs as type on type.name = job.name
    where type.encrypted
"""


@in_callers_task
async def encrypted_type_through(connection: Any, id: UUID) -> str | None:
    """The type of a job when it is encrypted, as the transaction sees it: it may have enqueued the job itself."""
    rows = await fetch_document(connection, _ENCRYPTED_TYPE, str(id), "false")
    return str(rows[0][0]) if rows else None


@in_callers_task
async def signal_through(connection: Any, id: UUID, name: str, value: str) -> bool:
    """Send a signal through a connection or session of asyncpg, psycopg, SQLAlchemy or Django. See `queries.signal`."""
    document = orjson.dumps({"name": name, "value": orjson.Fragment(value)}).decode()
    return bool((await fetch_document(connection, _SIGNAL, str(id), document))[0][0])
