"""The workers of a pool with the slots of each, as the command line and the HTTP API show them."""

from __future__ import annotations

from penstock.groups import queries as ownership
from penstock.pools.models import PoolMember
from penstock.postgres.database import Database


async def workers_of(database: Database, pool: str) -> list[PoolMember]:
    """The workers, oldest first. When there are slots without an owner, the last entry has no id and stands for them."""
    slots = await ownership.slots(database, pool)
    shown = [
        PoolMember(member.id, member.state, member.joined_at, member.seen_at, metadata=member.metadata)
        for member in await ownership.members(database, pool)
    ]
    unowned = PoolMember(None)
    by_id: dict[str | None, PoolMember] = {member.id: member for member in [*shown, unowned]}
    for slot in slots:
        name = slot.slot if slot.key is None else slot.key
        # A member may have joined or left between the two queries.
        owner = by_id.get(slot.owner, unowned)
        owner.slots.append(name)
        if slot.target != slot.owner:
            if owner is not unowned:
                owner.going.append(name)
            if slot.target in by_id and slot.target is not None:
                by_id[slot.target].coming.append(name)
    return [*shown, unowned] if unowned.slots else shown
