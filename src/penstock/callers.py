"""Enqueueing, publishing and appending through a connection that the caller owns, in the caller's own transaction.

Every driver can send one text parameter, so jobs, messages and events travel as one JSON document. asyncpg, which has arrays,
takes the fast way.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from penstock.errors import Conflict, InvalidInput, NotFound, Outgrown, PenstockError
from penstock.event import Appended, Columns
from penstock.job import Admission
from penstock.message import Published
from penstock.postgres import jobs, streams, topics

P = ParamSpec("P")
T = TypeVar("T")
_CALL = "select ordinal, id, outcome from penstock.enqueue_json({0}, cast({1} as jsonb)) where outcome <> 'queued'"
_APPEND = "select * from penstock.append_each_json({0}, cast({1} as jsonb))"
_COMMIT = "select penstock.commit_json({0}, cast({1} as jsonb))"
_BY_SQLSTATE: dict[str, type[PenstockError]] = {
    "PS400": InvalidInput, "PS413": InvalidInput, "PS404": NotFound, "PS409": Conflict, "PS412": Outgrown,
}  # fmt: skip


def _of_the_callers_task(call: Callable[Concatenate[Any, P], Awaitable[T]]) -> Callable[Concatenate[Any, P], Awaitable[T]]:
    """Ask a scoped session for its session at once: the call may go on in another task, which would have another session."""

    @wraps(call)
    def begin(connection: Any, /, *args: P.args, **options: P.kwargs) -> Awaitable[T]:
        if _of(connection, "sqlalchemy.ext.asyncio", "async_scoped_session"):
            connection = connection()
        return call(connection, *args, **options)

    return begin


@_of_the_callers_task
async def enqueue_through(connection: Any, batch: jobs.Batch) -> dict[int, tuple[UUID, Admission]]:
    """Enqueue a batch through a connection or session of asyncpg, psycopg, SQLAlchemy or Django.

    Raises:
        InvalidInput: Also when the connection is of no known kind.
    """
    try:
        if _is_asyncpg(connection):
            return jobs.exceptions_by_place(await connection.fetch(*jobs.enqueue_call(batch)))
        return _by_place(await _rows(_execute(connection, _CALL, batch.name, jobs.as_json(batch))))
    except Exception as error:
        raise (_translated(error) or error) from error


@_of_the_callers_task
async def append_through(connection: Any, name: str, columns: Columns) -> Appended:
    """Append events through such a connection.

    The database routes their keys: were it done here, a stream that has grown would make the caller's transaction fail.
    """
    try:
        if _is_asyncpg(connection):
            return _appended(await connection.fetch(*streams.append_each_call(name, columns)))
        return _appended(await _rows(_execute(connection, _APPEND, name, streams.as_json(columns))))
    except Exception as error:
        raise (_translated(error) or error) from error


@_of_the_callers_task
async def commit_through(connection: Any, name: str, document: str) -> None:
    """Commit an offset (`streams.commit_as_json`) through such a connection. Raises `Conflict` when it is refused."""
    try:
        if _is_asyncpg(connection):
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


@_of_the_callers_task
async def publish_through(connection: Any, topic: str, documents: Sequence[str]) -> list[Published]:
    """Publish messages (`topics.publish_document`) through a connection or session, as in `enqueue_through`."""
    document = topics.array_of(documents)
    try:
        if _is_asyncpg(connection):
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


def _is_asyncpg(connection: Any) -> bool:
    """Whether it is a connection of asyncpg, a pool's proxy of one, or of a subclass."""
    if isinstance(connection, asyncpg.Pool):
        raise _no_transaction(connection)
    return isinstance(connection, (asyncpg.Connection, PoolConnectionProxy))


def _execute(connection: Any, call: str, name: str, document: str) -> Any:
    if (execute := _sqlalchemy_execute(connection)) is not None:
        from sqlalchemy import text

        return execute(text(call.format(":name", ":document")), {"name": name, "document": document})
    statement = call.format("%s", "%s")
    if _of(connection, "psycopg", "Connection", "AsyncConnection", "Cursor", "AsyncCursor"):
        return connection.execute(statement, (name, document))
    # Django, and whatever else follows the DB-API.
    if hasattr(connection, "cursor"):
        with connection.cursor() as cursor:
            cursor.execute(statement, (name, document))
            return cursor.fetchall()
    raise InvalidInput(
        f"cannot write through a {type(connection).__qualname__}",
        hint="Give a connection or session of asyncpg, psycopg, SQLAlchemy or Django.",
    )


def _sqlalchemy_execute(connection: Any) -> Callable[..., Any] | None:
    """What executes on a connection or session of SQLAlchemy, or of a subclass such as SQLModel's; None when it is none."""
    if _of(connection, "sqlalchemy", "Engine") or _of(connection, "sqlalchemy.ext.asyncio", "AsyncEngine"):
        raise _no_transaction(connection)
    if _of(connection, "sqlalchemy.orm", "sessionmaker", "scoped_session"):
        if not _of(connection, "sqlalchemy.orm", "scoped_session"):
            raise _no_transaction(connection)
        connection = connection()
    if _of(connection, "sqlalchemy.orm", "Session"):
        # Not the method of the object: that of SQLModel warns its callers away.
        return partial(sys.modules["sqlalchemy.orm"].Session.execute, connection)
    if _of(connection, "sqlalchemy.ext.asyncio", "AsyncSession"):
        return partial(sys.modules["sqlalchemy.ext.asyncio"].AsyncSession.execute, connection)
    if _of(connection, "sqlalchemy", "Connection") or _of(connection, "sqlalchemy.ext.asyncio", "AsyncConnection"):
        execute: Callable[..., Any] = connection.execute
        return execute
    return None


def _of(connection: Any, module: str, *names: str) -> bool:
    """Whether something is of a class, by its module and name. A module that nobody imported has no objects."""
    found = sys.modules.get(module)
    kinds = tuple(kind for name in names if isinstance(kind := getattr(found, name, None), type))
    return bool(kinds) and isinstance(connection, kinds)


def _no_transaction(connection: Any) -> InvalidInput:
    return InvalidInput(
        f"a {type(connection).__qualname__} has no transaction to write in",
        hint="Give a connection or a session, the one that your transaction is on.",
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
