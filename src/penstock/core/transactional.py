"""Statements through a connection that the caller owns, in the caller's own transaction.

Every driver can send two text parameters, so the data travels as a name and one JSON document. asyncpg supports arrays and can
use a faster statement.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from penstock.core.blocking import asynchronous, without_loop
from penstock.errors import InvalidInput, PenstockError, of_sqlstate

P = ParamSpec("P")
T = TypeVar("T")


def in_callers_task(call: Callable[Concatenate[Any, P], Awaitable[T]]) -> Callable[Concatenate[Any, P], Awaitable[T]]:
    """Resolve a scoped session before the call: the call may continue in another task, which would get another session."""

    @wraps(call)
    def begin(connection: Any, /, *args: P.args, **options: P.kwargs) -> Awaitable[T]:
        if _of(connection, "sqlalchemy.ext.asyncio", "async_scoped_session"):
            connection = connection()
        return call(connection, *args, **options)

    return begin


def is_asyncpg(connection: Any) -> bool:
    """Whether the connection is one of asyncpg, a subclass of it, or a pool's proxy.

    Raises:
        InvalidInput: The argument is a pool of asyncpg, which has no transaction.
    """
    if isinstance(connection, asyncpg.Pool):
        raise _no_transaction(connection)
    return isinstance(connection, (asyncpg.Connection, PoolConnectionProxy))


async def fetch(connection: Any, statement: str, *args: Any) -> Any:
    """The rows of a statement through a connection of asyncpg, with the database's errors translated to Penstock's."""
    if without_loop():
        raise asynchronous()
    try:
        return await connection.fetch(statement, *args)
    except Exception as error:
        raise (_translated(error) or error) from error


async def fetch_document(connection: Any, call: str, name: str, document: str) -> Any:
    """The rows of a statement with a name and a document, through a connection or session of any supported kind.

    Args:
        connection: Connection or session of asyncpg, psycopg, SQLAlchemy or Django.
        call: Statement, with `{0}` and `{1}` in the places of the two parameters.
        name: First parameter.
        document: Second parameter, JSON text.

    Raises:
        InvalidInput: The connection is of no supported kind, to another database system, or asynchronous in a blocking call.
    """
    if is_asyncpg(connection):
        return await fetch(connection, call.format("$1", "$2::text"), name, document)
    try:
        return await _rows(_execute(connection, call, name, document))
    except PenstockError:
        raise
    except Exception as error:
        if (other := _other_system(connection)) is not None:
            # Without its cause, whose text may have the payload.
            raise InvalidInput(
                f"the connection is to {other}, not to the PostgreSQL database of Penstock",
                hint="Give one to the database of app.database_url(). For a test, penstock.testing has one.",
            ) from None
        raise (_translated(error) or error) from error


def check_transaction(connection: Any) -> None:
    """Refuse a connection that has no transaction open and would commit each statement by itself, where its driver tells.

    A connection that begins a transaction with its first statement is accepted.

    Raises:
        InvalidInput: No transaction is open, or the connection is a pool or engine, which has none.
    """
    alone = False
    if is_asyncpg(connection):
        alone = not connection.is_in_transaction()
    elif _of(connection, "psycopg", "Connection", "AsyncConnection", "Cursor", "AsyncCursor"):
        connection = getattr(connection, "connection", connection)
        alone = connection.autocommit and connection.info.transaction_status == sys.modules["psycopg"].pq.TransactionStatus.IDLE
    elif hasattr(connection, "in_atomic_block"):  # Django
        alone = connection.get_autocommit() and not connection.in_atomic_block
    if alone:
        raise InvalidInput(
            f"this {type(connection).__qualname__} has no transaction open",
            hint="Give one with the transaction that has the effects of the job: async with connection.transaction(): ...",
        )


async def _rows(result: Any) -> Any:
    if inspect.isawaitable(result):
        if without_loop():
            if inspect.iscoroutine(result):
                result.close()
            raise asynchronous()
        result = await result
    if hasattr(result, "fetchall"):
        result = result.fetchall()
        if inspect.isawaitable(result):
            result = await result
    return result


def _execute(connection: Any, call: str, name: str, document: str) -> Any:
    if (execute := _sqlalchemy_execute(connection)) is not None:
        from sqlalchemy import text

        return execute(text(call.format(":name", ":document")), {"name": name, "document": document})
    statement = call.format("%s", "%s")
    if _of(connection, "psycopg", "Connection", "AsyncConnection", "Cursor", "AsyncCursor"):
        return connection.execute(statement, (name, document))
    # Django, and other connections that follow the DB-API.
    if hasattr(connection, "cursor"):
        with connection.cursor() as cursor:
            cursor.execute(statement, (name, document))
            return cursor.fetchall()
    raise InvalidInput(
        f"connection cannot be {connection!r:.100}",
        hint="Give a connection or session of asyncpg, psycopg, SQLAlchemy or Django.",
    )


def _sqlalchemy_execute(connection: Any) -> Callable[..., Any] | None:
    """The execute method of a connection or session of SQLAlchemy, or of a subclass such as SQLModel's; None for other kinds."""
    if _of(connection, "sqlalchemy", "Engine") or _of(connection, "sqlalchemy.ext.asyncio", "AsyncEngine"):
        raise _no_transaction(connection)
    if _of(connection, "sqlalchemy.orm", "sessionmaker", "scoped_session"):
        if not _of(connection, "sqlalchemy.orm", "scoped_session"):
            raise _no_transaction(connection)
        connection = connection()
    if _of(connection, "sqlalchemy.orm", "Session"):
        # The method of the class: SQLModel overrides that of the object with one that warns of its use.
        return partial(sys.modules["sqlalchemy.orm"].Session.execute, connection)
    if _of(connection, "sqlalchemy.ext.asyncio", "AsyncSession"):
        return partial(sys.modules["sqlalchemy.ext.asyncio"].AsyncSession.execute, connection)
    if _of(connection, "sqlalchemy", "Connection") or _of(connection, "sqlalchemy.ext.asyncio", "AsyncConnection"):
        execute: Callable[..., Any] = connection.execute
        return execute
    return None


def _of(connection: Any, module: str, *names: str) -> bool:
    """Whether the connection is of a class, by its module and name. A module that is not imported has no instances."""
    found = sys.modules.get(module)
    kinds = tuple(kind for name in names if isinstance(kind := getattr(found, name, None), type))
    return bool(kinds) and isinstance(connection, kinds)


def _other_system(connection: Any) -> str | None:
    """The database system of a connection, such as SQLite in a test; None: it is or may be PostgreSQL."""
    if type(connection).__module__ == "sqlite3":
        return "sqlite"
    with suppress(Exception):
        if _of(connection, "sqlalchemy.orm", "scoped_session"):
            connection = connection()
        if _of(connection, "sqlalchemy.orm", "Session") or _of(connection, "sqlalchemy.ext.asyncio", "AsyncSession"):
            connection = connection.get_bind()
        # Of SQLAlchemy, and of Django.
        dialect = getattr(connection, "dialect", None)
        name = getattr(connection, "vendor", None) if dialect is None else dialect.name
        if isinstance(name, str) and name != "postgresql":
            return name
    return None


def _no_transaction(connection: Any) -> InvalidInput:
    return InvalidInput(
        f"a {type(connection).__qualname__} has no transaction to write in",
        hint="Give the connection or session that your transaction is on.",
    )


def _translated(error: BaseException) -> PenstockError | None:
    cause = getattr(error, "orig", None) or getattr(error, "__cause__", None) or error
    # The error of the driver comes first: SQLAlchemy's has its text, with the statement and its parameters, or lacks its hint.
    for candidate in (getattr(cause, "__cause__", None), cause, error):
        state = getattr(candidate, "sqlstate", None) or getattr(candidate, "pgcode", None)
        if state:
            diagnostics = getattr(candidate, "diag", None)
            # The text of an error of asyncpg has the hint in it.
            message = getattr(diagnostics, "message_primary", None) or getattr(candidate, "message", None) or str(candidate)
            hint = getattr(diagnostics, "message_hint", None) or getattr(candidate, "hint", None)
            return of_sqlstate(state, message, hint)
    return None
