"""Who may do what: the `Authorizer` protocol, what it is given and what it answers, and the `Authenticator` before every route.

The authenticator parses the credentials, slows down guessing, and remembers who was let in for two seconds, so that the hot path
costs one keyed hash. Neither it nor anything else logs a secret or keeps one in clear.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import enum
import hashlib
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.http.errors import ApiError
from penstock.http.proxies import household

_REMEMBERED_S = 2.0
_MOST_REMEMBERED = 10_000
_MOST_LOOKUPS = 20
_REALM = {"WWW-Authenticate": 'Basic realm="penstock"'}


class Role(enum.IntEnum):
    """What a user may do; each includes the ones before."""

    READ = 1
    ENQUEUE = 2
    WORK = 3
    ADMIN = 4


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is there.

    Attributes:
        name: Name, for the log and the audit.
        role: Role.
        types: The job types, streams and topics that the user may touch, by name; None: all.
        mark: Bytes that change when the secret does, which `recall` of the authorizer gives too. Empty: the authorizer says none.
    """

    name: str
    role: Role
    types: frozenset[str] | None = None
    mark: bytes = field(default=b"", repr=False, compare=False)

    def may(self, name: str) -> bool:
        """Whether the job type is open to this user."""
        return self.types is None or name in self.types

    def require_all(self, instance: str) -> None:
        """Raise a 403 unless every job type is open to this user."""
        if self.types is not None:
            title = f"User {self.name} has access to some job types only; this shows all"
            raise ApiError(403, "forbidden", title, instance=instance, in_body=True)

    def require_any(self, what: str, instance: str) -> None:
        """Raise a 403 unless every job type is open to this user, for what may be of any: other jobs, or job groups."""
        if self.types is not None:
            title = f"User {self.name} has access to some job types only: {what} may be of any"
            raise ApiError(403, "forbidden", title, instance=instance, in_body=True)

    def require(self, name: str, instance: str, what: str = "job type") -> None:
        """Raise a 403 unless the job type, or the stream or topic of that name, is open to this user."""
        if not self.may(name):
            raise ApiError(403, "forbidden", f"User {self.name} has no access to {what} {name}", instance=instance, in_body=True)


Recalled = tuple[Principal, bytes]
"""Who a user is now, with bytes that change when the secret does."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a request brought: `scheme` is basic or bearer. A bearer token is `NAME.SECRET`."""

    user: str
    secret: str = field(repr=False)
    scheme: str = "basic"
    client: str = ""


class Refused(ApiError):
    """Raised by an `Authorizer`: these credentials are not good. The answer is the same for an unknown user."""

    def __init__(self) -> None:
        super().__init__(403, "forbidden", "Username or password are invalid. Please double check your credentials")


class Authorizer(Protocol):
    """Decides which principal a client is.

    It may also have `async def knows(self, user: str) -> bool`, whether there is such a user: then an address from which many
    logins failed keeps out guesses at names that there are not, and no user.

    And it may have `async def recall(self, user: str) -> tuple[Principal, bytes] | None`: who a user is that the dashboard let in
    before, with bytes that change when the secret does; None: there is no such user any more. Without it a session of the
    dashboard lasts as the login found it. It says the same of a user as `authorize`, otherwise the dashboard refuses the login.
    It is asked every two seconds about the users of connections that stay open, for all of them at once where there is
    `async def recall_many(self, users: Collection[str]) -> Mapping[str, tuple[Principal, bytes]]`; without `recall`, `authorize`
    is asked again every ten seconds.
    """

    async def authorize(self, credentials: Credentials | None) -> Principal:
        """Who this is; None: the request has no credentials. Raises `Refused`, or another `ApiError`."""


def unauthorized(instance: str) -> ApiError:
    """The request has no credentials."""
    return ApiError(
        401,
        "unauthorized",
        "Unauthorized. Please include your API credentials",
        instance=instance,
        in_body=True,
        headers=_REALM,
    )


class OneUser:
    """An authorizer that knows one user with every right, and passes all others on.

    Args:
        name: Its name.
        secret: Its password, or with the name before it its token.
        others: Decides about all other users; None: no other user is admitted.
    """

    def __init__(self, name: str, secret: str, others: Authorizer | None = None) -> None:
        self._name = name
        self._secret = secret.encode()
        self._principal = Principal(name, Role.ADMIN, mark=self._secret)
        self._others = others

    async def authorize(self, credentials: Credentials | None) -> Principal:
        """See `Authorizer`."""
        if credentials is None:
            raise unauthorized("")
        same = secrets.compare_digest(credentials.secret.encode("utf-8", "replace"), self._secret)
        if same and credentials.user == self._name:
            return self._principal
        if self._others is None:
            raise Refused
        return await self._others.authorize(credentials)

    async def knows(self, user: str) -> bool:
        """See `Authorizer`."""
        knows = getattr(self._others, "knows", None)
        return user == self._name or (knows is not None and bool(await knows(user)))

    async def recall(self, user: str) -> tuple[Principal, bytes] | None:
        """See `Authorizer`."""
        recall = getattr(self._others, "recall", None)
        found: tuple[Principal, bytes] | None = None if recall is None else await recall(user)
        if user == self._name:
            # Another user of this name ends the sessions with a change too: which of the two logged in is not known.
            return self._principal, self._secret if found is None else self._secret + b"\0" + found[1]
        return found

    async def current(self, users: Sequence[Principal]) -> list[Recalled | None]:
        """See `current`: the user with the token stays, and the others are asked about all others."""
        others = [user for user in users if not self._is_mine(user)]
        found = iter([] if not others else [None] * len(others) if self._others is None else await current(self._others, others))
        return [(self._principal, self._secret) if self._is_mine(user) else next(found) for user in users]

    def _is_mine(self, user: Principal) -> bool:
        return user.name == self._name and secrets.compare_digest(user.mark, self._secret)

    def recalls(self, user: str) -> bool:
        """Whether `recall` can say who this user is."""
        return user == self._name or self._others is None or can_recall(self._others, user)


def can_recall(authorizer: Authorizer, user: str) -> bool:
    """Whether an authorizer can say who a user is that was let in before."""
    return authorizer.recalls(user) if isinstance(authorizer, OneUser) else hasattr(authorizer, "recall")


async def current(authorizer: Authorizer, users: Sequence[Principal]) -> list[Recalled | None]:
    """Who some users are now who were let in before; None: there is no such user any more.

    Args:
        authorizer: One that can say it (`can_recall`).
        users: The users.
    """
    if isinstance(authorizer, OneUser):
        return await authorizer.current(users)
    names = {user.name for user in users}
    many = getattr(authorizer, "recall_many", None)
    if many is not None:
        found = await many(names)
    else:
        recall: Any = authorizer
        found = {name: await recall.recall(name) for name in names}
    return [found.get(user.name) for user in users]


class Throttle:
    """Counts failures: at most `per_user` a minute for a user from one address, `per_client` from one address.

    Guesses at the same time do not slip through together: no more are under way than may still fail, the others wait.

    An address may be that of a proxy with many clients behind it, of which one guesses. So the limit of an address holds for
    names that no user has; of a user's own failures there are at most `per_user` from an address, whatever else comes from it.
    """

    def __init__(self, per_user: int = 10, per_client: int = 100, period_s: float = 60.0) -> None:
        self._limits = (per_user, per_client)
        self._period = period_s
        self._failures: OrderedDict[tuple[str, str | None], list[float]] = OrderedDict()
        self._under_way: Counter[tuple[str, str | None]] = Counter()
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def attempt(self, client: str, user: str, *, known: bool = False) -> AsyncIterator[None]:
        """Around one try to log in: waits for its turn. Raises a 429 when there were too many failures of late.

        Args:
            client: The address.
            user: The name.
            known: Whether there is such a user.
        """
        limits = self._limits_of(client, user, known)
        keys = tuple(key for key, _ in limits)
        self.check(client, user, known=known)
        while any(len(self._recent(key)) + self._under_way[key] >= limit for key, limit in limits):
            await self._ended.wait()
            self.check(client, user, known=known)
        self._under_way.update(keys)
        try:
            yield
        finally:
            self._under_way.subtract(keys)
            for key in keys:
                if not self._under_way[key]:
                    del self._under_way[key]
            # Requests that wait look again; those that come now wait for the next one.
            self._ended.set()
            self._ended = asyncio.Event()

    def crowded(self, client: str) -> bool:
        """Whether so much came and comes from an address that names which no user has are refused."""
        key = _keys(client, "")[1]
        return len(self._recent(key)) + self._under_way[key] >= self._limits[1]

    def check(self, client: str, user: str, *, known: bool = False) -> None:
        """Raise a 429 when there were too many failures of late."""
        for key, limit in self._limits_of(client, user, known):
            failures = self._recent(key)
            if len(failures) >= limit:
                wait = int(failures[0] + self._period - time.monotonic()) + 1
                raise ApiError(
                    429,
                    "too_many_failures",
                    "Too many failed attempts to log in",
                    detail=f"Try again in {wait} seconds",
                    in_body=True,
                    headers={"Retry-After": str(wait)},
                )

    def failed(self, client: str, user: str) -> None:
        """Note a failure."""
        for key, limit in zip(_keys(client, user), self._limits, strict=True):
            self._failures[key] = [*self._recent(key), time.monotonic()][-limit:]
            self._failures.move_to_end(key)
        while len(self._failures) > _MOST_REMEMBERED:
            self._failures.popitem(last=False)

    def _limits_of(self, client: str, user: str, known: bool) -> list[tuple[tuple[str, str | None], int]]:
        both = list(zip(_keys(client, user), self._limits, strict=True))
        return both[:1] if known else both

    def _recent(self, key: tuple[str, str | None]) -> list[float]:
        since = time.monotonic() - self._period
        return [at for at in self._failures.get(key, ()) if at > since]


def _keys(client: str, user: str) -> tuple[tuple[str, str | None], tuple[str, str | None]]:
    # No user has a longer name, but a client that guesses may send one.
    return (household(client), user[:65]), (household(client), None)


class Authenticator:
    """Lets requests in.

    Args:
        authorizer: Who decides.

    Attributes:
        authorizer: The same.
    """

    def __init__(self, authorizer: Authorizer) -> None:
        self.authorizer = authorizer
        self._throttle = Throttle()
        self._key = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, tuple[Principal, float]] = OrderedDict()
        # Names that were let in once, so that they are users.
        self._names: OrderedDict[str, None] = OrderedDict()
        self._looking = 0

    def known(self, header: bytes | None) -> Principal | None:
        """Who sent this Authorization header, when that was found out a moment ago."""
        if header is None:
            return None
        remembered = self._known.get(hashlib.blake2b(header, key=self._key, digest_size=16).digest())
        return remembered[0] if remembered is not None and remembered[1] > time.monotonic() else None

    async def enter(self, header: bytes | None, client: str, instance: str, *, fresh: bool = False) -> Principal:
        """Who this is; `fresh`: by the authorizer, also right after a login. Raises `ApiError` 401, 403 or 429."""
        if not fresh and (principal := self.known(header)) is not None:
            return principal
        credentials = parse_authorization(header, client, instance)
        digest = hashlib.blake2b(header or b"", key=self._key, digest_size=16).digest()
        # A user who was admitted before is not kept out by the failures of others behind the same proxy.
        if credentials is None or digest in self._known:
            return await self._authorize(credentials, digest, client, instance)
        known = await self._is_user(client, credentials.user)
        try:
            async with self._throttle.attempt(client, credentials.user, known=known):
                known_now = None if fresh else self.known(header)
                return known_now or await self._authorize(credentials, digest, client, instance)
        except ApiError as error:
            if known and error.status in (401, 403):
                # The answer does not tell which names are users'.
                self._throttle.check(client, credentials.user)
            raise

    async def _is_user(self, client: str, user: str) -> bool:
        """Whether there is such a user, which matters, and is looked up, only once an address has failed often."""
        if not self._throttle.crowded(client):
            return False
        if user in self._names:
            return True
        if self._looking >= _MOST_LOOKUPS:
            return False
        knows = getattr(self.authorizer, "knows", None)
        self._looking += 1
        try:
            # An authorizer that cannot tell limits guesses by user alone.
            return True if knows is None else bool(await knows(user))
        finally:
            self._looking -= 1

    async def _authorize(self, credentials: Credentials | None, digest: bytes, client: str, instance: str) -> Principal:
        try:
            principal = await self.authorizer.authorize(credentials)
        except ApiError as error:
            if credentials is None and error.id == "unauthorized":
                raise unauthorized(instance) from None
            if credentials is not None and error.status in (401, 403):
                self._known.pop(digest, None)
                self._throttle.failed(client, credentials.user)
            if error.id == "forbidden_api":
                error.status, error.headers = 401, _REALM
            raise
        if credentials is not None:
            self._names[credentials.user] = None
            while len(self._names) > _MOST_REMEMBERED:
                self._names.popitem(last=False)
            self._known[digest] = (principal, time.monotonic() + _REMEMBERED_S)
            self._known.move_to_end(digest)
            while len(self._known) > _MOST_REMEMBERED:
                self._known.popitem(last=False)
        return principal


def parse_authorization(header: bytes | None, client: str, instance: str) -> Credentials | None:
    """The credentials of an Authorization header; None when there is none that is understood."""
    if header is None:
        return None
    scheme, _, value = header.partition(b" ")
    user: str | None = None
    secret = ""
    kind = scheme.lower().decode("latin-1")
    if kind == "basic":
        try:
            text = base64.b64decode(value.strip(), validate=True).decode("utf-8")
            user, _, secret = text.partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
    elif kind == "bearer":
        user, _, secret = value.strip().decode("latin-1").partition(".")
    if user is None:
        return None
    if not user:
        raise ApiError(
            401, "missing_authentication", "No authentication provided", instance=instance, in_body=True, headers=_REALM
        )
    return Credentials(user, secret, kind, client)
