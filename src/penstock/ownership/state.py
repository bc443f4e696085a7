"""What one member of a group knows, and what follows from what it hears. Pure: no clock, no database, no tasks.

The rules that keep two members from working on one slot:

* A slot is worked on only while this member knows that it owns it, until `fence_at` on its own monotonic clock: the time when the
  last answered heartbeat was *sent*, plus the silence after which others may evict it, less a margin. Whatever the network
  does, nobody else can have the slot before.
* A slot that is revoked is drained first and released then; while its handlers take long it may be worked on in between.
  Until the release is known to have happened the member does not work on it again, even if an answer says that it still owns
  it: the release may be under way.
* What it lost or stopped by itself it never works on again under the same epoch: when it turns out that it still owns the
  slot, it releases it, which ends whatever it had in progress there, and takes it anew.
* An answer that says the member owns a slot it never knew of (the answer to its take was lost) is believed.

The caller makes its calls one after the other, so that an answer reflects all calls that were answered before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol


class Heard(Protocol):
    """The answer to a heartbeat, see `penstock.postgres.ownership.Beat`."""

    @property
    def known(self) -> bool:
        """False when the member was evicted."""

    @property
    def dead_after_s(self) -> float:
        """Silence after which others may evict it."""

    @property
    def owned(self) -> Mapping[int, int]:
        """Slots that it owns, with their epochs."""

    @property
    def revoked(self) -> frozenset[int]:
        """Those of them that it is to give up."""

    @property
    def available(self) -> frozenset[int]:
        """Slots that it may take."""


@dataclass(frozen=True, slots=True)
class Change:
    """What became of a slot: begin to work on it, drain it, or stop at once since it is no longer this member's."""

    kind: Literal["gained", "revoked", "lost"]
    slot: int
    epoch: int


@dataclass(slots=True)
class _Held:
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
        self._held: dict[int, _Held] = {}
        self._releasing: dict[int, int] = {}
        self._lost: dict[int, int] = {}
        self._stopping = False

    @property
    def owned(self) -> dict[int, int]:
        """Slots to work on, with their epochs."""
        return {slot: held.epoch for slot, held in self._held.items() if not held.draining}

    def holds(self, slot: int) -> bool:
        """Whether a slot is to be worked on, as far as is known."""
        held = self._held.get(slot)
        return held is not None and not held.draining

    @property
    def releasing(self) -> dict[int, int]:
        """Slots that are drained and have to be released, with their epochs."""
        return dict(self._releasing)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to drain or release."""
        return not self._held and not self._releasing

    def heard(self, beat: Heard, sent_at: float, now: float) -> list[Change]:
        """Take the answer to a heartbeat that was sent at `sent_at`."""
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
                self._held[slot] = _Held(epoch)
                changes.append(Change("gained", slot, epoch))
        for slot in beat.revoked:
            changes += self._revoke(slot)
        self.available = frozenset() if self._stopping else beat.available
        return changes

    def kept(self, sent_at: float, dead_after_s: float) -> None:
        """A heartbeat that was sent at `sent_at` was answered, this one or another of the same membership."""
        self.fence_at = max(self.fence_at, sent_at + dead_after_s * (1 - self._margin))

    def took(self, taken: Mapping[int, int], now: float) -> list[Change]:
        """Take the answer to a take."""
        self.available = frozenset()
        if now >= self.fence_at:
            # Too late to be sure; the next heartbeat tells what became of them.
            return self._lose_all()
        changes = []
        for slot, epoch in taken.items():
            if self._stopping:
                self._releasing[slot] = epoch
                continue
            self._held[slot] = _Held(epoch)
            changes.append(Change("gained", slot, epoch))
        return changes

    def drained(self, slot: int, epoch: int) -> None:
        """A revoked slot is drained."""
        held = self._held.get(slot)
        if held is not None and held.epoch == epoch and held.draining:
            del self._held[slot]
            self._releasing[slot] = epoch

    def resumed(self, slot: int, epoch: int) -> None:
        """A revoked slot could not be drained in time: it is worked on again until the next heartbeat revokes it anew."""
        held = self._held.get(slot)
        if held is not None and held.epoch == epoch and not self._stopping:
            held.draining = False

    def released(self, slots: Mapping[int, int]) -> None:
        """A release was answered."""
        for slot, epoch in slots.items():
            if self._releasing.get(slot) == epoch:
                del self._releasing[slot]

    def tick(self, now: float) -> list[Change]:
        """Stop everything when no heartbeat was answered for too long."""
        return self._lose_all() if self._held and now >= self.fence_at else []

    def stop(self) -> list[Change]:
        """Take no more slots, and drain all."""
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
