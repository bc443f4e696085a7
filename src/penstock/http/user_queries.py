"""One typed function for each SQL function about users of the HTTP API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from penstock.postgres.database import Database, in_parts


@dataclass(frozen=True, slots=True)
class UserRecord:
    """A user without the secret. `types` None: all job types."""

    name: str
    role: str
    types: list[str] | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class UserSecret:
    """A user as the server checks it."""

    name: str
    role: str
    types: list[str] | None
    secret_hash: str
    mark: bytes


@dataclass(frozen=True, slots=True)
class UserNow:
    """Who a user is now. `mark` changes when the secret does."""

    role: str
    types: list[str] | None
    mark: bytes


async def add_user(
    database: Database, name: str, role: str, secret_hash: str, types: Sequence[str] | None, *, replace: bool = False
) -> None:
    """Add a user. Raises `Conflict` when it exists and is not to be replaced."""
    await database.fetch("select penstock.add_user($1, $2, $3, $4, $5)", name, role, secret_hash, types, replace)


async def remove_user(database: Database, name: str) -> None:
    """Remove a user. Raises `NotFound`."""
    await database.fetch("select penstock.remove_user($1)", name)


async def list_users(database: Database) -> list[UserRecord]:
    """All users, by name."""
    return [UserRecord(*tuple(row)) for row in await database.fetch("select * from penstock.list_users()")]


async def has_users(database: Database) -> bool:
    """Whether there are any."""
    return bool(await database.fetchval("select penstock.has_users()"))


async def find_user(database: Database, name: str) -> UserSecret | None:
    """One user, or None."""
    row = await database.fetchrow("select * from penstock.find_user($1)", name)
    return None if row is None else UserSecret(*tuple(row))


async def find_users(database: Database, names: Sequence[str]) -> dict[str, UserNow]:
    """The users of these names, by name; what there is not is left out."""
    found: dict[str, UserNow] = {}
    for some in in_parts(names):
        rows = await database.fetch("select * from penstock.find_users($1)", some)
        found |= {row["name"]: UserNow(row["role"], row["types"], row["mark"]) for row in rows}
    return found
