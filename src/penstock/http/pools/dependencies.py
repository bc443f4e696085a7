"""What the routes about pools take from their paths."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path

from penstock.http.errors import bad_json
from penstock.http.routing import Instance, OpenDatabase, User
from penstock.pools import views as pool_views

PoolName = Annotated[str, Path(description="Pool.", examples=["fibonacci"], max_length=200)]


async def _open_pool(pool: PoolName, user: User, database: OpenDatabase, path: Instance) -> str:
    """The pool of a path. Raises `ApiError` 403, `NotFound`."""
    user.require(pool, path)
    await pool_views.require(database, pool, user.may)
    return pool


async def _key(key: Annotated[str, Path(description="Key.", examples=["acme"], max_length=255)]) -> str:
    return storable_key(key)


def storable_key(key: str) -> str:
    """The same key. Raises `ApiError` for one that PostgreSQL cannot store."""
    if "\x00" in key:
        raise bad_json()
    return key


# The pool of the path, which is there and open to the user.
OpenPool = Annotated[str, Depends(_open_pool)]
Key = Annotated[str, Depends(_key)]
