"""How kinds of work share the connections of a process."""

from __future__ import annotations

import asyncio
import random

import pytest

from penstock.core.lending import Lending


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def asking(lending: Lending, kind: str, *, holds: bool = False) -> asyncio.Task[None]:
    return asyncio.create_task(lending.enter(kind, holds=holds, timeout_s=60))


async def test_handlers_leave_one_connection_to_the_process_and_loads_one_more_to_others() -> None:
    lending = Lending(4)
    loads = [asking(lending, "load", holds=True) for _ in range(3)]
    await turn()
    assert [load.done() for load in loads] == [True, True, False]
    others = [asking(lending, kind) for kind in ("other", "load")]
    await turn()
    assert [other.done() for other in others] == [True, False]
    lending.leave("other", holds=False)
    await turn()
    assert others[1].done() and not loads[2].done()
    lending.leave("load", holds=False)
    lending.leave("load", holds=True)
    await turn()
    assert loads[2].done()


@pytest.mark.parametrize(("size", "at_once", "held"), [(1, 1, 1), (2, 2, 1), (3, 2, 1), (4, 3, 2), (10, 9, 8)])
async def test_so_many_connections_are_lent(size: int, at_once: int, held: int) -> None:
    for holds, expected in ((False, at_once), (True, held)):
        lending = Lending(size)
        asked = [asking(lending, "one", holds=holds) for _ in range(size + 3)]
        await turn()
        assert sum(one.done() for one in asked) == expected
        for one in asked:
            one.cancel()


async def test_a_kind_of_work_waits_for_one_call_of_another_one() -> None:
    lending = Lending(2)
    many = [asking(lending, "many") for _ in range(100)]
    await turn()
    few = [asking(lending, kind) for kind in ("few", "fewer")]
    await turn()
    lending.leave("many", holds=False)
    lending.leave("many", holds=False)
    await turn()
    assert all(one.done() for one in few)
    assert sum(one.done() for one in many) == 2
    for one in many:
        one.cancel()


async def test_a_call_that_is_given_up_keeps_no_connection() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    lending = Lending(5)

    async def call(kind: str, holds: bool) -> None:
        await lending.enter(kind, holds=holds, timeout_s=chance.choice([0.0, 0.001, 60]))
        try:
            await asyncio.sleep(chance.random() / 500)
        finally:
            lending.leave(kind, holds=holds)

    calls = [asyncio.create_task(call(chance.choice("abc"), chance.random() < 0.3)) for _ in range(500)]
    for one in chance.sample(calls, 200):
        await asyncio.sleep(0)
        one.cancel()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(one) for one in ended} <= {type(None), asyncio.CancelledError, TimeoutError}
    again = [asking(lending, "all") for _ in range(4)]
    await turn()
    assert all(one.done() for one in again)
