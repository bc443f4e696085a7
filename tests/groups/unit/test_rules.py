"""Rules of applications for keys: what they answer, and that a key for which one fails harms no other."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.groups.assignors import Candidate
from penstock.groups.placement import Placed, place_keys

GROUP = [Candidate("old", {"clients": ["ada"]}), Candidate("young", {"clients": ["bob"]})]


async def test_a_rule_chooses_by_index_and_may_choose_no_worker() -> None:
    def connected(key: str, workers: Sequence[Candidate]) -> int | None:
        return next((n for n, worker in enumerate(workers) if key in worker.metadata["clients"]), None)

    assert await place_keys(connected, {0: "bob", 1: "ada", 2: "eve"}, GROUP) == Placed({0: "young", 1: "old"}, {})
    assert await place_keys(connected, {0: "bob"}, []) == Placed({}, {})


class Index:
    def __index__(self) -> int:
        return 1


async def test_a_place_may_be_any_integer() -> None:
    assert (await place_keys(lambda key, workers: Index(), {0: "a"}, GROUP)).target == {0: "young"}  # type: ignore[arg-type,return-value]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def fail(error: BaseException) -> Callable[[], Any]:
    def failing() -> Any:
        raise error

    return failing


async def coroutine() -> int:
    return 0


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda: -1, "assign returned -1 for 2 workers; the index must be from 0 to 1"),
        (lambda: 2, "assign returned 2 for 2 workers"),
        (lambda: "0", "assign returned '0'"),
        (lambda: 1.0, "assign returned 1.0"),
        (lambda: True, "assign returned True"),
        (coroutine, "assign returned <coroutine"),
        (fail(KeyError("ada")), "KeyError: 'ada'"),
        (fail(Unspeakable()), "Unspeakable (its text cannot be read"),
        (fail(SystemExit(3)), "SystemExit: 3"),
        (fail(KeyboardInterrupt()), "KeyboardInterrupt"),
        (fail(asyncio.CancelledError()), "CancelledError"),
        (fail(ValueError("\0\ud800")), "ValueError: \\0?"),
        (lambda: [][0], "IndexError"),
        (lambda: sys.exit("no"), "SystemExit: no"),
    ],
)
async def test_a_key_for_which_the_rule_fails_is_named_and_the_others_are_placed(answer: Callable[[], Any], error: str) -> None:
    placed = await place_keys(lambda key, workers: answer() if key == "bad" else 0, {0: "a", 1: "bad", 2: "b"}, GROUP)
    assert placed.target == {0: "old", 2: "old"}
    assert error in placed.errors.pop(1)
    assert placed.errors == {}


async def test_a_rule_that_hangs_for_some_keys_places_the_others_and_is_not_asked_again_meanwhile() -> None:
    end = threading.Event()
    asked: list[str] = []

    def rule(key: str, workers: Sequence[Candidate]) -> int:
        asked.append(key)
        if key.startswith("bad"):
            end.wait()
        return 0

    keys = {0: "a", 1: "bad", 2: "b", 3: "bad too", 4: "c"}
    for _ in range(3):
        placed = await place_keys(rule, keys, GROUP)
        assert placed.target == {0: "old", 2: "old", 4: "old"}
        assert set(placed.errors) == {1, 3}
    assert (asked.count("bad"), asked.count("bad too"), asked.count("c")) == (1, 1, 3)
    many = {n: f"bad{n}" for n in range(100)} | {100: "d"}
    assert len((await place_keys(rule, many, GROUP)).errors) == 101
    assert len(asked) < 15, "a thread for each key that hangs"
    end.set()
    while threading.active_count() > 1 and any(thread.name == "penstock-assign" for thread in threading.enumerate()):
        await asyncio.sleep(0.001)
    assert (await place_keys(rule, keys, GROUP)).errors == {}
