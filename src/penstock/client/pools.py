"""Pools through a server: `client.pool("fibonacci")` has the methods of a declared `Pool`, for asyncio or for threads."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar
from uuid import UUID

from penstock.client import pool_calls as calls
from penstock.client.calls import Call
from penstock.client.pool_calls import KeyPlace, PoolState, QuarantinedKey, StandingPlace
from penstock.job import Enqueued
from penstock.pool_workers import PoolMember

T = TypeVar("T")


class AsyncSends(Protocol):
    """What sends calls."""

    async def __call__(self, call: Call[T]) -> T:
        """Send it, and read the answer."""


class Sends(Protocol):
    """What sends calls and blocks."""

    def __call__(self, call: Call[T]) -> T:
        """Send it, and read the answer."""


class AsyncPoolClient:
    """A pool, for asyncio. Made by `AsyncClient.pool`."""

    def __init__(self, name: str, send: AsyncSends) -> None:
        self.name = name
        self._send = send

    async def details(self) -> PoolState:
        """The pool: its options, slots, jobs and standing jobs. Raises `NotFound`."""
        return await self._send(calls.details(self.name))

    async def change(self, **options: Any) -> PoolState:
        """Change slots (more than now), on_retry, key_concurrency, key_rate_limit, key_rate_period. Raises `Conflict`."""
        return await self._send(calls.change(self.name, options))

    async def enqueue(
        self, key: str, data: Any = None, *, id: UUID | str | None = None, run_after: datetime | timedelta | None = None,
        expires_at: datetime | timedelta | None = None, unique: str | None = None
    ) -> Enqueued:  # fmt: skip
        """Enqueue one job behind the others of its key. See `Pool.enqueue`."""
        return await self._send(calls.enqueue(self.name, key, data, id, run_after, expires_at, unique))

    async def workers(self) -> list[PoolMember]:
        """The workers, oldest first, with their slots; last, without an id, the slots that nobody has."""
        return await self._send(calls.workers(self.name))

    async def drain(self, worker: str) -> PoolMember:
        """Move a worker out: it stays in the pool, without slots. Raises `NotFound`."""
        return await self._send(calls.drain(self.name, worker, "drain"))

    async def undrain(self, worker: str) -> PoolMember:
        """Let a drained worker take part again. Raises `NotFound`."""
        return await self._send(calls.drain(self.name, worker, "undrain"))

    async def key(self, key: str) -> KeyPlace:
        """Where a key is, and what waits for it."""
        return await self._send(calls.key_place(self.name, key))

    async def quarantined(self, after: str | None = None, limit: int = 100) -> list[QuarantinedKey]:
        """Keys for which the pool's rule fails, from `after` on: their jobs wait."""
        return await self._send(calls.quarantined(self.name, after, limit))

    async def release(self, key: str) -> KeyPlace:
        """Have the pool's rule asked again about a quarantined key. Raises `NotFound`."""
        return await self._send(calls.release(self.name, key))

    async def weights(self) -> dict[str, int]:
        """The keys that have a weight."""
        return await self._send(calls.weights(self.name))

    async def set_weight(self, key: str, weight: int) -> None:
        """How many jobs a key gets in each of its turns, 1 to 1,000."""
        await self._send(calls.set_weight(self.name, key, weight))

    async def start(self, key: str, data: Any = None, *, replace: bool = False) -> str:
        """Start the standing job of a key: starting, unchanged or replaced. Raises `Conflict`."""
        return await self._send(calls.start(self.name, key, data, replace))

    async def stop(self, key: str) -> bool:
        """Stop the standing job of a key. False when there was none."""
        return await self._send(calls.stop(self.name, key))

    async def notify(self, key: str, message: Any) -> None:
        """Send a message to the standing job of a key. Raises `NotFound`."""
        await self._send(calls.notify(self.name, key, message))

    async def reconcile(self, wanted: Mapping[str, Any]) -> tuple[int, int, int]:
        """Make the standing jobs equal to a wanted set. Returns how many were started, replaced, stopped."""
        return await self._send(calls.reconcile(self.name, wanted))

    async def standing(self) -> list[StandingPlace]:
        """All standing jobs, and where they run."""
        found: list[StandingPlace] = []
        page: Call[calls.Page] | None = calls.standing(self.name)
        while page is not None:
            jobs, page = await self._send(page)
            found += jobs
        return found


class PoolClient:
    """A pool, for threads: every method of `AsyncPoolClient`, without `await`. Made by `Client.pool`."""

    def __init__(self, name: str, send: Sends) -> None:
        self.name = name
        self._send = send

    def details(self) -> PoolState:
        """See `AsyncPoolClient.details`."""
        return self._send(calls.details(self.name))

    def change(self, **options: Any) -> PoolState:
        """See `AsyncPoolClient.change`."""
        return self._send(calls.change(self.name, options))

    def enqueue(
        self, key: str, data: Any = None, *, id: UUID | str | None = None, run_after: datetime | timedelta | None = None,
        expires_at: datetime | timedelta | None = None, unique: str | None = None
    ) -> Enqueued:  # fmt: skip
        """See `AsyncPoolClient.enqueue`."""
        return self._send(calls.enqueue(self.name, key, data, id, run_after, expires_at, unique))

    def workers(self) -> list[PoolMember]:
        """See `AsyncPoolClient.workers`."""
        return self._send(calls.workers(self.name))

    def drain(self, worker: str) -> PoolMember:
        """See `AsyncPoolClient.drain`."""
        return self._send(calls.drain(self.name, worker, "drain"))

    def undrain(self, worker: str) -> PoolMember:
        """See `AsyncPoolClient.undrain`."""
        return self._send(calls.drain(self.name, worker, "undrain"))

    def key(self, key: str) -> KeyPlace:
        """See `AsyncPoolClient.key`."""
        return self._send(calls.key_place(self.name, key))

    def quarantined(self, after: str | None = None, limit: int = 100) -> list[QuarantinedKey]:
        """See `AsyncPoolClient.quarantined`."""
        return self._send(calls.quarantined(self.name, after, limit))

    def release(self, key: str) -> KeyPlace:
        """See `AsyncPoolClient.release`."""
        return self._send(calls.release(self.name, key))

    def weights(self) -> dict[str, int]:
        """See `AsyncPoolClient.weights`."""
        return self._send(calls.weights(self.name))

    def set_weight(self, key: str, weight: int) -> None:
        """See `AsyncPoolClient.set_weight`."""
        self._send(calls.set_weight(self.name, key, weight))

    def start(self, key: str, data: Any = None, *, replace: bool = False) -> str:
        """See `AsyncPoolClient.start`."""
        return self._send(calls.start(self.name, key, data, replace))

    def stop(self, key: str) -> bool:
        """See `AsyncPoolClient.stop`."""
        return self._send(calls.stop(self.name, key))

    def notify(self, key: str, message: Any) -> None:
        """See `AsyncPoolClient.notify`."""
        self._send(calls.notify(self.name, key, message))

    def reconcile(self, wanted: Mapping[str, Any]) -> tuple[int, int, int]:
        """See `AsyncPoolClient.reconcile`."""
        return self._send(calls.reconcile(self.name, wanted))

    def standing(self) -> list[StandingPlace]:
        """See `AsyncPoolClient.standing`."""
        found: list[StandingPlace] = []
        page: Call[calls.Page] | None = calls.standing(self.name)
        while page is not None:
            jobs, page = self._send(page)
            found += jobs
        return found
