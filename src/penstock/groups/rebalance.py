"""Changes of a group: each one locks the group, changes it, and computes new targets, in one transaction.

The assignor is a pure function (see `assignors`); this module reads the rows that are its arguments and writes its answer. A
process that is suspended in the midst of a change holds the lock for `dead_after` at most (see `Database.transaction`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from penstock.core.logs import get_logger
from penstock.groups import queries as ownership
from penstock.groups.assignors import NAMED, Candidate, KeyAssign
from penstock.groups.key_holders import holders_of, place
from penstock.groups.placement import Placed, place_keys
from penstock.postgres.database import Database, Transaction

log = get_logger("penstock.groups")


async def join(
    database: Database,
    group: str,
    member: str,
    session: UUID,
    dead_after: timedelta,
    metadata: Mapping[str, Any],
    assign: KeyAssign | None,
    key_ids: Sequence[str] | None = None,
) -> None:
    """Add a member to a group; repeatable with the same session. Raises `Conflict` when a live member has that id.

    `key_ids`: ids of the keys of encryption that it has; None: it does not say.
    """
    async with database.transaction() as transaction:
        joined = await ownership.join(transaction, group, member, session, dead_after, metadata, key_ids)
        await _assign(transaction, joined, assign)


async def leave(database: Database, group: str, member: str, session: UUID, assign: KeyAssign | None) -> bool:
    """End a membership. Returns False when there was none."""
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
    """Compute targets for the current group unless they are current. Returns the number of slots that will move."""
    async with database.transaction() as transaction:
        locked = await ownership.lock_group(transaction, group)
        if locked.balanced == locked.generation and not await ownership.has_unplaced(transaction, group):
            return 0
        return await _assign(transaction, locked, assign)


async def set_metadata(
    database: Database, group: str, member: str, metadata: Mapping[str, Any], assign: KeyAssign | None
) -> None:
    """Change the metadata of a member. Raises `NotFound` when the member was evicted."""
    async with database.transaction() as transaction:
        changed = await ownership.set_metadata(transaction, group, member, metadata)
        if changed.balanced < changed.generation:
            await _assign(transaction, changed, assign)


async def need_keys(
    database: Database, group: str, member: str, lacking: Sequence[tuple[int, str]], assign: KeyAssign | None
) -> bool:
    """Give slots of a member to members that have the keys of encryption which it lacks (slot and id). Returns False when that is
    known already. No other slot moves.
    """
    async with database.transaction() as transaction:
        needing = await ownership.need_keys(transaction, group, member, lacking)
        if needing is None:
            return False
        await _assign(transaction, needing, assign, keep=needing.balanced == needing.generation)
        return True


async def drain(database: Database, group: str, member: str, assign: KeyAssign | None, *, drain: bool = True) -> None:
    """Drain a member: it stays in the group, without slots. `drain=False` lets it take part again. Raises `NotFound`."""
    async with database.transaction() as transaction:
        await _assign(transaction, await ownership.drain_member(transaction, group, member, drain), assign)


async def hand_over(database: Database, group: str, member: str, session: UUID, assign: KeyAssign | None) -> None:
    """Drain the member of this session, which stops. Raises `NotFound`."""
    async with database.transaction() as transaction:
        await _assign(transaction, await ownership.hand_over_slots(transaction, group, member, session), assign)


async def _assign(transaction: Transaction, group: ownership.Group, assign: KeyAssign | None, *, keep: bool = False) -> int:
    if group.assignor == "custom" and assign is None:
        # This process, such as a command line, does not have the rule; a member that has it will find the targets missing.
        return 0
    present = await ownership.members(transaction, group.name)
    slots = await ownership.slots(transaction, group.name)
    candidates = [Candidate(member.id, member.metadata) for member in present if member.state == "active"]
    if not candidates:
        # All members are draining: a draining member is better than none.
        candidates = [Candidate(member.id, member.metadata) for member in present]
    ids = {member.id for member in present}
    current = {slot.slot: who for slot in slots if (who := _has(slot, ids)) is not None}
    seen = [slot.slot for slot in slots]
    able = {candidate.id for candidate in candidates}
    holders = holders_of(
        {slot.slot: slot.key_ids for slot in slots if slot.key_ids},
        {member.id: member.key_ids for member in present if member.id in able},
    )
    if assign is not None and group.assignor == "custom":
        async with transaction.working():
            placed = await _place_keys(
                assign, {slot.slot: slot.key for slot in slots if slot.key is not None}, candidates, holders
            )
        await _quarantine(transaction, group.name, slots, placed)
        target = placed.target
    else:
        target = place(NAMED[group.assignor], candidates, seen, current, holders, keep=keep)
    # Slots without a target are written too: a slot for a new key may appear meanwhile, and the next rebalance has to see it.
    moved = await ownership.set_targets(transaction, group.name, {slot: target.get(slot) for slot in seen})
    log.debug("rebalanced", group=group.name, generation=group.generation, members=len(present), moving=moved)
    return moved


async def _place_keys(
    assign: KeyAssign, keys: Mapping[int, str], candidates: Sequence[Candidate], holders: Mapping[frozenset[str], Sequence[int]]
) -> Placed:
    """Call a rule for each key, with those members that can have it."""
    placed, left = Placed(), dict(keys)
    for able, needing in holders.items():
        some = await place_keys(
            assign,
            {slot: left.pop(slot) for slot in needing if slot in left},
            [candidate for candidate in candidates if candidate.id in able],
        )
        placed.target.update(some.target)
        placed.errors.update(some.errors)
    rest = await place_keys(assign, left, candidates)
    placed.target.update(rest.target)
    placed.errors.update(rest.errors)
    return placed


async def _quarantine(transaction: Transaction, group: str, slots: Sequence[ownership.Slot], placed: Placed) -> None:
    known = {slot.slot: slot.error for slot in slots if slot.error is not None}
    if not known and not placed.errors:
        return
    await ownership.quarantine_keys(transaction, group, placed.errors)
    if new := [slot for slot in placed.errors if slot not in known]:
        log.error("keys_quarantined", group=group, keys=len(placed.errors), new=len(new), error=placed.errors[new[0]])


def _has(slot: ownership.Slot, members: set[str]) -> str | None:
    """The member that counts as having a slot: its target, or its owner when the target is no longer a member."""
    if slot.target in members:
        return slot.target
    return slot.owner if slot.owner in members else None
