"""What is to go wrong in a worker process, for tests that have to see it: each name takes one guarantee out of the worker."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

from penstock.consuming.consumer import Consumer
from penstock.ownership.heartbeat import Heartbeat
from penstock.ownership.member import Member
from penstock.worker.keyed import KeyedClaimer
from penstock.worker.runner import Runner
from penstock.worker.worker import Worker


def deaf() -> None:
    """What was lost runs on: the worker does not stop what belongs to others now, and reports what came of it."""
    cancel = Runner.cancel

    def unless_lost(self: Runner, id: UUID, reason: str = "cancelled") -> None:
        if reason != "lost":
            cancel(self, id, reason)

    Runner.cancel = unless_lost  # type: ignore[method-assign]
    Runner.abandon = lambda self, lost: []  # type: ignore[method-assign]


def unfenced_start() -> None:
    """A worker starts what it had claimed for its queues, however long it was away."""
    Worker._may_start = lambda self: True  # type: ignore[method-assign]


def heartbeat_of_the_loop() -> None:
    """There is no heartbeat beside the loop: a handler that blocks it makes the worker fall silent."""
    Heartbeat.keep = lambda self, kept: None  # type: ignore[method-assign]
    Heartbeat.leave = lambda self, kept: None  # type: ignore[method-assign]


def unfenced_member() -> None:
    """A member that cannot reach the database for long takes its slots for its own all the same."""

    async def never(self: Any) -> None:
        await asyncio.Event().wait()

    Member._watch_fence = never  # type: ignore[method-assign]
    Member.owned = property(lambda self: self._state.owned)  # type: ignore[method-assign, assignment]
    Member.may_work = lambda self, slot: self._state.holds(slot)  # type: ignore[method-assign]


def revocation_ignored() -> None:
    """A slot that is to go to another member is given up at once, and what runs on it runs on."""

    async def at_once(self: Any, slot: int, epoch: int) -> bool:
        return True

    KeyedClaimer.revoke = at_once  # type: ignore[method-assign]
    Consumer.revoke = at_once  # type: ignore[method-assign]


SABOTAGE = {each.__name__: each for each in (deaf, unfenced_member, revocation_ignored, unfenced_start, heartbeat_of_the_loop)}


def sabotage(name: str) -> None:
    """Take a guarantee out of this process."""
    SABOTAGE[name]()
