"""Placement of slots whose work needs keys of encryption: they go to members that have the keys, as long as there are any.

A slot that needs none, or whose keys no member has, is placed as if there were no encryption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.groups.assignors import Assignor, Candidate


def holders_of(slots: Mapping[int, Sequence[str]], members: Mapping[str, Sequence[str]]) -> dict[frozenset[str], list[int]]:
    """The slots that not every member can have, by the members that can.

    When no member has all keys that a slot needs, those count that have the latest ones: what they cannot read either gives the
    slot to others later, so that the members take turns.

    Args:
        slots: Ids of the keys that each slot needs, latest first.
        members: Ids of the keys that each member has.
    """
    held = {id: frozenset(keys) for id, keys in members.items()}
    known = frozenset[str]().union(*held.values())
    able: dict[tuple[str, ...], frozenset[str]] = {}
    found: dict[frozenset[str], list[int]] = {}
    for slot, needed in slots.items():
        wanted = tuple(key for key in needed if key in known)
        if not wanted:
            continue
        if wanted not in able:
            able[wanted] = next(
                who
                for most in range(len(wanted), 0, -1)
                if (who := frozenset(id for id, keys in held.items() if keys.issuperset(wanted[:most])))
            )
        if len(able[wanted]) < len(held):
            found.setdefault(able[wanted], []).append(slot)
    return found


def place(
    assignor: Assignor,
    members: Sequence[Candidate],
    slots: Sequence[int],
    current: Mapping[int, str],
    holders: Mapping[frozenset[str], Sequence[int]],
    *,
    keep: bool,
) -> dict[int, str]:
    """Targets by an assignor, which shares the slots that need keys among the members that have them, and the others among all.

    `keep`: the others stay where they are.
    """
    target: dict[int, str] = {}
    for able, needing in holders.items():
        target |= assignor([member for member in members if member.id in able], needing, current)
    free = [slot for slot in slots if slot not in target]
    if keep and all(slot in current for slot in free):
        return target | {slot: current[slot] for slot in free}
    return target | assignor(members, free, current)
