"""What is to go wrong in a worker process, for tests that have to see it: each name takes one guarantee out of the worker."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.consuming.consumer import Consumer
from penstock.ownership.member import Member
from penstock.worker.keyed import KeyedClaimer
from penstock.worker.runner import Runner


def deaf() -> None:
    """What was lost runs on: the worker does not stop what belongs to others now."""
    Runner.abandon = lambda self, lost: []  # type: ignore[method-assign]


def unfenced_member() -> None:
    """A member that cannot reach the database for long takes its slots for its own all the same."""

    async def never(self: Any) -> None:
        await asyncio.Event().wait()

    Member._watch_fence = never  # type: ignore[method-assign]
    Member.owned = property(lambda self: self._state.owned)  # type: ignore[method-assign, assignment]
    Member.may_work = lambda self, slot: self._state.holds(slot)  # type: ignore[method-assign]


def revocation_ignored() -> None:
    """A slot that is to go to another member is given up at once, and what runs on it runs on."""

    async def at_once(self: Any, slot: int, epoch: int) -> None:
        return

    KeyedClaimer.revoke = at_once  # type: ignore[method-assign]
    Consumer.revoke = at_once  # type: ignore[method-assign]


SABOTAGE = {each.__name__: each for each in (deaf, unfenced_member, revocation_ignored)}


def sabotage(name: str) -> None:
    """Take a guarantee out of this process."""
    SABOTAGE[name]()
