"""Sessions: from a login to a cookie, and from the cookie to the user.

The cookie holds a random token, the database its hash, so that no reader of the database can take a session over, and every
process of a server knows all sessions. The user behind a session is looked up every two seconds, so that a removed user is
out and a changed role holds; an `Authorizer` that has the method `recall` says how. While the database is away a session
that was known stays known: what is shown then is old, and nothing can be changed. A link is stored under a hash with the
secret of the server that printed it, so that no server with another secret takes it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from penstock.errors import DatabaseUnavailable
from penstock.http.auth import Authorizer, Principal, Refused, Role, can_recall
from penstock.http.dashboard import queries
from penstock.postgres.database import Database

_REMEMBERED_S = 2.0
_MOST_REMEMBERED = 10_000
LINK_LASTS = timedelta(hours=12)
_OF_LINKS = "admin"
Recalled = tuple[Principal, bytes]


@dataclass(frozen=True, slots=True)
class _Known:
    principal: Principal
    looked_at: float
    expires_at: datetime


class Sessions:
    """The sessions of one dashboard.

    Args:
        database: Gives the database.
        authorizer: Gives the authorizer, which may say who a user is today.
        lasts: How long a session lasts.
    """

    def __init__(
        self, database: Callable[[], Awaitable[Database]], authorizer: Callable[[], Awaitable[Authorizer]], lasts: timedelta
    ) -> None:
        self._database = database
        self._authorizer = authorizer
        self.lasts = lasts
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    async def recall(self, user: str) -> Recalled | None:
        """Who a user is now, with bytes that change with the secret; None: no such user, or the authorizer cannot tell."""
        return await _recall(await self._authorizer(), user)

    async def open(self, principal: Principal, recalled: Recalled | None) -> str:
        """Log a user in. Returns the token for the cookie.

        Args:
            principal: The user.
            recalled: What `recall` said before the secret of the user was looked at. A session is bound to that secret, and not
                to one by which it was replaced meanwhile.

        Raises:
            Refused: There is no such user any more, or the user has other rights now.
        """
        if recalled is None or recalled[0].name != principal.name:
            # The name of a user need not be the one that was typed.
            recalled = await self.recall(principal.name)
        if can_recall(await self._authorizer(), principal.name) and (recalled is None or recalled[0] != principal):
            raise Refused
        token = secrets.token_urlsafe(32)
        proof = None if recalled is None else _proof(token, recalled[1])
        await _store(await self._database(), _id(token), principal, proof, self.lasts)
        return token

    async def use_link(self, token: str) -> str | None:
        """Log in the user of a link. Returns the token for the cookie; None: the link was used, or has ended."""
        recalled = await self.recall(_OF_LINKS)
        if recalled is None:
            return None
        found = await queries.use_link(await self._database(), _proof(token, recalled[1]))
        try:
            return None if found is None else await self.open(_principal(found), recalled)
        except Refused:
            return None

    async def close(self, token: str) -> None:
        """Log out."""
        self._known.pop(_id(token), None)
        await queries.close_session(await self._database(), _id(token))

    async def user(self, token: str) -> Principal | None:
        """Who has this token in the cookie; None: no session has it, or it has ended."""
        id = _id(token)
        known = self._known.get(id)
        if known is not None and known.expires_at <= datetime.now(UTC):
            self._known.pop(id, None)
            return None
        if known is not None and known.looked_at + _REMEMBERED_S > time.monotonic():
            return known.principal
        try:
            found = await self._look(id, token)
        except DatabaseUnavailable:
            if known is None:
                raise
            return known.principal
        if found is None:
            self._known.pop(id, None)
            return None
        self._known[id] = found
        self._known.move_to_end(id)
        while len(self._known) > _MOST_REMEMBERED:
            self._known.popitem(last=False)
        return found.principal

    async def _look(self, id: bytes, token: str) -> _Known | None:
        stored = await queries.find_session(await self._database(), id)
        if stored is None:
            return None
        principal: Principal | None = _principal(stored)
        authorizer = await self._authorizer()
        # What can be proven has to be: who may call the SQL function alone would otherwise log in as any user with any role.
        if stored.proof is not None or can_recall(authorizer, stored.user):
            recalled = await _recall(authorizer, stored.user)
            proof = stored.proof or b""
            same = recalled is not None and hmac.compare_digest(_proof(token, recalled[1]), proof)
            principal = recalled[0] if recalled is not None and same else None
        return None if principal is None else _Known(principal, time.monotonic(), stored.expires_at)


async def new_link(database: Database, secret: str) -> str:
    """The token of a link that logs the user admin in once, for as long as this is the secret of that user."""
    token = secrets.token_urlsafe(32)
    await _store(database, _proof(token, secret.encode()), Principal(_OF_LINKS, Role.ADMIN), None, LINK_LASTS, single_use=True)
    return token


async def _store(
    database: Database, id: bytes, principal: Principal, proof: bytes | None, lasts: timedelta, *, single_use: bool = False
) -> None:
    types = None if principal.types is None else sorted(principal.types)
    await queries.open_session(
        database, id, principal.name, principal.role.name.lower(), types, proof, lasts, single_use=single_use
    )


async def _recall(authorizer: Authorizer, user: str) -> Recalled | None:
    recall = getattr(authorizer, "recall", None)
    if recall is None:
        return None
    found: Recalled | None = await recall(user)
    return found


def _principal(stored: queries.StoredSession) -> Principal:
    types = None if stored.types is None else frozenset(stored.types)
    return Principal(stored.user, Role[stored.role.upper()], types)


def _id(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _proof(token: str, secret: bytes) -> bytes:
    return hmac.digest(token.encode("utf-8", "replace"), secret, "sha256")
