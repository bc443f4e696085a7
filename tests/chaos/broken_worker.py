"""Sabotages of a worker process, which the chaos tests must detect: each name removes one guarantee from the worker."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any
from uuid import UUID

from penstock.groups.heartbeat import Heartbeat
from penstock.groups.membership import Membership
from penstock.pools.key_source import KeySource
from penstock.streams.consumer.consumer import Consumer
from penstock.worker.executor import Executor
from penstock.worker.registration import Registration


def deaf() -> None:
    """Lost jobs continue: the worker does not stop jobs that belong to other workers now, and reports their results."""
    cancel = Executor.cancel

    def unless_lost(self: Executor, id: UUID, reason: str = "cancelled") -> None:
        if reason != "lost":
            cancel(self, id, reason)

    Executor.cancel = unless_lost  # type: ignore[method-assign]
    Executor.abandon = lambda self, lost: []  # type: ignore[method-assign]


def unfenced_start() -> None:
    """A worker starts the jobs that it had claimed for its queues, however long it was suspended."""
    Registration.may_start = lambda self: True  # type: ignore[method-assign]


def heartbeat_of_the_loop() -> None:
    """No heartbeat runs beside the event loop: a worker whose handler blocks the loop sends none. The loop is blocked often."""
    blocking: list[asyncio.TimerHandle] = []

    def block() -> None:
        time.sleep(4)
        wait()

    def wait() -> None:
        blocking[:] = [asyncio.get_running_loop().call_later(random.uniform(3, 6), block)]

    def without(self: Heartbeat, kept: object) -> None:
        if not blocking:
            wait()

    Heartbeat.keep = without  # type: ignore[method-assign]
    Heartbeat.leave = lambda self, kept: None  # type: ignore[method-assign]


def unfenced_member() -> None:
    """A member that has not reached the database for a long time still works on its slots."""

    async def never(self: Any) -> None:
        await asyncio.Event().wait()

    Membership._watch_fence = never  # type: ignore[method-assign]
    Membership.owned = property(lambda self: self._state.owned)  # type: ignore[method-assign, assignment]
    Membership.may_work = lambda self, slot: self._state.holds(slot)  # type: ignore[method-assign]


def revocation_ignored() -> None:
    """A revoked slot is released at once, without draining; its running jobs continue."""

    async def at_once(self: Any, slot: int, epoch: int) -> bool:
        return True

    KeySource.revoke = at_once  # type: ignore[method-assign]
    Consumer.revoke = at_once  # type: ignore[method-assign]


SABOTAGE = {each.__name__: each for each in (deaf, unfenced_member, revocation_ignored, unfenced_start, heartbeat_of_the_loop)}


def sabotage(name: str) -> None:
    """Remove a guarantee from this process."""
    SABOTAGE[name]()
