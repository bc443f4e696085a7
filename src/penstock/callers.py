"""Enqueueing, publishing and appending through a connection that the caller owns, in the caller's own transaction.

Every driver can send one text parameter, so jobs, messages and events travel as one JSON document. asyncpg, which has arrays,
takes the fast way.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from penstock.errors import Conflict, InvalidInput, NotFound, Outgrown, PenstockError
from penstock.event import Appended, Columns
from penstock.job import Admission
from penstock.message import Published
from penstock.postgres import jobs, streams, topics

_CALL = "select ordinal, id, outcome from penstock.enqueue_json({0}, cast({1} as jsonb)) where outcome <> 'queued'"
_APPEND = "select * from penstock.append_each_json({0}, cast({1} as jsonb))"
_COMMIT = "select penstock.commit_json({0}, cast({1} as jsonb))"
_BY_SQLSTATE: dict[str, type[PenstockError]] = {
    "PS400": InvalidInput, "PS413": InvalidInput, "PS404": NotFound, "PS409": Conflict, "PS412": Outgrown,
}  # fmt: skip


async def enqueue_through(connection: Any, batch: jobs.Batch) -> dict[int, tuple[UUID, Admission]]:
    """Enqueue a batch through a connection or session of asyncpg, psycopg, SQLAlchemy or Django.

    Raises:
        InvalidInput: Also when the connection is of no known kind.
    """
    try:
        if hasattr(connection, "fetch") and _module(connection).startswith("asyncpg"):
            return jobs.exceptions_by_place(await connection.fetch(*jobs.enqueue_call(batch)))
        return _by_place(await _rows(_execute(connection, _CALL, batch.name, jobs.as_json(batch))))
    except Exception as error:
        raise (_translated(error) or error) from error


async def append_through(connection: Any, name: str, columns: Columns) -> Appended:
    """Append events through such a connection.

    The database routes their keys: were it done here, a stream that has grown would make the caller's transaction fail.
    """
    try:
        if hasattr(connection, "fetch") and _module(connection).startswith("asyncpg"):
            return _appended(await connection.fetch(*streams.append_each_call(name, columns)))
        return _appended(await _rows(_execute(connection, _APPEND, name, streams.as_json(columns))))
    except Exception as error:
        raise (_translated(error) or error) from error


async def commit_through(connection: Any, name: str, document: str) -> None:
    """Commit an offset (`streams.commit_as_json`) through such a connection. Raises `Conflict` when it is refused."""
    try:
        if hasattr(connection, "fetch") and _module(connection).startswith("asyncpg"):
            await connection.fetch(_COMMIT.format("$1", "$2::text"), name, document)
        else:
            await _rows(_execute(connection, _COMMIT, name, document))
    except Exception as error:
        raise (_translated(error) or error) from error


def append_through_blocking(connection: Any, name: str, columns: Columns) -> Appended:
    """`append_through` for connections that block, without a loop."""
    return _appended(_rows_blocking(connection, _APPEND, name, streams.as_json(columns)))


def commit_through_blocking(connection: Any, name: str, document: str) -> None:
    """`commit_through` for connections that block, without a loop."""
    _rows_blocking(connection, _COMMIT, name, document)


def enqueue_through_blocking(connection: Any, batch: jobs.Batch) -> dict[int, tuple[UUID, Admission]]:
    """`enqueue_through` for connections that block, without a loop."""
    return _by_place(_rows_blocking(connection, _CALL, batch.name, jobs.as_json(batch)))


async def publish_through(connection: Any, topic: str, documents: Sequence[str]) -> list[Published]:
    """Publish messages (`topics.publish_document`) through a connection or session, as in `enqueue_through`."""
    document = topics.array_of(documents)
    try:
        if hasattr(connection, "fetch") and _module(connection).startswith("asyncpg"):
            rows = await connection.fetch(topics.PUBLISH.format("$1", "$2"), topic, document)
        else:
            rows = await _rows(_execute(connection, topics.PUBLISH, topic, document))
    except Exception as error:
        raise (_translated(error) or error) from error
    return [topics.published(row) for row in rows]


def publish_through_blocking(connection: Any, topic: str, documents: Sequence[str]) -> list[Published]:
    """`publish_through` for connections that block, without a loop."""
    return [topics.published(row) for row in _rows_blocking(connection, topics.PUBLISH, topic, topics.array_of(documents))]


async def _rows(result: Any) -> Any:
    if inspect.isawaitable(result):
        result = await result
    if hasattr(result, "fetchall"):
        result = result.fetchall()
        if inspect.isawaitable(result):
            result = await result
    return result


def _rows_blocking(connection: Any, call: str, name: str, document: str) -> Any:
    try:
        rows = _execute(connection, call, name, document)
        if inspect.isawaitable(rows):
            if inspect.iscoroutine(rows):
                rows.close()
            raise InvalidInput("this connection is async", hint="Await the call, with connection=..., on the app itself.")
        return rows.fetchall() if hasattr(rows, "fetchall") else rows
    except InvalidInput:
        raise
    except Exception as error:
        raise (_translated(error) or error) from error


def _execute(connection: Any, call: str, name: str, document: str) -> Any:
    module = _module(connection)
    if module.startswith("sqlalchemy"):
        from sqlalchemy import text

        return connection.execute(text(call.format(":name", ":document")), {"name": name, "document": document})
    statement = call.format("%s", "%s")
    if module.split(".")[0] == "psycopg":
        return connection.execute(statement, (name, document))
    if hasattr(connection, "cursor"):
        with connection.cursor() as cursor:
            cursor.execute(statement, (name, document))
            return cursor.fetchall()
    raise InvalidInput(
        f"cannot write through a {type(connection).__qualname__}",
        hint="Give a connection or session of asyncpg, psycopg, SQLAlchemy or Django.",
    )


def _appended(rows: Any) -> Appended:
    return Appended([row[0] for row in rows], [row[1] for row in rows])


def _by_place(rows: Any) -> dict[int, tuple[UUID, Admission]]:
    return {row[0] - 1: (row[1] if isinstance(row[1], UUID) else UUID(str(row[1])), Admission(row[2])) for row in rows}


def _translated(error: BaseException) -> PenstockError | None:
    cause = getattr(error, "orig", None) or getattr(error, "__cause__", None) or error
    for candidate in (error, cause, getattr(cause, "__cause__", None)):
        state = getattr(candidate, "sqlstate", None) or getattr(candidate, "pgcode", None)
        if state in _BY_SQLSTATE:
            diagnostics = getattr(candidate, "diag", None)
            message = getattr(diagnostics, "message_primary", None) or str(candidate)
            hint = getattr(diagnostics, "message_hint", None) or getattr(candidate, "hint", None)
            return _BY_SQLSTATE[state](message, hint=hint)
    return None


def _module(connection: Any) -> str:
    return type(connection).__module__
