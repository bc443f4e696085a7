"""Readings for which no caller waits longer than some seconds."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from penstock.core.bounded import Bounded
from penstock.errors import DatabaseUnavailable
from tests.waiting import eventually


async def test_a_reading_that_takes_longer_goes_on_and_the_next_caller_gets_it() -> None:
    readings = 0
    answer = asyncio.Event()

    async def read() -> int:
        nonlocal readings
        readings += 1
        while not answer.is_set():
            with suppress(asyncio.CancelledError):  # as a call whose cancellation waits for the server
                await answer.wait()
        return readings

    bounded = Bounded(read, 0.01)
    for failed in await asyncio.gather(bounded(), bounded(), return_exceptions=True):
        assert isinstance(failed, DatabaseUnavailable)
    with pytest.raises(DatabaseUnavailable, match=r"not answered for 0\.01 s"):
        await bounded()
    answer.set()

    async def answered() -> int | None:
        with suppress(DatabaseUnavailable):
            return await bounded()
        return None

    assert await eventually(answered, "the reading") == 1
    assert await eventually(answered, "a new reading") == 2


async def test_an_error_of_the_reading_reaches_all_who_wait_and_is_not_kept() -> None:
    answers = iter([ValueError("no"), None])

    async def read() -> str:
        await asyncio.sleep(0)
        if (error := next(answers)) is not None:
            raise error
        return "yes"

    bounded = Bounded(read, 60.0)
    failed = await asyncio.gather(bounded(), bounded(), return_exceptions=True)
    assert [str(error) for error in failed] == ["no", "no"]
    assert await bounded() == "yes"
