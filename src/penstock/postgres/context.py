"""The context of an application: its open databases and settings, which job types, pools, streams and topics share.

Connections belong to the process and the event loop that opened them: a handler in a thread may use the synchronous interface,
and a server may fork. A context therefore keeps a `Database` for each process and loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

from penstock.core.blocking import BackgroundLoop, without_loop
from penstock.core.encryption import Keyring
from penstock.core.hooks import Hooks
from penstock.core.logs import get_logger
from penstock.core.tracing import Tracing
from penstock.errors import DatabaseUnavailable
from penstock.postgres import migrate
from penstock.postgres.database import Database
from penstock.postgres.embedded import EmbeddedServer
from penstock.postgres.migrate import Migrated, MigrationPlan
from penstock.settings import Settings

log = get_logger("penstock.database")
_LOOK_AGAIN_S = 0.1
_Place = tuple[int, asyncio.AbstractEventLoop]


def _place() -> _Place:
    return os.getpid(), asyncio.get_running_loop()


class Context:
    """The open databases and the settings of an application.

    Args:
        settings: Settings of the application.
        opened: Called after a database was opened and before its first use; it writes the declarations of the application. Its
            argument says whether `open` was called, as at the start of a program, or a first call needed the database.

    Attributes:
        keyring: Keys of encrypted payloads.
        background: Event loop on which blocking calls run.
        hooks: What the application puts around its handlers.
        tracing: Its spans; None: it has none.
    """

    def __init__(self, settings: Settings, opened: Callable[[bool], Awaitable[None]]) -> None:
        self.settings = settings
        self.keyring = Keyring(settings.keys)
        self._opened = opened
        self._databases: dict[_Place, Database] = {}
        self._opening: dict[_Place, asyncio.Lock] = {}
        self._servers: dict[int, EmbeddedServer] = {}
        self._held: dict[int, EmbeddedServer] = {}
        self.background = BackgroundLoop()
        self.hooks = Hooks()
        self.tracing = Tracing() if settings.traces else None

    @property
    def is_open(self) -> bool:
        """Whether connections are open in this process and on this loop; never true in a blocking call's own thread."""
        return not without_loop() and _place() in self._databases

    async def database(self) -> Database:
        """The database of this process and loop, which is opened when needed."""
        place = _place()
        if place not in self._databases:
            await self._open(timedelta(0), called=False)
        return self._databases[place]

    async def open(self, *, timeout: timedelta = timedelta(0)) -> None:
        """Connect: see `Penstock.open`."""
        await self._open(timeout, called=True)

    async def _open(self, timeout: timedelta, *, called: bool) -> None:
        place = _place()
        for ended in [place for place in self._opening if place[1].is_closed()]:
            # Each asyncio.run() has its own loop, which may end without a call of `close`.
            del self._opening[ended]
            self._databases.pop(ended, None)
        async with self._opening.setdefault(place, asyncio.Lock()):
            if place in self._databases:
                return
            database = Database(await self.start_server(), self.settings)
            until = time.monotonic() + timeout.total_seconds()
            try:
                await database.open()
                while True:
                    await database.answering(timedelta(seconds=max(until - time.monotonic(), 0)))
                    try:
                        await self._begin(database, place, called)
                        break
                    except DatabaseUnavailable as error:
                        # It answered, and was lost again, as when it is being started or stopped at this moment.
                        if time.monotonic() >= until:
                            raise
                        log.warning("database_awaited", error=error, left_s=round(until - time.monotonic()))
                        await asyncio.sleep(_LOOK_AGAIN_S)
            except BaseException:
                self._databases.pop(place, None)
                await database.close()
                raise

    async def _begin(self, database: Database, place: _Place, called: bool) -> None:
        """Check the schema (embedded: migrate it), and declare."""
        if self.settings.database_url is None:
            await migrate.migrate(database)
        else:
            await migrate.check(database)
        self._databases[place] = database
        await self._opened(called)

    async def close(self) -> None:
        """Close the connections of this loop, and with the last ones leave the embedded server."""
        place = _place()
        self._opening.pop(place, None)
        database = self._databases.pop(place, None)
        if database is not None:
            await database.close()
        if any(process == place[0] and not loop.is_closed() for process, loop in self._databases):
            return
        server = self._servers.pop(place[0], None)
        if server is not None:
            await asyncio.to_thread(server.stop)

    async def start_server(self) -> str:
        """Return the URL of the database, and start the embedded server when no URL is configured."""
        if self.settings.database_url is not None:
            return self.settings.database_url.get_secret_value()
        server = self._servers.setdefault(os.getpid(), EmbeddedServer(self.settings.data_dir))
        return await asyncio.to_thread(server.start)

    def held_url(self) -> str:
        """The URL of the database. Without a configured one, the embedded server runs until this process ends."""
        if self.settings.database_url is not None:
            return self.settings.database_url.get_secret_value()
        return self._held.setdefault(os.getpid(), EmbeddedServer(self.settings.data_dir)).start()

    async def migrate(self, *, timeout: timedelta = timedelta(0)) -> Migrated:
        """Bring the schema to this version."""
        async with self.unchecked() as database:
            await database.answering(timeout)
            return await migrate.migrate(database)

    async def plan_migration(self) -> MigrationPlan:
        """What a migration would change."""
        async with self.unchecked() as database:
            return await migrate.plan(database)

    @asynccontextmanager
    async def unchecked(self) -> AsyncIterator[Database]:
        """A database of its own, whose schema may be missing or of another version, and which may not answer."""
        database = Database(await self.start_server(), self.settings)
        await database.open()
        try:
            yield database
        finally:
            await database.close()


class Declarations:
    """Base of the declarations of all capabilities, with the context that declared objects share."""

    def __init__(self, context: Context) -> None:
        self.context = context
