"""The built-in authorizer: users with hashed secrets in Postgres."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Collection, Sequence

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from penstock.errors import InvalidInput
from penstock.http import user_queries as users
from penstock.http.auth import Credentials, Principal, Recalled, Refused, Role, unauthorized
from penstock.postgres.database import Database

# OWASP's smallest recommendation: an API checks often, and what it checks are mostly random tokens.
_HASHER = PasswordHasher(time_cost=2, memory_cost=19_456, parallelism=1)
SHORTEST_PASSWORD = 12
_MOST_REMEMBERED = 10_000


def hash_secret(secret: str) -> str:
    """What is stored of a secret. Raises `InvalidInput` for one that is too short."""
    if len(secret) < SHORTEST_PASSWORD:
        raise InvalidInput(
            f"a password has at least {SHORTEST_PASSWORD} characters; this one has {len(secret)}",
            hint="Give none: a random one is made and printed.",
        )
    return _HASHER.hash(secret)


def new_secret() -> str:
    """A random secret that needs no quoting anywhere."""
    return secrets.token_urlsafe(24)


class Users:
    """Checks users against the table `penstock.users`.

    A secret that was found good is remembered as a keyed hash together with the stored hash that it matched, so that only
    the first request pays for Argon2; a changed or removed user no longer matches.

    Args:
        database: Database to read from.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._key = secrets.token_bytes(32)
        self._verified: set[bytes] = set()
        # One at a time, so that a flood of guesses takes neither all memory nor all processors.
        self._hashing = asyncio.Semaphore(1)
        self._unknown_user = hash_secret(new_secret())

    async def authorize(self, credentials: Credentials | None) -> Principal:
        """See `penstock.http.auth.Authorizer`."""
        if credentials is None:
            raise unauthorized("")
        name = credentials.user if len(credentials.user) <= 64 and "\x00" not in credentials.user else ""
        found = await users.find_user(self._database, name)
        # For an unknown user something is checked too, so that the time does not tell.
        stored = found.secret_hash if found is not None else self._unknown_user
        if not await self._matches(stored, credentials.secret) or found is None:
            raise Refused
        return _principal(found)

    async def knows(self, user: str) -> bool:
        """See `penstock.http.auth.Authorizer`."""
        return len(user) <= 64 and "\x00" not in user and await users.find_user(self._database, user) is not None

    async def recall(self, user: str) -> tuple[Principal, bytes] | None:
        """See `penstock.http.auth.Authorizer`."""
        return (await self.recall_many([user])).get(user)

    async def recall_many(self, names: Collection[str]) -> dict[str, Recalled]:
        """See `penstock.http.auth.Authorizer`."""
        asked = [name for name in names if len(name) <= 64 and "\x00" not in name]
        found = await users.find_users(self._database, asked)
        return {
            name: (Principal(name, Role[user.role.upper()], _types(user.types), user.mark), user.mark)
            for name, user in found.items()
        }

    async def _matches(self, stored: str, secret: str) -> bool:
        seen = f"{stored}\0{secret}".encode("utf-8", "replace")
        digest = hashlib.blake2b(seen, key=self._key, digest_size=16).digest()
        if digest in self._verified:
            return True
        async with self._hashing:
            if digest in self._verified:
                # Another request came with the same credentials at the same time.
                return True
            good = await asyncio.to_thread(_verify, stored, secret)
        if good:
            if len(self._verified) >= _MOST_REMEMBERED:
                self._verified.clear()
            self._verified.add(digest)
        return good


def _principal(found: users.UserSecret) -> Principal:
    return Principal(found.name, Role[found.role.upper()], _types(found.types), found.mark)


def _types(types: Sequence[str] | None) -> frozenset[str] | None:
    return None if types is None else frozenset(types)


def _verify(stored: str, secret: str) -> bool:
    try:
        return _HASHER.verify(stored, secret)
    except (VerificationError, InvalidHashError):
        return False
