"""The state of one member of a group, and the changes that follow from answers. Pure: no clock, no database, no tasks.

These rules keep two members from working on one slot:

* A member works on a slot only while it knows that it owns the slot, until `fence_at` on its own monotonic clock: the time when
  the last answered heartbeat was *sent*, plus the silence after which others may evict the member, less a margin. Whatever the
  network does, no other member can own the slot before.
* A revoked slot is drained first and then released; while its handlers take long, work on it may continue in between. Until the
  member knows that the release has happened, it does not work on the slot again, even if an answer says that it still owns the
  slot: the release may be under way.
* The member never works under the same epoch on a slot that it lost or stopped by itself. When it turns out to own the slot
  still, it releases the slot, which ends what it had in progress there, and takes it again.
* The member accepts an answer by which it owns a slot that it did not know of: the answer to its take was lost.

The caller makes its calls one after the other, so that an answer reflects all calls that were answered before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol


class HeartbeatAnswer(Protocol):
    """The answer to a heartbeat, see `penstock.groups.queries.Beat`."""

    @property
    def known(self) -> bool:
        """False when the member was evicted."""

    @property
    def dead_after_s(self) -> float:
        """Silence in seconds after which others may evict the member."""

    @property
    def owned(self) -> Mapping[int, int]:
        """Slots that the member owns, with their epochs."""

    @property
    def revoked(self) -> frozenset[int]:
        """Owned slots that the member must release."""

    @property
    def available(self) -> frozenset[int]:
        """Slots that the member may take."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a slot: gained (begin to work on it), revoked (drain it) or lost (stop at once)."""

    kind: Literal["gained", "revoked", "lost"]
    slot: int
    epoch: int


@dataclass(slots=True)
class Held:
    """A slot that the member has."""

    epoch: int
    draining: bool = False


class MemberState:
    """One membership.

    Args:
        margin: Share of the permitted silence, 0 to 1, by which the member stops before others may evict it.
    """

    def __init__(self, margin: float = 0.2) -> None:
        self.fence_at = float("-inf")
        self.available: frozenset[int] = frozenset()
        self._margin = margin
        self._held: dict[int, Held] = {}
        self._releasing: dict[int, int] = {}
        self._lost: dict[int, int] = {}
        self._stopping = False

    @property
    def owned(self) -> dict[int, int]:
        """Slots to work on, with their epochs, in the order in which the database compares them as a whole."""
        return {slot: held.epoch for slot, held in sorted(self._held.items()) if not held.draining}

    def holds(self, slot: int) -> bool:
        """Whether the member works on a slot, as far as it knows."""
        held = self._held.get(slot)
        return held is not None and not held.draining

    @property
    def releasing(self) -> dict[int, int]:
        """Drained slots that have to be released, with their epochs."""
        return dict(self._releasing)

    @property
    def empty(self) -> bool:
        """Whether no slot is left to drain or release."""
        return not self._held and not self._releasing

    def answered(self, beat: HeartbeatAnswer, sent_at: float, now: float) -> list[Change]:
        """Apply the answer to a heartbeat that was sent at `sent_at`."""
        if not beat.known:
            lost = self._lose_all()
            self._releasing.clear()
            self._lost.clear()
            return lost
        self.kept(sent_at, beat.dead_after_s)
        if now >= self.fence_at:
            return self._lose_all()
        changes = []
        for slot, held in list(self._held.items()):
            if beat.owned.get(slot) != held.epoch:
                del self._held[slot]
                changes.append(Change("lost", slot, held.epoch))
        for slot, epoch in list(self._releasing.items()):
            if beat.owned.get(slot) != epoch:
                del self._releasing[slot]
        for slot, epoch in beat.owned.items():
            if slot in self._held or slot in self._releasing:
                continue
            if slot in beat.revoked or self._stopping or self._lost.get(slot) == epoch:
                self._releasing[slot] = epoch
            else:
                self._held[slot] = Held(epoch)
                changes.append(Change("gained", slot, epoch))
        for slot in beat.revoked:
            changes += self._revoke(slot)
        self.available = frozenset() if self._stopping else beat.available
        return changes

    def kept(self, sent_at: float, dead_after_s: float) -> None:
        """Move the fence: a heartbeat of this membership that was sent at `sent_at` was answered."""
        self.fence_at = max(self.fence_at, sent_at + dead_after_s * (1 - self._margin))

    def took(self, taken: Mapping[int, int], now: float) -> list[Change]:
        """Apply the answer to a take. What was not taken stays available."""
        self.available -= taken.keys()
        if now >= self.fence_at:
            # It is too late to be sure; the next heartbeat shows who owns the slots.
            return self._lose_all()
        changes = []
        for slot, epoch in taken.items():
            if self._stopping:
                self._releasing[slot] = epoch
                continue
            self._held[slot] = Held(epoch)
            changes.append(Change("gained", slot, epoch))
        return changes

    def drained(self, slot: int, epoch: int) -> None:
        """Record that a revoked slot is drained."""
        held = self._held.get(slot)
        if held is not None and held.epoch == epoch and held.draining:
            del self._held[slot]
            self._releasing[slot] = epoch

    def resumed(self, slot: int, epoch: int) -> None:
        """Resume work on a revoked slot that could not be drained in time, until the next heartbeat revokes it again."""
        held = self._held.get(slot)
        if held is not None and held.epoch == epoch and not self._stopping:
            held.draining = False

    def released(self, slots: Mapping[int, int]) -> None:
        """Record that a release was answered."""
        for slot, epoch in slots.items():
            if self._releasing.get(slot) == epoch:
                del self._releasing[slot]

    def tick(self, now: float) -> list[Change]:
        """Lose all slots when no heartbeat was answered for too long."""
        return self._lose_all() if self._held and now >= self.fence_at else []

    def stop(self) -> list[Change]:
        """Take no more slots, and drain all slots."""
        self._stopping = True
        self.available = frozenset()
        return [change for slot in list(self._held) for change in self._revoke(slot)]

    def _revoke(self, slot: int) -> list[Change]:
        held = self._held.get(slot)
        if held is None or held.draining:
            return []
        held.draining = True
        return [Change("revoked", slot, held.epoch)]

    def _lose_all(self) -> list[Change]:
        lost = [Change("lost", slot, held.epoch) for slot, held in self._held.items()]
        self._lost.update((slot, held.epoch) for slot, held in self._held.items())
        self._held.clear()
        self.available = frozenset()
        return lost
