"""Placement of keys by a function of the application, isolated so that its failures affect only the keys that they concern.

The rule is `assign`, code of the application that runs inside the transaction that balances a group. A key for which it raises,
returns an invalid answer or does not return is *quarantined*: no member gets the key, its jobs wait, and the database records the
error. All other keys are placed. Each rebalance calls the rule again for quarantined keys, and so does the membership after a
while (see `Membership`).

The rule runs in a thread, so that a rule that hangs blocks neither the loop nor the other keys. A thread cannot be terminated:
while one hangs for a key, the rule is not called for that key again, and only a few threads may hang at once.
"""

from __future__ import annotations

import asyncio
import operator
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.groups.assignors import Candidate, KeyAssign

_LIMIT_S = 0.5
_LOOK_S = 0.02
_MOST_HANGING = 4
_LONGEST_ERROR = 500


@dataclass(frozen=True, slots=True)
class Placed:
    """The answers of a rule: the member of each slot (a slot without one is left out), and the errors where the rule failed."""

    target: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class _Pass:
    """One pass over the keys in a thread of its own."""

    def __init__(self, assign: KeyAssign, keys: Sequence[tuple[int, str]], members: Sequence[Candidate]) -> None:
        self.assign, self.keys, self.members = assign, keys, members
        self.placed = Placed()
        self.at = 0
        self.since = time.monotonic()
        self.abandoned = False
        self.done = threading.Event()

    def run(self) -> None:
        for place, (slot, key) in enumerate(self.keys):
            self.at, self.since = place, time.monotonic()
            try:
                index = checked(self.assign(key, tuple(self.members)), len(self.members))
                if self.abandoned:
                    break
                if index is not None:
                    self.placed.target[slot] = self.members[index].id
            except BaseException as error:
                # This includes SystemExit: the rule's exit must not end this process.
                if self.abandoned:
                    break
                self.placed.errors[slot] = described(error)
        self.done.set()


# Keys for which a rule hangs in this process, with the hanging pass, which keeps its rule alive and so the id of the rule unique.
_hanging: dict[tuple[int, str], _Pass] = {}


async def place_keys(assign: KeyAssign, keys: Mapping[int, str], members: Sequence[Candidate]) -> Placed:
    """Call a rule for the key of each slot."""
    placed = Placed()
    for known, walk in list(_hanging.items()):
        if walk.done.is_set():
            del _hanging[known]
    left = []
    for slot, key in keys.items() if members else ():
        if (id(assign), key) in _hanging:
            placed.errors[slot] = "an earlier call of assign for this key has not returned yet"
        else:
            left.append((slot, key))
    while left:
        if len(_hanging) >= _MOST_HANGING:
            placed.errors.update((slot, "earlier calls of assign for other keys have not returned yet") for slot, _ in left)
            break
        walk = _Pass(assign, left, members)
        threading.Thread(target=walk.run, name="penstock-assign", daemon=True).start()
        left = await _walked(walk, placed)
    return placed


async def _walked(walk: _Pass, placed: Placed) -> list[tuple[int, str]]:
    """Wait for a pass. Returns the keys that are left when it hangs."""
    pause = 0.0005
    while not walk.done.is_set() and time.monotonic() - walk.since < _LIMIT_S:
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LOOK_S)
    done = walk.done.is_set()
    walk.abandoned = not done
    at = len(walk.keys) if done else walk.at
    for slot, _ in walk.keys[:at]:
        if slot in walk.placed.target:
            placed.target[slot] = walk.placed.target[slot]
        if slot in walk.placed.errors:
            placed.errors[slot] = walk.placed.errors[slot]
    if done:
        return []
    slot, key = walk.keys[at]
    placed.errors[slot] = f"assign did not return within {_LIMIT_S} s"
    _hanging[id(walk.assign), key] = walk
    return list(walk.keys[at + 1 :])


def checked(index: object, members: int) -> int | None:
    """The answer of a rule as an index in the list of members; None: no member now. Raises `ValueError` for other answers."""
    if index is None:
        return None
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        if asyncio.iscoroutine(index):
            index.close()
        raise ValueError(f"assign returned {described(index)}; it must return the index of a worker in the list, or None")
    place = operator.index(index)
    if not 0 <= place < members:
        raise ValueError(f"assign returned {place} for {members} workers; the index must be from 0 to {members - 1}")
    return int(place)


def described(value: object) -> str:
    """An error, or an answer, as text that PostgreSQL can store."""
    try:
        text = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else repr(value)
    except BaseException as failure:
        text = f"{type(value).__name__} (its text cannot be read: {type(failure).__name__})"
    return text.encode("utf-8", "replace").decode().replace("\x00", "\\0")[:_LONGEST_ERROR]
