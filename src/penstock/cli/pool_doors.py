"""A pool as the commands see it, over the database or an HTTP server; both have the methods of `AsyncPoolClient`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import orjson

from penstock.app import Penstock
from penstock.cli.output import with_app
from penstock.errors import NotFound
from penstock.ownership import balance
from penstock.payload import dump_json
from penstock.pool_workers import PoolMember, workers_of
from penstock.postgres import ownership, pool_views, pools

if TYPE_CHECKING:
    from penstock.client import AsyncClient

T = TypeVar("T")
_PAGE = 1_000
_WORDS = ("data", "state", "error")


class PoolDoor(Protocol):
    """What the commands do with a pool."""

    async def create(self, slots: int, *, convert: bool) -> Any:
        """Create it, and return it."""

    async def details(self) -> Any:
        """Its options, slots, jobs and standing jobs. Raises `NotFound`."""

    async def resize(self, slots: int) -> Any:
        """Give it more slots. Raises `Conflict`."""

    async def workers(self) -> list[PoolMember]:
        """Its workers, oldest first."""

    async def drain(self, worker: str) -> PoolMember:
        """Move a worker out. Raises `NotFound`."""

    async def undrain(self, worker: str) -> PoolMember:
        """Let a drained worker take part again. Raises `NotFound`."""

    async def key(self, key: str) -> Any:
        """Where a key is, and what waits for it."""

    async def quarantined(self, after: str | None, limit: int) -> list[Any]:
        """Keys for which the pool's rule fails."""

    async def quarantine_of(self, key: str) -> str | None:
        """Why a key is quarantined; None when it is not."""

    async def release(self, key: str) -> Any:
        """Have the rule asked again about a quarantined key. Raises `NotFound`."""

    async def set_weight(self, key: str, weight: int) -> None:
        """How many jobs a key gets in each of its turns."""

    async def weights(self) -> dict[str, int]:
        """The keys that have a weight."""

    async def standing(self) -> list[Any]:
        """All standing jobs."""

    async def start(self, key: str, data: Any, *, replace: bool) -> str:
        """Start the standing job of a key."""

    async def stop(self, key: str) -> bool:
        """Stop the standing job of a key. False when there was none."""

    async def notify(self, key: str, message: Any) -> None:
        """Send a message to the standing job of a key. Raises `NotFound`."""


def with_pool(name: str, work: Callable[[PoolDoor], Awaitable[T]]) -> T:
    """Run `work` with a pool of the configured database, or of the configured server."""

    async def run(app: Any) -> T:
        return await work(_Direct(app, name) if isinstance(app, Penstock) else _Served(app, name))

    return with_app(run)


async def all_pools(app: Any) -> list[dict[str, Any]]:
    """All pools with what waits in them."""
    if isinstance(app, Penstock):
        jobs = {count.name: count for count in await app.counts()}
        found = [_row(pool, jobs[pool.name]) for pool in await pool_views.details(await app.database())]
        return found
    return [_row(pool, pool) for pool in await app.pools()]


def _row(pool: Any, counts: Any) -> dict[str, Any]:
    return {
        "name": pool.name,
        "workers": pool.workers,
        "slots": pool.slots,
        "moving": pool.moving_slots,
        "ready": counts.ready,
        "in_progress": counts.in_progress,
        "oldest_ready_s": counts.oldest_ready_s,
        "standing": pool.standing,
        "standing_running": pool.standing_running,
    }


def fields_of(value: Any) -> dict[str, Any]:
    """A record as an object; JSON text in it becomes what it says."""
    fields = asdict(value) if is_dataclass(value) and not isinstance(value, type) else dict(value)
    return fields | {
        name: orjson.loads(fields[name]) for name in _WORDS if isinstance(value, pool_views.StandingState) and fields.get(name)
    }


class _Direct:
    """A pool in the database."""

    def __init__(self, app: Penstock, name: str) -> None:
        self._app = app
        self._name = name

    async def create(self, slots: int, *, convert: bool) -> Any:
        database = await self._app.database()
        if convert:
            await pools.convert_to_pool(database, self._name, {"slots": slots})
        else:
            await pools.declare_pool(database, self._name, {"slots": slots}, {})
        return await self.details()

    async def details(self) -> Any:
        return await pool_views.require(await self._app.database(), self._name)

    async def resize(self, slots: int) -> Any:
        database = await self._app.database()
        await pools.resize(database, self._name, slots)
        await balance.rebalance(database, self._name, None)
        return await self.details()

    async def workers(self) -> list[PoolMember]:
        await self.details()
        return await workers_of(await self._app.database(), self._name)

    async def drain(self, worker: str) -> PoolMember:
        return await self._drained(worker, True)

    async def undrain(self, worker: str) -> PoolMember:
        return await self._drained(worker, False)

    async def _drained(self, worker: str, drain: bool) -> PoolMember:
        database = await self._app.database()
        await balance.drain(database, self._name, worker, None, drain=drain)
        return next(one for one in await workers_of(database, self._name) if one.id == worker)

    async def key(self, key: str) -> Any:
        return await pool_views.key_state(await self._app.database(), self._name, key)

    async def quarantined(self, after: str | None, limit: int) -> list[Any]:
        return list(await pool_views.quarantined_keys(await self._app.database(), self._name, after=after, limit=limit))

    async def quarantine_of(self, key: str) -> str | None:
        found = await pool_views.quarantined_keys(await self._app.database(), self._name, key=key)
        return found[0].error if found else None

    async def release(self, key: str) -> Any:
        await ownership.release_keys(await self._app.database(), self._name, key)

    async def set_weight(self, key: str, weight: int) -> None:
        await pools.set_weight(await self._app.database(), self._name, key, weight)

    async def weights(self) -> dict[str, int]:
        return await pool_views.weights(await self._app.database(), self._name)

    async def standing(self) -> list[Any]:
        database = await self._app.database()
        found: list[pool_views.StandingState] = []
        while True:
            page = await pool_views.standing_jobs(database, self._name, after=found[-1].key if found else None, limit=_PAGE)
            found += page
            if len(page) < _PAGE:
                return list(found)

    async def start(self, key: str, data: Any, *, replace: bool) -> str:
        return await pools.start_standing(await self._app.database(), self._name, key, dump_json(data, key), replace=replace)

    async def stop(self, key: str) -> bool:
        return await pools.stop_standing(await self._app.database(), self._name, key)

    async def notify(self, key: str, message: Any) -> None:
        await pools.notify_standing(await self._app.database(), self._name, key, dump_json(message, key))


class _Served:
    """A pool behind an HTTP server."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client = client
        self._name = name
        pool = client.pool(name)
        self.details = pool.details
        self.workers = pool.workers
        self.drain = pool.drain
        self.undrain = pool.undrain
        self.key = pool.key
        self.quarantined = pool.quarantined
        self.release = pool.release
        self.set_weight = pool.set_weight
        self.weights = pool.weights
        self.standing = pool.standing
        self.start = pool.start
        self.stop = pool.stop
        self.notify = pool.notify
        self._change = pool.change

    async def create(self, slots: int, *, convert: bool) -> Any:
        if convert:
            return await self._client.create_pool(self._name, slots=slots, convert=True)
        try:
            # As over the database, where a pool is declared: one that is there is left as it is.
            return await self.details()
        except NotFound:
            return await self._client.create_pool(self._name, slots=slots)

    async def quarantine_of(self, key: str) -> str | None:
        page = await self.quarantined(None, _PAGE)
        while page:
            for bad in page:
                if bad.key == key:
                    return str(bad.error)
            page = await self.quarantined(page[-1].key, _PAGE) if len(page) == _PAGE else []
        return None

    async def resize(self, slots: int) -> Any:
        return await self._change(slots=slots)
