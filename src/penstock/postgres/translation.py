"""Errors of asyncpg, of the server and of the operating system as errors of Penstock's own types, with what to do."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

import asyncpg

from penstock.errors import Conflict, DatabaseUnavailable, InvalidInput, PenstockError, Unreadable, of_sqlstate
from penstock.postgres.rights import hint_for

# Connection exceptions, lack of resources, shutdowns, "the database system is starting up", "not accepting connections", and
# transactions that the server ended for idling or for taking too long.
_LOST_CLASSES = ("08", "53", "57P", "55000", "25P03", "25P04", "58")
# Failures caused by another call, a setting or an administrator, after which a repetition may succeed, with the hint for each.
_PASSING = {
    "25006": "The server is read-only: a standby, or the old primary after a failover. Repeat the call when there is a primary.",
    "40": "Repeat the call.",
    "55P03": "Repeat the call.",
}
_CANCELLED = "57014"
# A prepared statement already exists, or does not exist.
_OF_A_POOLER = {"42P05", "26000"}
DRIVER_ERRORS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""What asyncpg raises when a call fails; also, of a connection that the server has just ended, an internal error of its own."""
_WHO_CANCELLED = "It was cancelled, by an administrator or by a statement_timeout. Repeat the call."


class StatementCancelled(DatabaseUnavailable):
    """A statement was cancelled, by an administrator or since it took too long, while the database answers."""


def translate(error: BaseException) -> PenstockError | None:
    """The Penstock error for an error of asyncpg or the operating system; None for other errors.

    Every error of the server has a Penstock error, so that a loop which continues after a `PenstockError` continues after all
    errors of the server.
    """
    if isinstance(error, asyncpg.PostgresError):
        return _of_server(error, getattr(error, "sqlstate", None) or "XX000")
    if isinstance(error, asyncpg.exceptions.DataError):
        return InvalidInput(f"a value does not match its type: {error}")
    if isinstance(error, (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError, TimeoutError)):
        return DatabaseUnavailable(f"the database is not available: {type(error).__name__}: {error}")
    if isinstance(error, (OverflowError, UnicodeDecodeError)):
        # PostgreSQL's times and intervals have larger ranges than Python's, and some encodings accept any bytes as text.
        return Unreadable(f"the database holds a value that Python cannot represent: {error}")
    return None


def _of_server(error: asyncpg.PostgresError, sqlstate: str) -> PenstockError:
    message = getattr(error, "message", None) or str(error)
    hint = getattr(error, "hint", None)
    if known := of_sqlstate(sqlstate, message, hint):
        return known
    if sqlstate.startswith(_LOST_CLASSES):
        return DatabaseUnavailable(f"the database is not available: {message}")
    if sqlstate == _CANCELLED:
        return StatementCancelled(f"the database did not carry out the call: {message}", hint=_WHO_CANCELLED)
    for state, advice in _PASSING.items():
        if sqlstate.startswith(state):
            return DatabaseUnavailable(f"the database did not carry out the call: {message}", hint=advice)
    if sqlstate == "23505":
        return Conflict(
            f"the database did not carry out the call: {message}",
            hint="Another transaction wrote the same identity or unique key at the same time: repeat the call.",
        )
    if sqlstate == "42501":
        return PenstockError(
            f"the database refuses: {message}",
            hint=hint_for(message),
        )
    if sqlstate in _OF_A_POOLER and "prepared statement" in message:
        return DatabaseUnavailable(
            f"the database did not carry out the call: {message}",
            hint="A pooler in between does not keep prepared statements: set PENSTOCK_STATEMENT_CACHE=false (docs/pgbouncer.md).",
        )
    if sqlstate.startswith("28") or sqlstate == "3D000":
        return PenstockError(
            f"cannot log in to the database: {message}",
            hint="Check PENSTOCK_DATABASE_URL: user, password, database.",
        )
    if sqlstate == "22021":
        return InvalidInput(f"text that PostgreSQL cannot store: {message}", hint="Leave out the character U+0000.")
    if sqlstate.startswith("22"):
        return InvalidInput(message, hint=hint)
    if sqlstate.startswith("54"):
        return InvalidInput(f"a value is too large for the database: {message}", hint=hint)
    return PenstockError(f"the database refuses (SQLSTATE {sqlstate}): {message}", hint=hint)


def lacks_rights(error: PenstockError) -> bool:
    """Whether the role that is logged in may not make the call."""
    return getattr(error.__cause__, "sqlstate", None) == "42501"


async def unless_refused(call: Awaitable[object]) -> bool:
    """Make a call for which the role may lack the right. Returns whether it was made."""
    try:
        await call
    except PenstockError as error:
        if not lacks_rights(error):
            raise
        return False
    return True


def lost_connection(error: BaseException) -> bool:
    """Whether the connection is lost, as opposed to a call that took too long."""
    state = getattr(error, "sqlstate", None) or ""
    return state.startswith(("08", "57P", "25006", "25P03", "25P04")) or (
        isinstance(error, (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError)) and not isinstance(error, TimeoutError)
    )
