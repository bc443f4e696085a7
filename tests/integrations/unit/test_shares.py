"""Places that names share: none takes all, none waits while its share is free."""

from __future__ import annotations

import asyncio
import random

import pytest

from penstock.integrations.rickover.shares import Shares


def test_one_that_takes_all_it_can_leaves_the_shares_of_the_others() -> None:
    shares = Shares(100)
    shares.divide(["a", "b"])
    while shares.free("a"):
        shares.take("a")
    assert shares.vacant == 25
    while shares.free("b"):
        shares.take("b")
    assert shares.vacant == 0


def test_one_alone_gets_all_and_many_get_one_each() -> None:
    shares = Shares(10)
    shares.divide(["a"])
    taken = 0
    while shares.free("a"):
        shares.take("a")
        taken += 1
    assert taken == 10
    shares.divide([f"n{number}" for number in range(50)] + ["a"])
    assert not shares.free("a")
    assert all(shares.free(f"n{number}") for number in range(50))


async def test_a_place_that_is_given_back_goes_to_the_next_and_turns_are_kept() -> None:
    shares = Shares(4)
    shares.divide(["a", "b"])
    got: list[str] = []

    async def want(name: str) -> None:
        await shares.wait(name)
        got.append(name)

    tasks = [asyncio.create_task(want("a")) for _ in range(6)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert got == ["a"] * 3
    tasks += [asyncio.create_task(want("b")) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert got == ["a", "a", "a", "b"]
    assert (shares.waiting("a"), shares.waiting("b")) == (3, 2)
    tasks[3].cancel()
    for name in ("a", "b", "a", "a", "b", "a", "a", "b", "b"):
        shares.give(name)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if len(got) == 8:
            break
    assert sorted(got) == ["a"] * 5 + ["b"] * 3
    await asyncio.gather(*tasks, return_exceptions=True)


def places_of(shares: Shares, name: str) -> int:
    """How many places a name can take, when the others hold none."""
    taken = 0
    while shares.free(name):
        shares.take(name)
        taken += 1
    for _ in range(taken):
        shares.give(name)
    return taken


@pytest.mark.parametrize("seed", range(20))
async def test_places_are_neither_lost_nor_made(seed: int) -> None:
    choice = random.Random(seed)
    places = choice.randint(1, 12)
    shares = Shares(places)
    names = [f"n{number}" for number in range(choice.randint(1, 4))]
    shares.divide(names)
    held: list[str] = []

    async def hold(name: str) -> None:
        await shares.wait(name)
        held.append(name)
        try:
            await asyncio.sleep(0)
        finally:
            held.remove(name)
            shares.give(name)

    tasks = [asyncio.create_task(hold(choice.choice(names))) for _ in range(100)]
    for _ in range(30):
        await asyncio.sleep(0)
        choice.choice(tasks).cancel()
        assert len(held) <= max(places, len(names) + places // 2), f"seed {seed}"
        if choice.random() < 0.2:
            shares.divide(names)
    async with asyncio.timeout(30):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not held
    assert shares.vacant == places and not any(map(shares.waiting, names)), f"seed {seed}"
    # Each name gets as many places as it would get of new ones.
    fresh = Shares(places)
    fresh.divide(names)
    for name in names:
        assert places_of(shares, name) == places_of(fresh, name), f"seed {seed}"
