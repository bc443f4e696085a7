"""Connections to PostgreSQL: a small pool, and retries when a connection is lost.

asyncpg is the driver of all calls. The pool does not reset connections between uses, since no statement leaves state behind. A
call is therefore one round trip, and works through PgBouncer in transaction mode. The first connection of a process finds out
what answers at the URL: a server, and of which version, or a pooler; `penstock.postgres.pinned` says what depends on that.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import asyncpg

from penstock.core import measuring
from penstock.core.lending import Lending, borrower
from penstock.core.logs import get_logger
from penstock.core.spending import spent_here
from penstock.errors import Conflict, DatabaseUnavailable, InvalidInput, PenstockError, SchemaMismatch
from penstock.postgres import credentials
from penstock.postgres.counting import counted
from penstock.postgres.pinned import ORDINARY, begin_statement, set_statements, settings_of
from penstock.postgres.translation import DRIVER_ERRORS, lost_connection, translate
from penstock.settings import Settings

log = get_logger("penstock.database")
T = TypeVar("T")
D = TypeVar("D", bound="Database")

# Failures that the call itself can also cause, so that it is not repeated for ever.
_PERHAPS_LASTING = {"23505", "57014", "53200"}
_MOST_REPEATS = 5
# The maximum number of ids that one call may look up, see `penstock.check_size` in functions/core/bounds.sql.
_AT_ONCE = 10_000
_FULL_PAUSE_S = 0.1
_URL_HINT = (
    "It looks like postgresql://user:password@host:5432/database. Signs such as / ? # @ % in a user or password are"
    " percent-encoded, as by urllib.parse.quote(password, safe='')."
)


def in_parts(wanted: Sequence[T]) -> Iterator[Sequence[T]]:
    """Divide ids to look up into parts of the size that one call allows."""
    return (wanted[start : start + _AT_ONCE] for start in range(0, len(wanted), _AT_ONCE))


class _Connection(asyncpg.Connection):
    """A pooled connection that is not reset between uses."""

    def get_reset_query(self) -> str:
        return ""


async def _connect(*args: Any, **options: Any) -> Any:
    try:
        return await asyncpg.connect(*args, **options)
    except (asyncpg.exceptions.ClientConfigurationError, OverflowError) as error:
        raise InvalidInput(f"the database URL is not valid: {error}", hint=_URL_HINT) from None
    except ValueError:
        # The text of the error has a part of the URL, which can be one of the password.
        raise InvalidInput("the database URL is not valid: it cannot be divided into its parts", hint=_URL_HINT) from None


@dataclass(frozen=True, slots=True)
class _Place:
    """What answers at a URL.

    Attributes:
        pooled: Whether it is a pooler, so that settings hold for one transaction.
        begins: Whether each call has to begin a transaction of its own, for its settings, or since its statement is not kept.
        server: Major version of the server.
    """

    pooled: bool
    begins: bool
    server: int


_UNKNOWN = _Place(pooled=True, begins=True, server=0)
# Errors at the start of a connection which show that a URL leads to something else than before: a server of an older version
# does not know a setting, and a pooler takes none.
_ELSEWHERE = (asyncpg.UndefinedObjectError, asyncpg.ProtocolViolationError)


async def _through_pooler(connection: Any) -> bool:
    """Whether another server process runs the statements than the one that accepted the connection, as with PgBouncer."""
    # The command tag is all that a statement that is not prepared returns.
    tag = await connection.execute(f"select where pg_backend_pid() = {connection.get_server_pid()}")
    return str(tag) != "SELECT 1"


class _Lent:
    """A connection of a pool. While the server has no place for one more, waits for a place, or until the pool has one free.

    Args:
        pool: Pool of connections.
        lending: How the handlers of the process share them.
        holds: Whether it is kept while code of a handler runs.
        timeout_s: Seconds after which it gives up.
    """

    __slots__ = ("_connection", "_holds", "_kind", "_lending", "_pool", "_timeout_s")

    def __init__(self, pool: asyncpg.Pool[Any], lending: Lending, holds: bool, timeout_s: float) -> None:
        self._pool = pool
        self._lending = lending
        self._holds = holds
        self._timeout_s = timeout_s
        self._connection: Any = None
        self._kind: str | None = None

    async def __aenter__(self) -> Any:
        if (kind := borrower()) is None:
            return await self._acquired()
        await self._lending.enter(kind, holds=self._holds, timeout_s=self._timeout_s)
        try:
            connection = await self._acquired()
        except BaseException:
            self._lending.leave(kind, holds=self._holds)
            raise
        self._kind = kind
        return connection

    async def _acquired(self) -> Any:
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                self._connection = await self._pool.acquire(timeout=self._timeout_s)
                return self._connection
            except asyncpg.TooManyConnectionsError as error:
                if time.monotonic() > until:
                    raise
                log.warning("server_full", error=error, advice="a smaller PENSTOCK_POOL_SIZE, or a larger max_connections")
                await asyncio.sleep(_FULL_PAUSE_S * random.uniform(0.5, 1.0))

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._pool.release(self._connection)
        finally:
            if self._kind is not None:
                self._lending.leave(self._kind, holds=self._holds)


class Transaction:
    """One open transaction. `Database.transaction` makes it.

    Args:
        connection: Its connection.
        idle_s: Seconds without a statement after which the server ends the transaction.
    """

    def __init__(self, connection: Any, idle_s: float) -> None:
        self._connection = connection
        self._idle_s = idle_s

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Keep the transaction open while the block, which makes no call to the database, takes long in a process that runs."""
        done = asyncio.Event()

        async def keep() -> None:
            # No cancellation ends it: that of a statement would abort the transaction.
            while not done.is_set():
                try:
                    await asyncio.wait_for(done.wait(), self._idle_s / 4)
                except TimeoutError:
                    await self._connection.execute("select")

        keeping = asyncio.create_task(keep(), name="penstock-open-transaction")
        try:
            yield
        finally:
            done.set()
            await keeping

    async def fetch(self, query: str, *args: Any) -> list[Any]:
        """Run one statement and return its rows."""
        return list(await self._connection.fetch(query, *args))

    async def fetchrow(self, query: str, *args: Any) -> Any:
        """The first row of a statement, or None."""
        return await self._connection.fetchrow(query, *args)

    async def copy(self, table: str, columns: Sequence[str], records: AsyncIterable[tuple[Any, ...]]) -> None:
        """Copy rows into a table of the schema, as they come."""
        await self._connection.copy_records_to_table(
            table, schema_name="penstock", columns=columns, records=records, timeout=None
        )


class Database:
    """A pool of connections to one database.

    Args:
        url: URL or DSN of libpq.
        settings: Settings: pool size, timeouts and whether to keep prepared statements.
        application: Name of the connections in `pg_stat_activity`.

    Attributes:
        declared: Objects that were declared in the database through these connections, by kind and name, to declare each once.
    """

    def __init__(self, url: str, settings: Settings, application: str = "penstock") -> None:
        self.url = url
        self._application = application
        self._settings = settings
        self.declared: dict[tuple[str, str], Any] = {}
        self._pool: asyncpg.Pool[Any] | None = None
        self._lending = Lending(settings.pool_size)
        # By URL.
        self._places: dict[str, _Place] = {}
        self._opening = asyncio.Lock()
        self.mismatch: SchemaMismatch | None = None
        """The last error that shows that the schema is not the one that the code expects."""
        self.schema_changed = asyncio.Event()
        """Set with `mismatch` and by the notification of a migration; `schema_watch` waits for it."""

    def beside(self, settings: Settings, application: str, kind: type[D]) -> D:
        """Another pool to the same database, not yet open, which knows of a pooler that this one has found.

        Args:
            settings: Settings of the other pool.
            application: Name of its connections in `pg_stat_activity`.
            kind: Its class.
        """
        other = kind(self.url, settings, application)
        other._places = self._places
        return other

    @property
    def data_dir(self) -> Path | None:
        """The folder of the embedded server of this database; None for a configured database."""
        return self._settings.data_dir if self._settings.database_url is None else None

    @property
    def pool_size(self) -> int:
        """The maximum number of connections in the pool."""
        return self._settings.pool_size

    @property
    def most_connections(self) -> int:
        """The maximum number of connections that a process opens: those of its pool, and the one that listens."""
        return self._settings.pool_size + 1

    async def open(self) -> None:
        """Open the pool. Raises `DatabaseUnavailable` when the database does not answer."""
        async with self._opening:
            if self._pool is not None:
                return
            self._pool = await asyncpg.create_pool(
                self.url,
                min_size=0,
                max_size=self._settings.pool_size,
                command_timeout=self._settings.command_timeout.total_seconds(),
                timeout=self._settings.connect_timeout.total_seconds(),
                connect=self._connect,
                connection_class=_Connection,
                **self._connection_options(self.url),
            )

    async def answering(self, timeout: timedelta) -> None:
        """Wait until the database answers. Raises `DatabaseUnavailable` after `timeout`; 0: return at once."""
        until = time.monotonic() + timeout.total_seconds()
        pause = 0.05
        while time.monotonic() < until:
            try:
                await self.fetch("select 1")
                return
            except DatabaseUnavailable as error:
                left = until - time.monotonic()
                if left < pause:
                    raise
                log.warning("database_awaited", error=error, left_s=round(left))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 2.0)

    async def close(self) -> None:
        """Close all connections; calls under way get five seconds to finish."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            await asyncio.wait_for(pool.close(), timeout=5)
        except DRIVER_ERRORS:
            pool.terminate()

    async def fetch(self, query: str, *args: Any, retry: bool = False, timeout: float | None = None) -> list[Any]:
        """Run one statement and return its rows.

        Args:
            query: SQL with parameters `$1`, `$2` and so on.
            args: Values of the parameters.
            retry: Whether to repeat the call, with growing pauses, while the database is unavailable. Only for calls that are
                safe to repeat.
            timeout: Time limit of this call in seconds; None: `command_timeout`.
        """

        async def once() -> list[Any]:
            async with self._acquire() as connection:
                if spent_here() is None and not self._places.get(self.url, _UNKNOWN).begins:
                    return list(await connection.fetch(query, *args, timeout=timeout))
                # A statement is parsed in one round trip and executed in another; the pooler may change the connection between.
                async with self._begun(connection):
                    return await counted(connection, query, *args, timeout=timeout)

        return await (self.retrying(once) if retry else self._translated(once))

    async def fetchrow(self, query: str, *args: Any, retry: bool = False) -> Any:
        """The first row of a statement, or None. See `fetch`."""
        rows = await self.fetch(query, *args, retry=retry)
        return rows[0] if rows else None

    async def fetchval(self, query: str, *args: Any, retry: bool = False) -> Any:
        """The first column of the first row of a statement, or None. See `fetch`."""
        row = await self.fetchrow(query, *args, retry=retry)
        return row[0] if row is not None else None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """A transaction for several statements, which commits at the end of the block and rolls back after an error.

        The server ends it when no statement comes for `dead_after`: a process that is suspended between two statements would
        hold the locks of the transaction, for which other workers wait. When it continues, it gets `DatabaseUnavailable`.
        """
        idle_s = self._settings.dead_after.total_seconds()
        limit = f"set local idle_in_transaction_session_timeout = {math.ceil(idle_s * 1000)}"
        async with self._translating(), self._acquire(holds=True) as connection, self._begun(connection, limit):
            yield Transaction(connection, idle_s)

    async def connect(self) -> asyncpg.Connection[Any]:
        """Open a connection outside the pool, which the caller closes."""

        async def once() -> asyncpg.Connection[Any]:
            url = self._settings.listen_url.get_secret_value() if self._settings.listen_url else self.url
            connection: asyncpg.Connection[Any] = await self._connect(
                url, timeout=self._settings.connect_timeout.total_seconds(), **self._connection_options(url)
            )
            return connection

        return await self._translated(once)

    async def settings_of_others(self, names: Sequence[str]) -> list[Any]:
        """Settings as other programs of this role have them: name, setting and source as in `pg_settings`."""

        async def once() -> list[Any]:
            options = {**self._connection_options(self.url), "statement_cache_size": 0}
            connection = await _connect(self.url, timeout=self._settings.connect_timeout.total_seconds(), **options)
            try:
                async with connection.transaction():
                    return list(
                        await connection.fetch("select name, setting, source from pg_settings where name = any ($1)", names)
                    )
            finally:
                connection.terminate()

        return await self._translated(once)

    async def pin(self, connection: asyncpg.Connection[Any]) -> None:
        """Give the transaction that a connection outside the pool has just begun the settings that are needed."""
        server = connection.get_server_version().major
        await connection.execute(f"set transaction isolation level read committed, read write; {set_statements(server, 'local')}")

    async def retrying(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat `call` while the database is unavailable, with pauses of 50 ms growing to 5 s, jittered.

        A failure that the call itself may cause (a duplicate key, a statement_timeout) is repeated a few times only.
        """
        pause = 0.05
        repeats = 0
        while True:
            try:
                return await self._translated(call)
            except (DatabaseUnavailable, Conflict) as error:
                sqlstate = getattr(error.__cause__, "sqlstate", None)
                if isinstance(error, Conflict) and sqlstate != "23505":
                    raise
                if sqlstate in _PERHAPS_LASTING:
                    repeats += 1
                    if repeats > _MOST_REPEATS:
                        raise
                log.warning("database_unavailable", error=error, retry_in_s=round(pause, 2))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 5.0)

    async def _translated(self, call: Callable[[], Awaitable[T]]) -> T:
        # As _translating, whose generator would cost each statement as much as all else here.
        try:
            return await call()
        except PenstockError:
            raise
        except Exception as error:
            translated = await self._translation_of(error)
            if translated is None:
                raise
            raise translated from error

    @asynccontextmanager
    async def _translating(self) -> AsyncIterator[None]:
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:
            translated = await self._translation_of(error)
            if translated is None:
                raise
            raise translated from error

    async def _translation_of(self, error: Exception) -> PenstockError | None:
        if lost_connection(error) and self._pool is not None:
            # The idle connections were probably lost too: the next call gets a new one.
            await self._pool.expire_connections()
        translated = translate(error)
        if translated is not None:
            self._note(translated)
        return translated

    def _note(self, error: PenstockError) -> None:
        if measuring.meter is not None:
            measuring.meter.failed(error)
        if isinstance(error, SchemaMismatch):
            self.mismatch = error
            self.schema_changed.set()

    @asynccontextmanager
    async def _begun(self, connection: Any, *settings: str, read_only: bool = False) -> AsyncIterator[None]:
        """A transaction with the settings that are needed, begun in one round trip.

        Args:
            connection: Connection of the pool.
            settings: Further statements with which it begins.
            read_only: Whether it cannot write.
        """
        place = self._places.get(self.url, _UNKNOWN)
        pins = (set_statements(place.server, "local"),) if place.pooled else ()
        try:
            await connection.execute("; ".join((begin_statement(read_only=read_only), *pins, *settings)))
            yield
        except BaseException:
            if not connection.is_closed() and connection.is_in_transaction():
                # What happened in the transaction says more than that its connection is lost too.
                with suppress(*DRIVER_ERRORS):
                    await connection.execute("rollback")
            raise
        await connection.execute("commit")

    def _acquire(self, *, holds: bool = False) -> _Lent:
        if self._pool is None:
            raise DatabaseUnavailable("the database connection is closed", hint="Open the app first: async with app:")
        return _Lent(self._pool, self._lending, holds, self._settings.command_timeout.total_seconds())

    def _connection_options(self, url: str) -> dict[str, Any]:
        options: dict[str, Any] = {"server_settings": {"application_name": self._application}}
        if (password := credentials.source(self._settings)) is not None and not credentials.has_password(url):
            options["password"] = partial(credentials.ask, password)
        if self._settings.statement_cache is False:
            options["statement_cache_size"] = 0
        return options

    async def _connect(self, *args: Any, **options: Any) -> Any:
        """Connect to the URL in `args`, with the settings that are pinned; without prepared statements through a pooler."""
        url = args[0]
        if (place := self._places.get(url)) is not None:
            try:
                return await _connect(*args, **self._suited(place, options))
            except _ELSEWHERE as error:
                log.info("server_changed", error=error)
        connection = await _connect(*args, **options)
        try:
            place = await self._found(connection)
            if not place.pooled:
                await connection.execute(set_statements(place.server, "session"))
        except BaseException:
            connection.terminate()
            raise
        if place.pooled and url not in self._places and self._settings.statement_cache is None:
            log.warning(
                "pooler_found",
                going_on="without prepared statements",
                setting="PENSTOCK_STATEMENT_CACHE: true if the pooler keeps them, false if not",
                notifications="through PENSTOCK_LISTEN_URL" if self._settings.listen_url else "none: set PENSTOCK_LISTEN_URL",
            )
        self._places[url] = place
        if not place.pooled or self._settings.statement_cache is not None:
            return connection
        await connection.close()
        return await _connect(*args, **self._suited(place, options))

    async def _found(self, connection: Any) -> _Place:
        """What a connection leads to that has the settings that the server gives to everybody."""
        server = connection.get_server_version().major
        if not await _through_pooler(connection):
            return _Place(pooled=False, begins=False, server=server)
        if self._settings.statement_cache is not True:
            return _Place(pooled=True, begins=True, server=server)
        # The pooler keeps statements, so a call is one round trip, as long as it needs no settings of its own.
        return _Place(pooled=True, begins=await connection.execute(ORDINARY) != "SELECT 1", server=server)

    def _suited(self, place: _Place, options: dict[str, Any]) -> dict[str, Any]:
        """The options of a connection to a place."""
        if not place.pooled:
            return {**options, "server_settings": {**settings_of(place.server), **options["server_settings"]}}
        return options if self._settings.statement_cache is not None else {**options, "statement_cache_size": 0}
