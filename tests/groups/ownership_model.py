"""The ownership protocol of functions/groups/ as plain Python, for the simulation: same names, same rules, no SQL.

`rules` can switch single rules off, to show that the simulation notices.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from penstock.groups.assignors import Assignor, Candidate, sticky


@dataclass(frozen=True, slots=True)
class Beat:
    """As `penstock.groups.queries.Beat`."""

    known: bool
    dead_after_s: float = 0.0
    owned: Mapping[int, int] = field(default_factory=dict)
    revoked: frozenset[int] = frozenset()
    available: frozenset[int] = frozenset()


@dataclass(slots=True)
class Slot:
    owner: str | None = None
    target: str | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What a sabotaged protocol leaves out."""

    check_epoch: bool = True
    check_session: bool = True
    wait_for_release: bool = True


class Group:
    """One group in the database."""

    def __init__(self, slots: int, dead_after: float, assignor: Assignor = sticky, rules: Rules = Rules()) -> None:
        self.slots = [Slot() for _ in range(slots)]
        self.members: dict[str, float] = {}  # id -> seen_at, oldest first
        self.by_silence: OrderedDict[str, None] = OrderedDict()  # the member with the longest silence comes first
        self.sessions: dict[str, int] = {}
        self.commits: dict[int, tuple[int, str]] = {}
        self.moves = 0
        self.told: set[str] = set()  # who was notified since the simulation last looked
        self._dead_after = dead_after
        self._assignor = assignor
        self._rules = rules
        self._owned: dict[str, set[int]] = {}
        self._target: dict[str, set[int]] = {}

    def join(self, member: str, session: int, now: float) -> bool:
        if member in self.members:
            if self.sessions[member] == session:
                return True
            if self.members[member] + self._dead_after >= now:
                return False
            self._remove([member])
        self.seen(member, now)
        self.sessions[member] = session
        self.balance()
        return True

    def seen(self, member: str, now: float) -> None:
        self.members[member] = now
        self.by_silence[member] = None
        self.by_silence.move_to_end(member)

    def _is(self, member: str, session: int) -> bool:
        return member in self.members and (self.sessions[member] == session or not self._rules.check_session)

    def leave(self, member: str, session: int) -> None:
        if self._is(member, session):
            self._remove([member])
            self.balance()

    def evict(self, now: float) -> None:
        silent = list(takewhile(lambda id: self.members[id] + self._dead_after < now, self.by_silence))
        if silent:
            self._remove(silent)
            self.balance()

    def heartbeat(self, member: str, session: int, now: float) -> Beat:
        if not self._is(member, session):
            return Beat(known=False)
        self.seen(member, now)
        owned = self._owned.get(member, set())
        target = self._target.get(member, set())
        available = {s for s in target if self.slots[s].owner is None}
        if not self._rules.wait_for_release:
            available = {s for s in target if self.slots[s].owner != member}
        return Beat(
            True,
            self._dead_after,
            {s: self.slots[s].epoch for s in owned},
            frozenset(s for s in owned if self.slots[s].target != member),
            frozenset(available),
        )

    def take(self, member: str, session: int, wanted: Sequence[int]) -> dict[int, int] | None:
        if not self._is(member, session):
            return None
        taken = {}
        for s in wanted:
            slot = self.slots[s]
            if slot.target == member and (slot.owner is None or not self._rules.wait_for_release):
                self._set_owner(s, member)
                slot.epoch += 1
                taken[s] = slot.epoch
        return taken

    def release(self, member: str, held: Mapping[int, int]) -> None:
        for s, epoch in held.items():
            slot = self.slots[s]
            if slot.owner == member and (slot.epoch == epoch or not self._rules.check_epoch):
                self._set_owner(s, None)

    def commit(self, member: str, s: int, epoch: int) -> str | None:
        """Write under an epoch. Returns what is wrong when an accepted write should not have been."""
        slot = self.slots[s]
        if self._rules.check_epoch and not (slot.owner == member and slot.epoch == epoch):
            return None
        last_epoch, last_member = self.commits.get(s, (0, ""))
        if epoch < last_epoch:
            return f"slot {s}: {member} committed under epoch {epoch} after {last_member} did under {last_epoch}"
        if epoch == last_epoch and member != last_member:
            return f"slot {s}: {member} and {last_member} both committed under epoch {epoch}"
        self.commits[s] = (epoch, member)
        return None

    def unsettled(self, *, balanced: bool) -> list[str]:
        """What is not as it should be when everything has come to rest."""
        problems = [f"slot {n}: owner {s.owner}, target {s.target}" for n, s in enumerate(self.slots) if s.owner != s.target]
        numbers = Counter(s.target for s in self.slots)
        have = [numbers[id] for id in self.members]
        if balanced and have and max(have) - min(have) > 1:
            problems.append(f"unbalanced: {sorted(have)}")
        return problems

    def _remove(self, members: list[str]) -> None:
        for member in members:
            for s in sorted(self._owned.get(member, set())):
                self._set_owner(s, None)
            del self.members[member]
            del self.by_silence[member]

    def balance(self) -> None:
        current = {}
        for s, slot in enumerate(self.slots):
            has = slot.target if slot.target in self.members else slot.owner
            if has in self.members:
                current[s] = str(has)
        target = self._assignor([Candidate(id) for id in self.members], range(len(self.slots)), current)
        for s, slot in enumerate(self.slots):
            if slot.target != target.get(s):
                self.moves += 1
                if slot.target is not None:
                    self._target[slot.target].discard(s)
                slot.target = target.get(s)
                if slot.target is not None:
                    self._target.setdefault(slot.target, set()).add(s)
                self.told.add(str(slot.owner or slot.target))

    def _set_owner(self, s: int, member: str | None) -> None:
        slot = self.slots[s]
        if slot.owner is not None:
            self._owned[slot.owner].discard(s)
        slot.owner = member
        if member is None and slot.target is not None:
            self.told.add(slot.target)
        if member is not None:
            self._owned.setdefault(member, set()).add(s)
