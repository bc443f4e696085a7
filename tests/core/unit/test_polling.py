"""Polling in virtual time: how long a loop waits until it looks again."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import pytest

from penstock.core.polling import Polling

POLL_S = 1.0
QUIET_S = 0.02
LONGEST_PAUSE_S, SHORTEST_PAUSE_S = POLL_S, POLL_S * 0.7


class VirtualTime(selectors.SelectSelector):
    """A selector that waits for nothing: it moves a clock on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "the loop waits for ever"
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self.virtual = VirtualTime()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now


def run(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(test)


class Loop:
    """A loop whose looks find something when the test arranges it."""

    def __init__(self) -> None:
        self.clock = asyncio.get_running_loop().time
        self.polling = Polling(POLL_S, quiet_s=QUIET_S, clock=self.clock)
        self.announced_at: list[float] = []

    async def announce(self) -> None:
        self.announced_at.append(self.clock())

    async def rest(self, **known: float) -> float:
        """One look that found nothing. Returns the seconds until the next."""
        began = self.clock()
        self.polling.begin()
        await self.polling.rest(self.announce, **known)
        return self.clock() - began

    async def become_idle(self) -> int:
        """Look until idleness is announced. Returns how many looks it took."""
        before, looks = len(self.announced_at), 0
        while len(self.announced_at) == before:
            await self.rest()
            looks += 1
        return looks


def test_a_loop_that_found_nothing_looks_often_for_a_while_and_then_announces_that_it_is_idle() -> None:
    async def test() -> None:
        loop = Loop()
        loop.polling.found()
        assert 3 <= await loop.become_idle() <= 12
        assert QUIET_S <= loop.announced_at[0] <= 2 * QUIET_S

    run(test())


def test_an_idle_loop_looks_at_once_after_the_announcement_then_now_and_then_and_announces_itself_again() -> None:
    async def test() -> None:
        loop = Loop()
        await loop.become_idle()
        announced_at = loop.clock()
        waited = await loop.rest()
        assert SHORTEST_PAUSE_S <= waited <= LONGEST_PAUSE_S
        assert await loop.rest() == 0
        assert loop.announced_at == [announced_at, announced_at + waited]

    run(test())


def test_the_pauses_of_loops_differ() -> None:
    async def test() -> None:
        loop = Loop()
        pauses = []
        for _ in range(20):
            await loop.become_idle()
            pauses.append(await loop.rest())
        assert len(set(pauses)) == len(pauses)

    run(test())


def test_a_loop_that_is_woken_looks_at_once_and_stays_announced() -> None:
    async def test() -> None:
        loop = Loop()
        await loop.become_idle()
        asyncio.get_running_loop().call_later(0.1, loop.polling.wake)
        assert await loop.rest() == pytest.approx(0.1)
        assert await loop.rest() >= SHORTEST_PAUSE_S
        assert len(loop.announced_at) == 1

    run(test())


def test_a_loop_that_is_woken_for_nothing_again_and_again_announces_itself_in_time() -> None:
    async def test() -> None:
        loop = Loop()
        loop.polling = Polling(POLL_S, announce_every_s=10, clock=loop.clock)
        await loop.become_idle()
        while len(loop.announced_at) < 4:
            asyncio.get_running_loop().call_later(0.3, loop.polling.wake)
            await loop.rest()
        # The database keeps an announcement for 30 s.
        assert all(10 <= after - before <= 21 for before, after in pairwise(loop.announced_at))

    run(test())


def test_an_announcement_that_is_valid_for_a_while_is_not_repeated_at_each_look() -> None:
    async def test() -> None:
        loop = Loop()
        loop.polling = Polling(POLL_S, announce_every_s=10, clock=loop.clock)
        await loop.become_idle()
        looks = 0
        while loop.clock() < 60:
            await loop.rest()
            looks += 1
        assert len(loop.announced_at) <= 7
        assert looks <= 60 / SHORTEST_PAUSE_S + 7

    run(test())


def test_what_wakes_a_loop_during_a_look_is_not_missed() -> None:
    async def test() -> None:
        loop = Loop()
        await loop.become_idle()
        loop.polling.begin()
        loop.polling.wake()
        began = loop.clock()
        await loop.polling.rest(loop.announce)
        assert loop.clock() == began

    run(test())


@pytest.mark.parametrize(("due_in_s", "waited"), [(0.3, 0.3), (0.0, 0.002), (-1.0, 0.002)])
def test_a_loop_that_knows_when_there_is_something_waits_until_then(due_in_s: float, waited: float) -> None:
    async def test() -> None:
        loop = Loop()
        await loop.become_idle()
        assert await loop.rest(due_in_s=due_in_s) == pytest.approx(waited)
        assert await loop.rest(due_in_s=due_in_s) == pytest.approx(waited), "it is announced still"

    run(test())


def test_a_wait_that_is_far_off_or_limited_is_cut_short() -> None:
    async def test() -> None:
        loop = Loop()
        await loop.become_idle()
        assert await loop.rest(due_in_s=100.0) <= LONGEST_PAUSE_S
        await loop.become_idle()
        assert await loop.rest(at_most_s=0.2) == pytest.approx(0.2)

    run(test())


def test_a_changed_announcement_is_made_before_the_next_rest() -> None:
    async def test() -> None:
        loop = Loop()
        await loop.become_idle()
        loop.polling.announce_again()
        assert await loop.rest() == 0
        assert len(loop.announced_at) == 2

    run(test())


def test_failures_in_a_row_are_further_and_further_apart_and_no_further_than_polls() -> None:
    async def test() -> None:
        loop = Loop()

        async def back_off() -> float:
            began = loop.clock()
            await loop.polling.back_off()
            return loop.clock() - began

        pauses = [await back_off() for _ in range(40)]
        assert pauses[0] <= 0.05
        assert all(later > earlier for earlier, later in pairwise(pauses[:5]))
        assert max(pauses) <= LONGEST_PAUSE_S
        assert min(pauses[10:]) >= SHORTEST_PAUSE_S
        loop.polling.found()
        assert await back_off() <= 0.05

    run(test())


def test_an_announcement_that_fails_is_made_again() -> None:
    async def test() -> None:
        loop = Loop()

        async def fail() -> None:
            raise ConnectionError

        await asyncio.sleep(QUIET_S)
        with pytest.raises(ConnectionError):
            await loop.polling.rest(fail)
        await loop.become_idle()

    run(test())


def test_a_loop_may_look_soon_after_its_announcement_and_let_that_stand_for_some_polls() -> None:
    async def test() -> None:
        loop = Loop()
        loop.polling = Polling(POLL_S, first_pauses_s=(0.005, 0.05), announce_every_s=5.0, clock=loop.clock)
        await loop.become_idle()
        announced_at = loop.clock()
        assert [await loop.rest() for _ in range(2)] == [pytest.approx(0.005), pytest.approx(0.05)]
        while len(loop.announced_at) == 1:
            assert await loop.rest() <= LONGEST_PAUSE_S
        assert 5.0 <= loop.announced_at[1] - announced_at <= 5.0 + LONGEST_PAUSE_S
        assert await loop.rest() == pytest.approx(0.005)

    run(test())
