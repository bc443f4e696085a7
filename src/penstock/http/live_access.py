"""Whether the users of connections that stay open may still go on.

A request is let in once; a live connection, a long poll and a body that goes on for hours outlast what was known then. So each of
them is watched while it lasts, and one task of the process looks every two seconds who the users of all of them are now: with
the built-in users one statement, however many connections there are, and none while nothing is watched. A user who was removed,
has another secret, a lower role or fewer job types is told to come back, and is refused then. While the database is away nothing
is known, and nothing received.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from penstock.core.logs import get_logger
from penstock.errors import PenstockError
from penstock.http.auth import Authenticator, Principal, Role, can_recall, current, parse_authorization
from penstock.http.errors import ApiError

log = get_logger("penstock.http")
_EVERY_S = 2.0
# An authorizer that cannot say who was let in before is asked again, one user after another.
_AUTHORIZED_AGAIN_S = 10.0
ENDED = "the access of the user has ended or changed"


class Watch:
    """One connection, or request that takes long.

    Attributes:
        ended: Set when its user may no longer go on.
    """

    __slots__ = ("ended", "header", "mark", "principal", "role")

    def __init__(self, principal: Principal, role: Role, header: bytes | None) -> None:
        self.principal = principal
        self.role = role
        self.header = header
        self.mark = principal.mark
        self.ended = asyncio.Event()

    def check(self) -> None:
        """Raise a 403 when its user may no longer go on."""
        if self.ended.is_set():
            title = f"The access of user {self.principal.name} has ended or changed"
            raise ApiError(403, "forbidden", title, detail="Connect again", in_body=True)

    def compare(self, now: tuple[Principal, bytes] | None) -> None:
        """Take note of who the user is now; None: there is no such user any more."""
        if now is not None:
            principal, mark = now
            # What an authorizer of one's own does not say with the user is what it said first.
            self.mark = self.mark or mark
            mine = self.principal.types
            wide_enough = principal.types is None or (mine is not None and mine <= principal.types)
            if mark == self.mark and principal.role >= self.role and wide_enough:
                return
        self.ended.set()


class LiveAccess:
    """The connections of this process that are watched.

    Args:
        authenticator: Decides who comes in.
    """

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._watched: set[Watch] = set()
        self._task: asyncio.Task[None] | None = None
        self._authorized_at = time.monotonic()

    @contextmanager
    def watching(self, principal: Principal, role: Role | None, header: bytes | None) -> Iterator[Watch]:
        """Watch a connection while the block lasts.

        Args:
            principal: The user who was let in.
            role: The role that the route needs.
            header: The Authorization header, which is looked at again where the authorizer can do no better.
        """
        watch = Watch(principal, role or Role.READ, header)
        self._watched.add(watch)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look(), name="penstock-live-access")
        try:
            yield watch
        finally:
            self._watched.discard(watch)

    async def close(self) -> None:
        """End the looks."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _look(self) -> None:
        while self._watched:
            await asyncio.sleep(_EVERY_S)
            try:
                await self.look()
            except PenstockError as error:
                log.warning("live_access_unknown", error=error)
            except Exception:
                # Of an authorizer of one's own.
                log.exception("live_access_failed")

    async def look(self) -> None:
        """Look who the users of all that is watched are now."""
        authorizer = self._authenticator.authorizer
        watched = [watch for watch in self._watched if not watch.ended.is_set()]
        recalled = [watch for watch in watched if can_recall(authorizer, watch.principal.name)]
        if recalled:
            now = await current(authorizer, [watch.principal for watch in recalled])
            for watch, found in zip(recalled, now, strict=True):
                watch.compare(found)
        again = set(watched) - set(recalled)
        if again and time.monotonic() - self._authorized_at >= _AUTHORIZED_AGAIN_S:
            self._authorized_at = time.monotonic()
            for header in {watch.header for watch in again}:
                await self._authorize(header, [watch for watch in again if watch.header == header])

    async def _authorize(self, header: bytes | None, watches: list[Watch]) -> None:
        """Ask an authorizer that cannot recall users whether it still lets these in."""
        now: tuple[Principal, bytes] | None = None
        try:
            principal = await self._authenticator.authorizer.authorize(parse_authorization(header, "", ""))
            now = principal, principal.mark
        except ApiError as error:
            if error.status not in (401, 403):
                raise
        for watch in watches:
            watch.compare(now)
