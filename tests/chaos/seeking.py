"""Looking for an expected violation: in a run that ends as soon as its checkers find it, and in one run after the other."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import pytest

from penstock import PenstockError

T = TypeVar("T")
RUNS = 16
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


async def found_out(expected: str, folder: Path, run: Callable[[Path], Awaitable[Sequence[str]]]) -> None:
    """Run with a guarantee removed until the checkers name the promise that is broken; fail when no run does.

    A run arranges the situation in which the guarantee decides. Where only chance can bring it about, or a machine that is busy
    with other things can prevent it, the next run has another chance.

    Args:
        expected: A regular expression for the violation.
        folder: Folder for the folders of the runs.
        run: A run, on a database of its own and with a folder of its own. Returns its violations.
    """
    others: list[str] = []
    for number in range(RUNS):
        own = folder / str(number)
        own.mkdir()
        violations = await run(own)
        if found := [each for each in violations if re.match(expected, each)]:
            print(f"run {number + 1}: {len(found)} violations, such as {found[0]}")
            return
        others += violations
    pytest.fail(f"no run of {RUNS} broke {expected}; found: {others[:5]}")


def end_if_cancelled() -> None:
    """Raise the cancellation of the current task. Loops that continue after errors call this: an error may have replaced it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
