"""Whether a database is one on which Penstock can work, and what in its settings hinders those who call the functions with SQL.

Penstock's own connections set what they need (`penstock.postgres.pinned`). What cannot be set is refused here when a program
starts or migrates. What is set for everybody else's connections is for `penstock doctor` to name, with the statement that mends
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import PenstockError
from penstock.postgres.database import Database
from penstock.postgres.pinned import PINNED

_CANNOT_BE_SET = """
select
    quote_ident(current_database()) as database,
    current_setting('server_encoding') as encoding,
    current_setting('session_replication_role') as replication_role,
    (select source from pg_settings where name = 'session_replication_role') as source,
    quote_ident(session_user) as role"""
# One more process opens as many as its pool, and one that listens. Reserved ones are not for it, except for a superuser.
_CONNECTIONS = """
select
    least(
        current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
            - coalesce(current_setting('reserved_connections', true), '0')::integer,
        nullif(pg_database.datconnlimit, -1),
        nullif(pg_roles.rolconnlimit, -1)
    ) as places,
    (select count(*) from pg_stat_activity where datid is not null) as taken,
    pg_roles.rolconnlimit as of_role,
    pg_database.datconnlimit as of_database,
    quote_ident(rolname) as role,
    quote_ident(datname) as database,
    (select count(*) from penstock.workers where state <> 'dead') as workers
from pg_database
cross join pg_roles
where datname = current_database() and rolname = session_user"""
_NO_SAFETY = "what was acknowledged can be lost when the server crashes"
_NO_VACUUM = "dead rows are never removed, and every claim becomes slower"
_WANTED = {
    "default_transaction_isolation": (
        "read committed",
        "claims, and other calls that wait for locks, are refused in SQL callers' transactions, unless those begin with "
        "'begin isolation level read committed'",
    ),
    "default_transaction_read_only": (
        "off",
        "SQL callers cannot enqueue, unless their transactions begin with 'begin read write'",
    ),
    "synchronous_commit": ("on", _NO_SAFETY),
    "autovacuum": ("on", _NO_VACUUM),
    "track_counts": ("on", _NO_VACUUM),
}


class _Queries(Protocol):
    async def fetchrow(self, query: str, *args: Any) -> Any:
        """The first row."""


@dataclass(frozen=True, slots=True)
class Hindrance:
    """Something in the settings that is not as it should be, and what to do about it."""

    message: str
    advice: str


async def refuse_unsuitable(database: _Queries) -> None:
    """Raise `PenstockError` when Penstock cannot work with a property of the database that a connection cannot set."""
    found = await database.fetchrow(_CANNOT_BE_SET)
    if found["encoding"] != "UTF8":
        raise PenstockError(
            f"the database {found['database']} has the encoding {found['encoding']}, and Penstock needs UTF8",
            hint="Create another: create database NAME encoding 'UTF8' locale 'C' template template0; "
            "and use it, with what is in this one (pg_dump).",
        )
    if found["replication_role"] != "origin":
        raise PenstockError(
            f"the role {found['role']} works with session_replication_role = {found['replication_role']}, with which PostgreSQL "
            "runs no triggers and checks no foreign keys",
            hint=f"Run: {_reset('session_replication_role', 'origin', found['source'], found['role'], found['database'])}",
        )


async def hindrances(database: Database) -> tuple[list[Hindrance], list[str]]:
    """What in the settings of role, database and server hinders others, and what own connections have set otherwise.

    Args:
        database: Database to look at.

    Returns:
        The hindrances, and the names of settings that Penstock's own connections override.
    """
    who = await database.fetchrow("select quote_ident(session_user) as role, quote_ident(current_database()) as database")
    given = {row["name"]: row for row in await database.settings_of_others([*_WANTED, *PINNED])}
    found = []
    for name, (wanted, so) in _WANTED.items():
        row = given[name]
        # Any level of synchronous_commit but off survives a crash of the server.
        if row["setting"] == wanted or (name == "synchronous_commit" and row["setting"] != "off"):
            continue
        whose = {"user": f"the role {who['role']}", "database user": f"the role {who['role']} in this database"}.get(
            row["source"], "this database" if row["source"] == "database" else "the server"
        )
        advice = f"Run: {_reset(name, wanted, row['source'], who['role'], who['database'])}"
        found.append(Hindrance(f"{name} is {row['setting']} for {whose}: {so}", advice))
    ordinary = {"default", "client", "override"}
    overridden = [
        name
        for name, value in PINNED.items()
        if name in given and given[name]["setting"] != value and given[name]["source"] not in ordinary
    ]
    return found, overridden


async def lacking_connections(database: Database) -> Hindrance | None:
    """Whether the server has places for one more process of Penstock; None: it has."""
    found = await database.fetchrow(_CONNECTIONS)
    needed = database.most_connections
    processes = found["workers"] + 1
    if found["places"] - found["taken"] >= needed and found["places"] >= needed * processes:
        return None
    if found["places"] == found["of_role"]:
        what, run = "the role", f"alter role {found['role']} connection limit -1;"
    elif found["places"] == found["of_database"]:
        what, run = "the database", f"alter database {found['database']} connection limit -1;"
    else:
        what, run = "the server", "alter system set max_connections = 200; and restart PostgreSQL."
    return Hindrance(
        f"{what} has {found['places']} connections, of which {found['taken']} are taken; each of {processes} processes of "
        f"Penstock opens up to {needed}, and then waits for a free one",
        f"Run: {run} Or set PENSTOCK_POOL_SIZE to less than {database.pool_size}, or use PgBouncer (docs/pgbouncer.md).",
    )


def _reset(name: str, wanted: str, source: str, role: str, database: str) -> str:
    """The statement that gives a setting the value that is wanted, where it was set."""
    match source:
        case "user":
            return f"alter role {role} reset {name};"
        case "database user":
            return f"alter role {role} in database {database} reset {name};"
        case "database":
            return f"alter database {database} reset {name};"
        case "global":
            return f"alter role all reset {name};"
        case "command line":
            return f"the server without -c {name}, or with -c {name}={wanted.replace(' ', chr(92) + ' ')}"
    return f"alter system set {name} = '{wanted}'; select pg_reload_conf();"
