"""Changes of a group: each locks it, changes it, and computes new targets, in one transaction.

The assignor is a pure function (see `assign`); here are the rows that it is fed with, and where its answer goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from penstock.logs import get_logger
from penstock.ownership.assign import NAMED, Candidate, KeyAssign
from penstock.ownership.rules import Placed, place_keys
from penstock.postgres import ownership
from penstock.postgres.database import Database, Transaction

log = get_logger("penstock.ownership")


async def join(
    database: Database,
    group: str,
    member: str,
    session: UUID,
    dead_after: timedelta,
    metadata: Mapping[str, Any],
    assign: KeyAssign | None,
) -> None:
    """Make a member of the group; may be repeated with the same session. Raises `Conflict` when a live member has that id."""
    async with database.transaction() as transaction:
        await _assign(transaction, await ownership.join(transaction, group, member, session, dead_after, metadata), assign)


async def leave(database: Database, group: str, member: str, session: UUID, assign: KeyAssign | None) -> bool:
    """End a membership. False when it was none."""
    async with database.transaction() as transaction:
        was_member = await ownership.leave(transaction, group, member, session)
        if was_member:
            await _assign(transaction, await ownership.lock_group(transaction, group), assign)
        return was_member


async def evict(database: Database, group: str, assign: KeyAssign | None) -> list[str]:
    """Remove members that were silent for too long. Returns their ids."""
    async with database.transaction() as transaction:
        evicted = await ownership.evict(transaction, group)
        if evicted:
            await _assign(transaction, await ownership.lock_group(transaction, group), assign)
    if evicted:
        log.warning("members_evicted", group=group, members=evicted)
    return evicted


async def rebalance(database: Database, group: str, assign: KeyAssign | None) -> int:
    """Compute targets for the group as it is, unless somebody just did. Returns how many slots will move."""
    async with database.transaction() as transaction:
        locked = await ownership.lock_group(transaction, group)
        if locked.balanced == locked.generation and not await ownership.has_unplaced(transaction, group):
            return 0
        return await _assign(transaction, locked, assign)


async def set_metadata(
    database: Database, group: str, member: str, metadata: Mapping[str, Any], assign: KeyAssign | None
) -> None:
    """Change what a member says of itself. Raises `NotFound` when it was evicted."""
    async with database.transaction() as transaction:
        changed = await ownership.set_metadata(transaction, group, member, metadata)
        if changed.balanced < changed.generation:
            await _assign(transaction, changed, assign)


async def drain(database: Database, group: str, member: str, assign: KeyAssign | None, *, drain: bool = True) -> None:
    """Move a member out: it stays, without slots. `drain=False` lets it take part again. Raises `NotFound`."""
    async with database.transaction() as transaction:
        await _assign(transaction, await ownership.drain_member(transaction, group, member, drain), assign)


async def _assign(transaction: Transaction, group: ownership.Group, assign: KeyAssign | None) -> int:
    if group.assignor == "custom" and assign is None:
        # Somebody without the rule (a command line): a member that has it will see that targets are missing.
        return 0
    present = await ownership.members(transaction, group.name)
    slots = await ownership.slots(transaction, group.name)
    candidates = [Candidate(member.id, member.metadata) for member in present if member.state == "active"]
    if not candidates:
        # Rather one that is to be moved out than nobody.
        candidates = [Candidate(member.id, member.metadata) for member in present]
    ids = {member.id for member in present}
    current = {slot.slot: who for slot in slots if (who := _has(slot, ids)) is not None}
    seen = [slot.slot for slot in slots]
    if assign is not None and group.assignor == "custom":
        placed = await place_keys(assign, {slot.slot: slot.key for slot in slots if slot.key is not None}, candidates)
        await _quarantine(transaction, group.name, slots, placed)
        target = placed.target
    else:
        target = NAMED[group.assignor](candidates, seen, current)
    # Nobody, too, is said slot by slot: a slot for a new key may come meanwhile, and has to be seen by the next one.
    moved = await ownership.set_targets(transaction, group.name, {slot: target.get(slot) for slot in seen})
    log.debug("rebalanced", group=group.name, generation=group.generation, members=len(present), moving=moved)
    return moved


async def _quarantine(transaction: Transaction, group: str, slots: Sequence[ownership.Slot], placed: Placed) -> None:
    known = {slot.slot: slot.error for slot in slots if slot.error is not None}
    if not known and not placed.errors:
        return
    await ownership.quarantine_keys(transaction, group, placed.errors)
    if new := [slot for slot in placed.errors if slot not in known]:
        log.error("keys_quarantined", group=group, keys=len(placed.errors), new=len(new), error=placed.errors[new[0]])


def _has(slot: ownership.Slot, members: set[str]) -> str | None:
    """Who counts as having a slot: who is about to get it, or, when that one is gone, who still holds it."""
    if slot.target in members:
        return slot.target
    return slot.owner if slot.owner in members else None
