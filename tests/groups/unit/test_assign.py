"""The assignors: balance, the fewest moves, and the jump hash against published values."""

from __future__ import annotations

import random
from collections import Counter
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import InvalidInput
from penstock.groups.assignors import Candidate, jump, jump_hash, key_hash, slot_of, sticky
from penstock.groups.membership import looks_every

Target = dict[int, str]


def members(count: int) -> list[Candidate]:
    return [Candidate(f"m{n}") for n in range(count)]


def moved(before: Target, after: Target) -> set[int]:
    return {slot for slot in after if before.get(slot) != after[slot]}


def fewest_moves(members: list[Candidate], slots: list[int], current: Target) -> int:
    """What any balanced assignment must move at least, from the numbers alone."""
    have = Counter(current[slot] for slot in slots if slot in current and current[slot] in {m.id for m in members})
    share, extra = divmod(len(slots), len(members))
    numbers = sorted((have[m.id] for m in members), reverse=True)
    kept = sum(min(number, share + (place < extra)) for place, number in enumerate(numbers))
    return len(slots) - kept


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Candidate], list[int], Target]:
    slots = list(range(draw(st.integers(0, 80))))
    group = members(draw(st.integers(1, 20)))
    names = st.sampled_from([m.id for m in group] + ["gone"])
    current = {slot: draw(names) for slot in slots if draw(st.booleans())}
    return group, slots, current


@given(situations())
def test_sticky_gives_every_slot_to_a_member_and_balances_within_one(
    situation: tuple[list[Candidate], list[int], Target],
) -> None:
    group, slots, current = situation
    target = sticky(group, slots, current)
    assert set(target) == set(slots)
    numbers = Counter(target.values())
    assert set(numbers) <= {m.id for m in group}
    have = [numbers[m.id] for m in group]
    assert max(have) - min(have) <= 1


@given(situations())
def test_sticky_moves_as_few_slots_as_balance_allows(situation: tuple[list[Candidate], list[int], Target]) -> None:
    group, slots, current = situation
    assert len(moved(current, sticky(group, slots, current))) == fewest_moves(group, slots, current)


@given(situations())
def test_sticky_is_deterministic_and_rests(situation: tuple[list[Candidate], list[int], Target]) -> None:
    group, slots, current = situation
    target = sticky(group, slots, current)
    assert sticky(group, slots, current) == target
    assert sticky(group, slots, target) == target
    assert sticky(group, list(reversed(slots)), dict(reversed(current.items()))) == target


@given(st.integers(0, 300), st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=30))
def test_a_join_moves_at_most_a_share_and_a_leave_the_leavers_alone(count: int, changes: list[tuple[bool, int]]) -> None:
    slots = list(range(count))
    group = members(1)
    number = 1
    target = sticky(group, slots, {})
    for joins, place in changes:
        before = target
        if joins or len(group) == 1:
            group = [*group, Candidate(f"m{number}")]
            number += 1
            target = sticky(group, slots, before)
            change = moved(before, target)
            assert len(change) <= ceil(len(slots) / len(group))
            assert {target[slot] for slot in change} <= {group[-1].id}
        else:
            leaver = group[place % len(group)]
            group = [m for m in group if m is not leaver]
            target = sticky(group, slots, before)
            assert moved(before, target) == {slot for slot, id in before.items() if id == leaver.id}


@pytest.mark.parametrize("assignor", [sticky, jump])
def test_without_members_no_slot_is_assigned(assignor: object) -> None:
    assert assignor([], [1, 2], {1: "gone"}) == {}  # type: ignore[operator]


def test_ten_thousand_members_share_what_there_is() -> None:
    group = members(10_000)
    target = sticky(group, list(range(256)), {})
    assert Counter(target.values()).most_common(1)[0][1] == 1
    assert sticky(group[1:], list(range(256)), target) == {**target, **{s: "m256" for s in target if target[s] == "m0"}}


@given(st.integers(2, 10_000), st.integers(1, 3_000), st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_groups_of_any_size_are_balanced_with_the_fewest_moves(count: int, slots: int, seed: int) -> None:
    group = members(count)
    chance = random.Random(seed)
    gone = chance.random()
    current = {slot: f"m{chance.randrange(int(count * (1 + gone)))}" for slot in range(slots) if chance.random() < 0.9}
    target = sticky(group, list(range(slots)), current)
    numbers = Counter(target.values())
    have = [numbers[member.id] for member in group]
    assert len(target) == slots
    assert max(have) - min(have) <= 1
    assert len(moved(current, target)) == fewest_moves(group, list(range(slots)), current)
    joined = sticky([*group, Candidate("joiner")], list(range(slots)), target)
    assert len(moved(target, joined)) <= ceil(slots / (count + 1))
    leaver = group[chance.randrange(count)]
    left = sticky([member for member in group if member is not leaver], list(range(slots)), target)
    assert moved(target, left) == {slot for slot, id in target.items() if id == leaver.id}


# Guava's Hashing.consistentHash and the authors' C++ agree on these (Guava, HashingTest), as does github.com/dgryski/go-jump.
@pytest.mark.parametrize(
    ("key", "buckets", "bucket"),
    [
        (10863919174838991, 11, 6),
        (2016238256797177309, 11, 3),
        (1673758223894951030, 11, 5),
        (2, 100001, 80343),
        (2201, 100001, 22152),
        (2202, 100001, 15018),
        (1, 1, 0),
        (42, 57, 43),
        (0xDEAD10CC, 1, 0),
        (0xDEAD10CC, 666, 361),
        (256, 1024, 520),
    ],
)
def test_jump_hash_gives_published_values(key: int, buckets: int, bucket: int) -> None:
    assert jump_hash(key, buckets) == bucket


def test_jump_hash_of_the_first_keys_into_a_hundred_buckets() -> None:
    golden = [0, 55, 62, 8, 45, 59, 86, 97, 82, 59, 73, 37, 17, 56, 86, 21, 90, 37, 38, 83]
    assert [jump_hash(key, 100) for key in range(20)] == golden


@given(st.text(min_size=1, max_size=40), st.integers(1, 500))
def test_a_key_moves_only_to_a_new_slot_when_slots_are_added(key: str, slots: int) -> None:
    before, after = slot_of(key, slots), slot_of(key, slots + 1)
    assert after in (before, slots)


def test_keys_spread_evenly() -> None:
    numbers = Counter(slot_of(f"tenant-{n}", 16) for n in range(16_000))
    assert len(numbers) == 16
    assert all(850 < number < 1150 for number in numbers.values())
    assert key_hash("tenant") == 0xE9DA86D351CF9A76


def test_jump_needs_a_bucket() -> None:
    with pytest.raises(InvalidInput, match="0 buckets"):
        jump_hash(1, 0)


@pytest.mark.parametrize("members", [1, 2, 50, 1_000])
def test_the_last_of_many_still_looks_for_the_dead_in_time(members: int) -> None:
    # Evicted after ten seconds of silence; their work runs again within fifteen.
    assert 10 + 1.3 * looks_every(members) < 15


def test_what_looks_cost_together_stays_bounded() -> None:
    # A look reads each member once.
    rows_a_second = [members / looks_every(members) * members for members in (1_000, 3_000, 10_000)]
    assert max(rows_a_second) <= 1_000_000 / 3 + 1
