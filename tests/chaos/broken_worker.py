"""What is to go wrong in a worker process, for tests that have to see it: each name takes one guarantee out of the worker."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

from penstock.groups.heartbeat import Heartbeat
from penstock.groups.membership import Membership
from penstock.pools.key_source import KeySource
from penstock.streams.consumer.consumer import Consumer
from penstock.worker.executor import Executor
from penstock.worker.registration import Registration


def deaf() -> None:
    """What was lost runs on: the worker does not stop what belongs to others now, and reports what came of it."""
    cancel = Executor.cancel

    def unless_lost(self: Executor, id: UUID, reason: str = "cancelled") -> None:
        if reason != "lost":
            cancel(self, id, reason)

    Executor.cancel = unless_lost  # type: ignore[method-assign]
    Executor.abandon = lambda self, lost: []  # type: ignore[method-assign]


def unfenced_start() -> None:
    """A worker starts what it had claimed for its queues, however long it was away."""
    Registration.may_start = lambda self: True  # type: ignore[method-assign]


def heartbeat_of_the_loop() -> None:
    """There is no heartbeat beside the loop: a handler that blocks it makes the worker fall silent."""
    Heartbeat.keep = lambda self, kept: None  # type: ignore[method-assign]
    Heartbeat.leave = lambda self, kept: None  # type: ignore[method-assign]


def unfenced_member() -> None:
    """A member that cannot reach the database for long takes its slots for its own all the same."""

    async def never(self: Any) -> None:
        await asyncio.Event().wait()

    Membership._watch_fence = never  # type: ignore[method-assign]
    Membership.owned = property(lambda self: self._state.owned)  # type: ignore[method-assign, assignment]
    Membership.may_work = lambda self, slot: self._state.holds(slot)  # type: ignore[method-assign]


def revocation_ignored() -> None:
    """A slot that is to go to another member is given up at once, and what runs on it runs on."""

    async def at_once(self: Any, slot: int, epoch: int) -> bool:
        return True

    KeySource.revoke = at_once  # type: ignore[method-assign]
    Consumer.revoke = at_once  # type: ignore[method-assign]


SABOTAGE = {each.__name__: each for each in (deaf, unfenced_member, revocation_ignored, unfenced_start, heartbeat_of_the_loop)}


def sabotage(name: str) -> None:
    """Take a guarantee out of this process."""
    SABOTAGE[name]()
