"""Pools through a server: `client.pool("fibonacci")` has the methods of a declared `Pool`.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Unpack

from penstock.client import pool_calls as calls
from penstock.client.call import Call, Send
from penstock.jobs.models import Enqueued, KeyedJobOptions, NewJob
from penstock.pools.models import KeyedJob, KeyState, PausedKey, PoolDetails, PoolMember, QuarantinedKey, StandingState


class Pool:
    """A pool on the server. Made by `Client.pool`."""

    def __init__(self, name: str, send: Send) -> None:
        self.name = name
        self._send = send

    def details(self) -> PoolDetails:
        """The pool: its options, slots, jobs and standing jobs. Raises `NotFound`."""
        return self._send(calls.details(self.name))

    def change(self, **options: Any) -> PoolDetails:
        """Change slots (more than now), on_retry, key_concurrency, key_rate_limit, key_rate_period, ... Raises `Conflict`."""
        return self._send(calls.change(self.name, options))

    def enqueue(self, key: str, data: Any = None, **options: Unpack[KeyedJobOptions]) -> Enqueued:
        """Enqueue one job behind the others of its key. See `Pool.enqueue`."""
        return self._send(calls.enqueue(self.name, NewJob(data, key=key, **options)))

    def workers(self) -> list[PoolMember]:
        """The workers, oldest first, with their slots; last, without an id, the slots without an owner."""
        return self._send(calls.workers(self.name))

    def drain(self, worker: str) -> PoolMember:
        """Move a worker out: it stays in the pool, without slots. Raises `NotFound`."""
        return self._send(calls.drain(self.name, worker, "drain"))

    def undrain(self, worker: str) -> PoolMember:
        """Let a drained worker take part again. Raises `NotFound`."""
        return self._send(calls.drain(self.name, worker, "undrain"))

    def resize(self, slots: int) -> None:
        """Give the live pool more slots. Raises `Conflict` for fewer than it has."""
        self.change(slots=slots)

    def state(self, key: str) -> KeyState:
        """What is known of a key: its owner, what runs, what waits and for what, since when it is paused or quarantined."""
        return self._send(calls.state(self.name, key))

    def pause_key(self, key: str) -> datetime:
        """Pause a key. Returns since when it is paused. See `Pool.pause_key`."""
        return self._send(calls.pause_key(self.name, key))

    def resume_key(self, key: str) -> bool:
        """End the pause of a key. Returns False when it was not paused."""
        was_paused = self.state(key).paused_at is not None
        self._send(calls.resume_key(self.name, key))
        return was_paused

    def paused_keys(self, *, after: str | None = None, limit: int = 100) -> list[PausedKey]:
        """The paused keys, from `after` on."""
        return self._send(calls.paused(self.name, after, limit))

    def quarantined_keys(self, *, after: str | None = None, limit: int = 100) -> list[QuarantinedKey]:
        """Keys for which the pool's rule fails, from `after` on: their jobs wait."""
        return self._send(calls.quarantined(self.name, after, limit))

    def release_key(self, key: str) -> KeyState:
        """Have the pool's rule asked again about a quarantined key. Raises `NotFound`."""
        return self._send(calls.release(self.name, key))

    def weights(self) -> dict[str, int]:
        """The keys that have a weight."""
        return self._send(calls.weights(self.name))

    def set_weight(self, key: str, weight: int) -> None:
        """How many jobs a key gets in each of its turns, 1 to 1,000."""
        self._send(calls.set_weight(self.name, key, weight))

    def start(self, key: str, data: Any = None, *, replace: bool = False) -> str:
        """Start the standing job of a key: starting, unchanged or replaced. Raises `Conflict`."""
        return self._send(calls.start(self.name, key, data, replace))

    def stop(self, key: str) -> bool:
        """Stop the standing job of a key. False when there was none."""
        return self._send(calls.stop(self.name, key))

    def notify(self, key: str, message: Any) -> None:
        """Send a message to the standing job of a key. Raises `NotFound`."""
        self._send(calls.notify(self.name, key, message))

    def reconcile(self, wanted: Mapping[str, Any]) -> tuple[int, int, int]:
        """Make the standing jobs equal to a wanted set. Returns how many were started, replaced, stopped."""
        return self._send(calls.reconcile(self.name, wanted))

    def standing_jobs(self) -> list[StandingState]:
        """All standing jobs, and where they run."""
        found: list[StandingState] = []
        page: Call[calls.Page] | None = calls.standing(self.name)
        while page is not None:
            jobs, page = self._send(page)
            found += jobs
        return found

    def list(self, *, key: str | None = None, after: str | None = None, limit: int = 100) -> list[KeyedJob]:
        """The jobs that wait or run, behind the cursor `after`. See `Pool.list`."""
        return self._send(calls.jobs(self.name, key, after, limit))
