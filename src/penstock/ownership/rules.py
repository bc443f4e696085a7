"""Placing keys by a rule of the application, without letting the rule harm anything but the keys that it fails for.

A rule is a function of somebody else's code that runs inside the transaction that balances a group. One key for which it raises,
answers nonsense or does not return is *quarantined*: nobody gets the key, its jobs wait, and the error stands with it in the
database. All other keys are placed. It is asked again with every rebalance, and after a while by itself (see `Member`).

It runs in a thread, so that a rule that hangs holds up neither the loop nor the other keys. A thread cannot be ended: while
one still hangs for a key the rule is not asked about that key again, and no more than a few may hang at once.
"""

from __future__ import annotations

import asyncio
import operator
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.ownership.assign import Candidate, KeyAssign

_LIMIT_S = 0.5
_LOOK_S = 0.02
_MOST_HANGING = 4
_LONGEST_ERROR = 500


@dataclass(frozen=True, slots=True)
class Placed:
    """What a rule said: the member of each slot (none: nobody now), and why there is none where it failed."""

    target: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class _Pass:
    """One walk over the keys in a thread of its own."""

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
                # Also sys.exit() and the like: they are the rule's, not this process's.
                if self.abandoned:
                    break
                self.placed.errors[slot] = described(error)
        self.done.set()


# Keys for which a rule hangs in this process, and the walk that does. The walk keeps its rule alive, and with it the rule's id.
_hanging: dict[tuple[int, str], _Pass] = {}


async def place_keys(assign: KeyAssign, keys: Mapping[int, str], members: Sequence[Candidate]) -> Placed:
    """Ask a rule for the member of each slot, whose key is given."""
    placed = Placed()
    for known, walk in list(_hanging.items()):
        if walk.done.is_set():
            del _hanging[known]
    left = []
    for slot, key in keys.items() if members else ():
        if (id(assign), key) in _hanging:
            placed.errors[slot] = "assign has not returned for it yet"
        else:
            left.append((slot, key))
    while left:
        if len(_hanging) >= _MOST_HANGING:
            placed.errors.update((slot, "assign has not returned for other keys yet") for slot, _ in left)
            break
        walk = _Pass(assign, left, members)
        threading.Thread(target=walk.run, name="penstock-assign", daemon=True).start()
        left = await _walked(walk, placed)
    return placed


async def _walked(walk: _Pass, placed: Placed) -> list[tuple[int, str]]:
    """Wait for a walk, and return what is left to ask when it hangs."""
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
    """The answer of a rule as a place in the list of members; None: nobody now. Raises `ValueError` when it is neither."""
    if index is None:
        return None
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        if asyncio.iscoroutine(index):
            index.close()
        raise ValueError(f"assign returned {described(index)}, not the place of a worker in the list, from 0, or None")
    place = operator.index(index)
    if not 0 <= place < members:
        raise ValueError(f"assign returned {place} for {members} workers: a place is 0 to {members - 1}")
    return int(place)


def described(value: object) -> str:
    """An error, or an answer, in words that can be stored."""
    try:
        text = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else repr(value)
    except BaseException as failure:
        text = f"{type(value).__name__} (its text cannot be had: {type(failure).__name__})"
    return text.encode("utf-8", "replace").decode().replace("\x00", "\\0")[:_LONGEST_ERROR]
