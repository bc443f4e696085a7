"""Waiting for an event, with a limit."""

from __future__ import annotations

import asyncio


async def happens(event: asyncio.Event, within: float) -> bool:
    """Wait for an event, at most `within` seconds. Returns whether it happened.

    Not `asyncio.wait_for`: up to Python 3.11 that can swallow the cancellation of the task that waits.
    """
    try:
        async with asyncio.timeout(within):
            await event.wait()
    except TimeoutError:
        return False
    return True
