"""A run that ends as soon as its checkers find what is sought."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import asyncpg

from penstock import PenstockError

T = TypeVar("T")
_LOOK_EVERY_S = 1.5
# True of each run while it goes on.
UNFINISHED = re.compile("were never (handled|written)|nobody appended|after the drain|never ran|P9:")


async def until_found(
    run: Coroutine[Any, Any, T], sought: str, look: Callable[[], Awaitable[Sequence[str]]], found: Callable[[list[str]], T]
) -> T:
    """What the run returns, or, when a look finds a violation that is sought before that, what `found` makes of it.

    Args:
        run: The run.
        sought: A regular expression; empty: nothing is sought.
        look: Checks what has happened so far.
        found: Makes the result of a run that ended early from its violations.
    """
    if not sought:
        return await run
    running = asyncio.create_task(run)
    try:
        while not running.done():
            await asyncio.wait([running], timeout=_LOOK_EVERY_S)
            if running.done():
                break
            # What is away at this moment says nothing.
            with suppress(PenstockError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                violations = [each for each in await look() if not UNFINISHED.search(each)]
                if any(re.match(sought, each) for each in violations):
                    return found(violations)
        return running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def end_if_cancelled() -> None:
    """For loops that go on after errors: one of a call that was cancelled may have taken the place of the cancellation."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
