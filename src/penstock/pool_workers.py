"""The workers of a pool with the slots of each, as the command line and the HTTP API show them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock.postgres import ownership
from penstock.postgres.database import Database


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A worker of a pool. Slots are numbers, or keys in a pool with a rule of its own.

    Attributes:
        id: Its id; None: the slots that nobody has.
        state: active, or draining: it stays without slots.
        slots: What it has.
        coming: What it is to get.
        going: What of its own it is to give up.
        metadata: What it says of itself.
    """

    id: str | None
    state: str | None = None
    joined_at: datetime | None = None
    seen_at: datetime | None = None
    slots: list[int | str] = field(default_factory=list)
    coming: list[int | str] = field(default_factory=list)
    going: list[int | str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


async def workers_of(database: Database, pool: str) -> list[PoolMember]:
    """The workers, oldest first, and last, when there are slots that nobody has, one without an id."""
    slots = await ownership.slots(database, pool)
    shown = [
        PoolMember(member.id, member.state, member.joined_at, member.seen_at, metadata=member.metadata)
        for member in await ownership.members(database, pool)
    ]
    nobody = PoolMember(None)
    by_id: dict[str | None, PoolMember] = {member.id: member for member in [*shown, nobody]}
    for slot in slots:
        name = slot.slot if slot.key is None else slot.key
        # A member may have come or gone between the two looks.
        owner = by_id.get(slot.owner, nobody)
        owner.slots.append(name)
        if slot.target != slot.owner:
            if owner is not nobody:
                owner.going.append(name)
            if slot.target in by_id and slot.target is not None:
                by_id[slot.target].coming.append(name)
    return [*shown, nobody] if nobody.slots else shown
