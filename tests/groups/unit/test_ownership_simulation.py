"""The ownership protocol under bad weather, in virtual time; and sabotaged variants of it, which must be caught.

`PENSTOCK_TEST_SEED` repeats a run; `PENSTOCK_SIMULATION_S` makes the runs longer than the default.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.groups.assignors import jump
from penstock.groups.state import Change, Held, MemberState
from tests.groups.ownership_model import Rules
from tests.groups.ownership_simulation import Settings, Violation, Weather, World

SECONDS = float(os.environ.get("PENSTOCK_SIMULATION_S", "1000"))


def seeds(count: int) -> list[int]:
    first = int(os.environ.get("PENSTOCK_TEST_SEED", secrets.randbits(32)))
    print(f"PENSTOCK_TEST_SEED={first}")
    return [first + n for n in range(count)]


@pytest.mark.parametrize(("members", "slots", "runs"), [(2, 4, 6), (3, 16, 6), (8, 64, 3), (40, 256, 1)])
def test_no_two_owners_can_commit_and_everything_comes_to_rest(members: int, slots: int, runs: int) -> None:
    steps = 0
    for seed in seeds(runs):
        steps += World(Settings(seed, members, slots, SECONDS)).run()
    print(f"{steps:,} steps")


def test_it_holds_for_an_assignor_that_moves_much() -> None:
    for seed in seeds(2):
        World(Settings(seed, 6, 64, SECONDS, assignor=jump, weather=Weather(leaves_per_s=0.1, joins_per_s=0.2))).run()


def test_it_holds_when_half_of_all_messages_are_lost() -> None:
    for seed in seeds(3):
        World(Settings(seed, 4, 16, SECONDS, weather=Weather(loss=0.5, very_late=0.1))).run()


@pytest.mark.parametrize("members", [1_000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_thousands_of_members_are_no_different(members: int) -> None:
    (seed,) = seeds(1)
    weather = Weather(crashes_per_s=0.3, pauses_per_s=0.3, leaves_per_s=0.2, joins_per_s=0.3)
    steps = World(Settings(seed, members, 256, 10.0, weather=weather, write_every_s=20.0, rest_s=70.0)).run()
    print(f"{steps:,} steps")


class WithoutFence(MemberState):
    """Never stops by itself."""

    def __init__(self) -> None:
        super().__init__(margin=-100.0)


class Forgetful(MemberState):
    """Works again on a slot whose release may be under way."""

    def answered(self, beat, sent_at, now):  # type: ignore[no-untyped-def]
        again = [Change("gained", slot, epoch) for slot, epoch in self._releasing.items() if beat.owned.get(slot) == epoch]
        self._held.update((change.slot, Held(change.epoch)) for change in again)
        self._releasing.clear()
        return again + super().answered(beat, sent_at, now)


def sabotaged(settings: Settings) -> dict[str, Settings]:
    return {
        "no epoch check": replace(settings, rules=Rules(check_epoch=False)),
        "no check of the session": replace(settings, rules=Rules(check_session=False)),
        "taken before it was released": replace(settings, rules=Rules(wait_for_release=False)),
        "released before it was drained": replace(settings, release_before_drain=True),
        "no fence": replace(settings, state=WithoutFence),
        "a release forgotten": replace(settings, state=Forgetful),
    }


# Bad enough for the rarest accident: a late release of a slot that came back in the meantime and is given away again.
TEMPEST = Weather(loss=0.0, very_late=0.3, crashes_per_s=0.1, pauses_per_s=0.05, leaves_per_s=1.5, joins_per_s=3.0)


# The seeds before these need seconds, and show nothing.
SHOWN_FROM = {"no check of the session": 30, "no fence": 15}


@pytest.mark.parametrize("name", sabotaged(Settings(0)))
def test_sabotage_is_caught(name: str) -> None:
    for seed in range(SHOWN_FROM.get(name, 0), 200):
        settings = Settings(seed, 4, 64, 300.0, weather=TEMPEST)
        try:
            World(sabotaged(settings)[name]).run()
        except Violation:
            return
    pytest.fail(f"{name} went unnoticed")


def test_what_catches_sabotage_finds_nothing_in_the_real_protocol() -> None:
    for seed in seeds(8):
        World(Settings(seed, 4, 64, 300.0, weather=TEMPEST)).run()


def test_a_run_is_repeated_exactly_by_its_seed() -> None:
    run: Callable[[], int] = World(Settings(7, 5, 16, 100.0)).run
    assert run() == World(Settings(7, 5, 16, 100.0)).run()
