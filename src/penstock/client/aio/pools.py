"""Pools through a server: `client.pool("fibonacci")` has the methods of a declared `Pool`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Unpack

from penstock.client import pool_calls as calls
from penstock.client.call import AsyncSend, Call
from penstock.jobs.models import Enqueued, KeyedJobOptions, NewJob
from penstock.pools.models import KeyedJob, KeyState, PausedKey, PoolDetails, PoolMember, QuarantinedKey, StandingState


class AsyncPool:
    """A pool on the server. Made by `AsyncClient.pool`."""

    def __init__(self, name: str, send: AsyncSend) -> None:
        self.name = name
        self._send = send

    async def details(self) -> PoolDetails:
        """The pool: its options, slots, jobs and standing jobs. Raises `NotFound`."""
        return await self._send(calls.details(self.name))

    async def change(self, **options: Any) -> PoolDetails:
        """Change slots (more than now), on_retry, key_concurrency, key_rate_limit, key_rate_period, ... Raises `Conflict`."""
        return await self._send(calls.change(self.name, options))

    async def enqueue(self, key: str, data: Any = None, **options: Unpack[KeyedJobOptions]) -> Enqueued:
        """Enqueue one job behind the others of its key. See `Pool.enqueue`."""
        return await self._send(calls.enqueue(self.name, NewJob(data, key=key, **options)))

    async def workers(self) -> list[PoolMember]:
        """The workers, oldest first, with their slots; last, without an id, the slots without an owner."""
        return await self._send(calls.workers(self.name))

    async def drain(self, worker: str) -> PoolMember:
        """Move a worker out: it stays in the pool, without slots. Raises `NotFound`."""
        return await self._send(calls.drain(self.name, worker, "drain"))

    async def undrain(self, worker: str) -> PoolMember:
        """Let a drained worker take part again. Raises `NotFound`."""
        return await self._send(calls.drain(self.name, worker, "undrain"))

    async def resize(self, slots: int) -> None:
        """Give the live pool more slots. Raises `Conflict` for fewer than it has."""
        await self.change(slots=slots)

    async def state(self, key: str) -> KeyState:
        """What is known of a key: its owner, what runs, what waits and for what, since when it is paused or quarantined."""
        return await self._send(calls.state(self.name, key))

    async def pause_key(self, key: str) -> datetime:
        """Pause a key. Returns since when it is paused. See `Pool.pause_key`."""
        return await self._send(calls.pause_key(self.name, key))

    async def resume_key(self, key: str) -> bool:
        """End the pause of a key. Returns False when it was not paused."""
        was_paused = (await self.state(key)).paused_at is not None
        await self._send(calls.resume_key(self.name, key))
        return was_paused

    async def paused_keys(self, *, after: str | None = None, limit: int = 100) -> list[PausedKey]:
        """The paused keys, from `after` on."""
        return await self._send(calls.paused(self.name, after, limit))

    async def quarantined_keys(self, *, after: str | None = None, limit: int = 100) -> list[QuarantinedKey]:
        """Keys for which the pool's rule fails, from `after` on: their jobs wait."""
        return await self._send(calls.quarantined(self.name, after, limit))

    async def release_key(self, key: str) -> KeyState:
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

    async def standing_jobs(self) -> list[StandingState]:
        """All standing jobs, and where they run."""
        found: list[StandingState] = []
        page: Call[calls.Page] | None = calls.standing(self.name)
        while page is not None:
            jobs, page = await self._send(page)
            found += jobs
        return found

    # The last method, since behind it the word no longer means the class in this body.
    async def list(self, *, key: str | None = None, after: str | None = None, limit: int = 100) -> list[KeyedJob]:
        """The jobs that wait or run, behind the cursor `after`. See `Pool.list`."""
        return await self._send(calls.jobs(self.name, key, after, limit))
