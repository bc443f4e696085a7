"""A run that ends as soon as its checkers find an expected violation."""

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
# Violations that every run has until it ends.
UNFINISHED = re.compile("were never (handled|written)|without an append|after the drain|never ran|P9:")


async def until_found(
    run: Coroutine[Any, Any, T], sought: str, look: Callable[[], Awaitable[Sequence[str]]], found: Callable[[list[str]], T]
) -> T:
    """Return the result of the run, or that of `found` when a check finds an expected violation earlier.

    Args:
        run: The run.
        sought: A regular expression for the expected violation; empty: none is expected.
        look: Checks the history so far.
        found: Makes the result of a run that ended early, from its violations.
    """
    if not sought:
        return await run
    running = asyncio.create_task(run)
    try:
        while not running.done():
            await asyncio.wait([running], timeout=_LOOK_EVERY_S)
            if running.done():
                break
            # A database that is away at this moment is no violation.
            with suppress(PenstockError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                violations = [each for each in await look() if not UNFINISHED.search(each)]
                if any(re.match(sought, each) for each in violations):
                    return found(violations)
        return running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def end_if_cancelled() -> None:
    """Raise the cancellation of the current task. Loops that continue after errors call this: an error may have replaced it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
