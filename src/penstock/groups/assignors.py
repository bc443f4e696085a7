"""Assignors: pure functions that decide which member gets which slot, called inside the transaction that changes a group.

The arguments of an assignor are the members (oldest first), the slots, and the current owner of each slot. It returns the
target: a member for each slot; a slot that it leaves out gets none. Any target is safe, because ownership moves by the protocol
(see the head of tables/0004_groups.sql); a good assignor moves few slots and distributes them evenly.

* `sticky`, the default, balances to within one slot and moves as few slots as that allows.
* `jump` assigns a slot by its hash and the rank of the members by age, as Ponos does. It needs no state, but a member that
  leaves shifts the ranks of all younger ones. It serves for comparison.

Instead of an assignor, a pool can have one slot for each key and a function that chooses the member of a key: see `placement`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import InvalidInput

_MULTIPLIER = 2862933555777941757
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A member as an assignor sees it.

    Attributes:
        id: Name of the member, unique in the group.
        metadata: Metadata that the member publishes, such as the clients that are connected to it.
    """

    id: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


Assignor = Callable[[Sequence[Candidate], Sequence[int], Mapping[int, str]], dict[int, str]]
"""`assign(members, slots, current) -> target`. Members come oldest first; `current` has the slots that have an owner."""

KeyAssign = Callable[[str, Sequence[Candidate]], int | None]
"""`assign(key, workers) -> index`: the index in `workers` (oldest first) of the worker that gets the key; None: no worker now."""


def sticky(members: Sequence[Candidate], slots: Sequence[int], current: Mapping[int, str]) -> dict[int, str]:
    """Give each member `floor` or `ceil` of its even share, and move the fewest slots.

    The members that own the most slots now get `ceil`. A member over its share loses its highest slots; free slots go to the
    members that are under their share, oldest first.
    """
    if not members:
        return {}
    held: dict[str, list[int]] = {member.id: [] for member in members}
    free: list[int] = []
    for slot in sorted(slots):
        held.get(current.get(slot, ""), free).append(slot)
    share, extra = divmod(len(slots), len(members))
    # sorted() is stable: among members with the same number the oldest comes first.
    fullest = sorted(held, key=lambda id: -len(held[id]))
    quota = {id: share + (place < extra) for place, id in enumerate(fullest)}
    for id, mine in held.items():
        free += mine[quota[id] :]
        del mine[quota[id] :]
    free.sort(reverse=True)
    for id, mine in held.items():
        while len(mine) < quota[id]:
            mine.append(free.pop())
    return {slot: id for id, mine in held.items() for slot in mine}


def jump(members: Sequence[Candidate], slots: Sequence[int], current: Mapping[int, str]) -> dict[int, str]:
    """Assign each slot by jump consistent hash over the members' ranks by age."""
    if not members:
        return {}
    return {slot: members[jump_hash(slot, len(members))].id for slot in slots}


NAMED: dict[str, Assignor] = {"sticky": sticky, "jump": jump}


def key_hash(key: str) -> int:
    """The 64-bit hash of a key: the first eight bytes of SHA-256, the same in Python and in SQL (`penstock.key_hash`)."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def jump_hash(key: int, buckets: int) -> int:
    """Jump consistent hash: the bucket, from 0, of a 64-bit key.

    When the number of buckets grows from n to m, only a share (m - n) / m of the keys moves, all of them to new buckets.
    J. Lamping and E. Veach, "A Fast, Minimal Memory, Consistent Hash Algorithm", 2014, arXiv:1406.2294.

    Raises:
        InvalidInput: There is no bucket.
    """
    if buckets < 1:
        raise InvalidInput(f"cannot hash into {buckets} buckets", hint="There must be at least one.")
    key &= _MASK
    bucket, candidate = -1, 0
    while candidate < buckets:
        bucket = candidate
        key = (key * _MULTIPLIER + 1) & _MASK
        candidate = int((bucket + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return bucket


def slot_of(key: str, slots: int) -> int:
    """The slot of a key in a group with this number of slots."""
    return jump_hash(key_hash(key), slots)
