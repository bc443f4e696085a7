"""Whether a settlement of this process has ended jobs for which others wait. The maintenance then releases these."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from penstock.postgres.database import Database

_events: WeakKeyDictionary[Database, asyncio.Event] = WeakKeyDictionary()


def event_of(database: Database) -> asyncio.Event:
    """The event that is set by `tell`."""
    if (event := _events.get(database)) is None:
        event = _events[database] = asyncio.Event()
    return event


def tell(database: Database) -> None:
    """Say that there are ticks of workflows in the database."""
    event_of(database).set()
