"""The settings that Penstock's own connections need, whatever a role, a database or a server sets by default.

Roles, databases and servers have defaults that change what a statement does: an isolation level at which a claim cannot work, a
time limit that ends a migration, another text of a time. A direct connection asks for its settings
when it starts, which costs nothing. A pooler such as PgBouncer refuses parameters that it does not know at the start of a
connection, and gives what is set later to the next user of the connection. Through one, each transaction sets them for itself,
with the statement that begins it.

The search path is left as it is: all names in Penstock's statements have their schema, and an application may use these
connections for tables of its own.

What cannot be set is refused when a program starts, see `penstock.postgres.suitability`.
"""

from __future__ import annotations

import re
from functools import cache
from urllib.parse import quote, unquote, urlsplit

PINNED = {
    # The functions that lock rows look at them again with a newer snapshot.
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    # Every call has the time limit `command_timeout`. A transaction of several statements has a limit of its own.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "transaction_timeout": "0",
    # Connections of a pool, and the one that listens, are idle as long as nothing happens.
    "idle_session_timeout": "0",
    "row_security": "on",
    # How texts are read, and values written as text.
    "standard_conforming_strings": "on",
    "array_nulls": "on",
    "bytea_output": "hex",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "quote_all_identifiers": "off",
    # Compiling a statement takes longer than to run it.
    "jit": "off",
    "default_table_access_method": "heap",
}
"""Each setting, and the value that own connections have."""
_SINCE = {"transaction_timeout": 17}
_WHITE = re.compile(r"(\s)")
_ESCAPED = r"\\\1"

# Of the settings that a role, database or server has, those that a call cannot do with. The others only slow it down, or show
# in statements that people write.
_NEEDED = PINNED.keys() - {"jit", "default_table_access_method", "transaction_timeout", "idle_session_timeout"}
ORDINARY = "select where " + " and ".join(f"current_setting('{name}') = '{PINNED[name]}'" for name in sorted(_NEEDED))
"""Returns a row when the settings are those that are needed, without having been set."""


def settings_of(server: int) -> dict[str, str]:
    """The pinned settings that a server of this major version knows."""
    return {name: value for name, value in PINNED.items() if _SINCE.get(name, 0) <= server}


def pinned_url(url: str) -> str:
    """A URL for drivers of libpq with which a connection starts with the settings that servers of every version know."""
    parts = urlsplit(url)
    # What else is there stays as it is written: libpq reads a plus as a plus.
    given = [each for each in parts.query.split("&") if each]
    options = [unquote(each.removeprefix("options=")) for each in given if each.startswith("options=")]
    options += [f"-c {name}={_WHITE.sub(_ESCAPED, value)}" for name, value in settings_of(0).items()]
    others = [each for each in given if not each.startswith("options=")]
    return parts._replace(query="&".join([*others, f"options={quote(' '.join(options), safe='')}"])).geturl()


@cache
def set_statements(server: int, scope: str) -> str:
    """The statements that pin the settings.

    Args:
        server: Major version of the server.
        scope: `session`, or `local` to the transaction.
    """
    return "; ".join(f"set {scope} {name} = '{value}'" for name, value in settings_of(server).items())


def begin_statement(*, read_only: bool = False) -> str:
    """The statement that begins a transaction at the level that the functions need."""
    return f"begin isolation level read committed, {'read only' if read_only else 'read write'}"
