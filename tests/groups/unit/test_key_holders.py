"""Placement of slots that need keys of encryption."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.groups.assignors import Candidate, jump, sticky
from penstock.groups.key_holders import holders_of, place

KEYS = "abcd"


def test_slots_that_every_member_can_have_or_none_are_not_held() -> None:
    members = {"one": ("a", "b"), "two": ("a",)}
    assert holders_of({0: ("a",), 1: ("z",), 2: ()}, members) == {}
    assert holders_of({0: ("a",)}, {}) == {}


def test_the_latest_keys_count_when_no_member_has_all() -> None:
    members = {"one": ("a", "b"), "two": ("c",)}
    assert holders_of({0: ("b", "a"), 1: ("c", "a"), 2: ("a", "c"), 3: ("z", "c")}, members) == {
        frozenset({"one"}): [0, 2],
        frozenset({"two"}): [1, 3],
    }


@st.composite
def situations(
    draw: st.DrawFn,
) -> tuple[dict[str, tuple[str, ...]], dict[int, tuple[str, ...]], list[int], dict[int, str]]:
    members = {f"m{n}": tuple(draw(st.sets(st.sampled_from(KEYS)))) for n in range(draw(st.integers(1, 6)))}
    slots = list(range(draw(st.integers(0, 30))))
    needs = {slot: tuple(draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=2))) for slot in slots}
    current = {slot: draw(st.sampled_from(list(members))) for slot in slots}
    return members, needs, slots, current


@given(situations(), st.sampled_from([sticky, jump]), st.booleans())
def test_a_slot_goes_to_a_member_that_has_its_key_and_a_placement_rests(
    situation: tuple[dict[str, tuple[str, ...]], dict[int, tuple[str, ...]], list[int], dict[int, str]],
    assignor: object,
    keep: bool,
) -> None:
    members, needs, slots, current = situation
    candidates = [Candidate(id) for id in members]
    holders = holders_of(needs, members)
    target = place(assignor, candidates, slots, current, holders, keep=keep)  # type: ignore[arg-type]
    assert target.keys() == set(slots)
    for slot, needed in needs.items():
        if any(set(needed) <= set(keys) for keys in members.values()):
            assert set(needed) <= set(members[target[slot]])
        elif needed and any(needed[0] in keys for keys in members.values()):
            assert needed[0] in members[target[slot]]
    held = {slot for some in holders.values() for slot in some}
    if keep:
        assert all(target[slot] == current[slot] for slot in slots if slot not in held)
    elif assignor is sticky:
        shares = Counter(target[slot] for slot in slots if slot not in held)
        assert not slots or max(shares.values(), default=0) - min(shares[id] for id in members) <= 1
    assert place(assignor, candidates, slots, target, holders, keep=keep) == target  # type: ignore[arg-type]
