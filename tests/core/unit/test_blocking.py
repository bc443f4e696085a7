"""Blocking calls on the thread of their loop, which would wait for themselves."""

from __future__ import annotations

import pytest

from penstock import InvalidInput
from penstock.core.blocking import BackgroundLoop


async def nothing() -> None: ...


async def test_an_object_of_a_blocking_call_is_read_by_what_the_call_runs() -> None:
    loop = BackgroundLoop()

    async def run() -> int:
        return loop.call(lambda: 7)

    assert loop.run(run()) == 7
    loop.close(nothing())


async def test_a_blocking_call_within_a_blocking_call_is_refused_at_once() -> None:
    loop = BackgroundLoop()

    async def run() -> None:
        loop.run(nothing())

    with pytest.raises(InvalidInput, match="by what another blocking call runs"):
        loop.run(run())
    loop.close(nothing())
