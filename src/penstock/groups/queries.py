"""One typed function for each SQL function about groups, members and slots. No logic beyond converting rows to models.

Functions that take a `Transaction` are used together: a change of a group locks it, reads it, and writes new targets before the
commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from penstock.core.serialization import dump_json, load_json
from penstock.errors import Unreadable
from penstock.postgres.database import Database, Transaction


@dataclass(frozen=True, slots=True)
class Group:
    """A group; while `balanced` is less than `generation`, a member has to compute targets."""

    name: str
    slots: int
    assignor: str
    generation: int
    balanced: int
    members: int


@dataclass(frozen=True, slots=True)
class Member:
    """A member, with the number of its slots and the ids of the keys of encryption that it has."""

    id: str
    state: str
    metadata: dict[str, Any]
    age: int
    joined_at: datetime
    seen_at: datetime
    slots: int
    key_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot: its owner, its target, the epoch of its last take, its key and the error for which the key is quarantined.

    `key_ids` are the ids of the keys of encryption that its work needs, latest first.
    """

    slot: int
    owner: str | None
    target: str | None
    epoch: int
    key: str | None
    error: str | None = None
    key_ids: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Beat:
    """The answer to a member's heartbeat.

    Attributes:
        known: False when the member was evicted; the other attributes have no meaning then.
        members: Number of members of the group.
        balanced: False when a member has to compute targets.
        dead_after_s: Silence in seconds after which others evict the member, counted from the sending of this heartbeat or later.
        owned: Slots that the member owns, with their epochs.
        revoked: Owned slots that the member must release.
        available: Slots that the member may take.
    """

    known: bool
    members: int
    balanced: bool
    dead_after_s: float
    owned: dict[int, int]
    revoked: frozenset[int]
    available: frozenset[int]


async def declare_group(database: Database, name: str, slots: int, assignor: str) -> Group:
    """Create a group unless it exists. Raises `InvalidInput`, `Conflict`."""
    return _group(await database.fetchrow("select * from penstock.declare_group($1, $2, $3)", name, slots, assignor))


async def lock_group(transaction: Transaction, name: str) -> Group:
    """The group, locked until the transaction ends. Raises `NotFound`."""
    return _group(await transaction.fetchrow("select * from penstock.lock_group($1)", name))


async def members(executor: Database | Transaction, name: str) -> list[Member]:
    """The members of a group, oldest first."""
    return [
        Member(
            row["id"],
            row["state"],
            _metadata(row["metadata"]),
            row["age"],
            row["joined_at"],
            row["seen_at"],
            row["slots"],
            tuple(row["key_ids"] or ()),
        )
        for row in await executor.fetch("select * from penstock.group_members($1)", name)
    ]


async def slots(executor: Database | Transaction, name: str) -> list[Slot]:
    """The slots of a group, in order."""
    rows = await executor.fetch("select * from penstock.slots_to_place($1)", name)
    return [Slot(*tuple(row)) for row in rows]


async def quarantine_keys(transaction: Transaction, name: str, errors: Mapping[int, str]) -> None:
    """Record the errors of the application's rule by slot, and clear those of all other slots."""
    await transaction.fetch("select penstock.quarantine_keys($1, $2, $3)", name, list(errors), list(errors.values()))


async def release_keys(database: Database, name: str, key: str | None = None, after: timedelta = timedelta(0)) -> int:
    """Have the rule called again for a quarantined key, or for all. Returns the number of keys. Raises `NotFound`."""
    return int(await database.fetchval("select penstock.release_keys($1, $2, $3)", name, key, after))


async def has_unplaced(transaction: Transaction, name: str) -> bool:
    """Whether the group has slots that no assignor has seen."""
    row = await transaction.fetchrow(
        "select exists (select from penstock.slots where group_name = $1 and not placed) as unplaced", name
    )
    return bool(row["unplaced"])


async def set_targets(transaction: Transaction, name: str, target: Mapping[int, str | None]) -> int:
    """Write an assignor's target of the slots that it saw; None: no member. Returns the number of slots that will move."""
    row = await transaction.fetchrow(
        "select penstock.set_targets($1, $2, $3) as moved", name, list(target.keys()), list(target.values())
    )
    return int(row["moved"])


async def need_keys(transaction: Transaction, name: str, member: str, lacking: Sequence[tuple[int, str]]) -> Group | None:
    """Say that work in slots of a member waits for keys of encryption (slot and id) which it lacks.

    Returns the group, which stays locked, so that other members get the slots; None: it is known already.
    """
    row = await transaction.fetchrow(
        "select * from penstock.need_keys($1, $2, $3, $4)", name, member, [slot for slot, _ in lacking], [id for _, id in lacking]
    )
    return None if row["name"] is None else _group(row)


async def join(
    transaction: Transaction,
    name: str,
    member: str,
    session: UUID,
    dead_after: timedelta,
    metadata: Mapping[str, Any],
    key_ids: Sequence[str] | None = None,
) -> Group:
    """Add a member to a group, which stays locked. The call may be repeated with the same session.

    Raises `Conflict` when a live member has that id, `NotFound`, `InvalidInput`.
    """
    row = await transaction.fetchrow(
        "select * from penstock.join_group($1, $2, $3, $4, $5::jsonb, $6)",
        name,
        member,
        session,
        dead_after,
        dump_json(dict(metadata), "metadata"),
        key_ids,
    )
    return _group(row)


async def leave(transaction: Transaction, name: str, member: str, session: UUID) -> bool:
    """End a membership. Returns False when there was none."""
    row = await transaction.fetchrow("select penstock.leave_group($1, $2, $3) as left", name, member, session)
    return bool(row["left"])


async def evict(transaction: Transaction, name: str) -> list[str]:
    """Remove members that were silent for too long. Returns their ids; unless there are none, the group is locked."""
    row = await transaction.fetchrow("select penstock.evict($1) as evicted", name)
    return list(row["evicted"])


async def set_metadata(transaction: Transaction, name: str, member: str, metadata: Mapping[str, Any]) -> Group:
    """Change the metadata of a member; the group stays locked. Raises `NotFound` when the member was evicted."""
    row = await transaction.fetchrow(
        "select * from penstock.set_metadata($1, $2, $3::jsonb)", name, member, dump_json(dict(metadata), "metadata")
    )
    return _group(row)


async def drain_member(transaction: Transaction, name: str, member: str, drain: bool) -> Group:
    """Drain a member, or let it take part again; the group stays locked. Raises `NotFound`."""
    return _group(await transaction.fetchrow("select * from penstock.drain_member($1, $2, $3)", name, member, drain))


async def hand_over_slots(transaction: Transaction, name: str, member: str, session: UUID) -> Group:
    """Drain the member of this session, which stops; the group stays locked. Raises `NotFound`."""
    return _group(await transaction.fetchrow("select * from penstock.hand_over_slots($1, $2, $3)", name, member, session))


async def keep_alive(
    database: Database,
    worker: str | None,
    members: Sequence[tuple[str, str, UUID]],
    blocked_s: float | None,
    blocked_by: str | None,
) -> tuple[bool, list[float | None]]:
    """Keep a worker and memberships (group, member, session) alive.

    Returns whether the worker is known, and the silence in seconds after which each member is evicted; None: the member was
    evicted, or is locked at this moment.
    """
    row = await database.fetchrow(
        "select * from penstock.keep_alive($1, $2, $3, $4::uuid[], $5, $6)",
        worker,
        [group for group, _, _ in members],
        [member for _, member, _ in members],
        [session for _, _, session in members],
        blocked_s,
        blocked_by,
    )
    return bool(row["worker_known"]), list(row["dead_after_s"] or [])


async def heartbeat(database: Database, name: str, member: str, session: UUID) -> Beat:
    """Report that a member is alive. Returns the slots that it owns, must release and may take."""
    row = await database.fetchrow("select * from penstock.member_heartbeat($1, $2, $3)", name, member, session)
    return Beat(
        row["known"],
        row["members"] or 0,
        bool(row["balanced"]),
        row["dead_after_s"] or 0.0,
        dict(zip(row["owned"] or [], row["epochs"] or [], strict=True)),
        frozenset(row["revoked"] or []),
        frozenset(row["available"] or []),
    )


async def take(database: Database, name: str, member: str, session: UUID, wanted: Sequence[int]) -> dict[int, int]:
    """Take free slots whose target is the member. Returns the taken slots with their epochs. Raises `NotFound`."""
    rows = await database.fetch("select * from penstock.take($1, $2, $3, $4)", name, member, session, wanted)
    return {row["slot"]: row["epoch"] for row in rows}


async def release(database: Database, name: str, member: str, held: Mapping[int, int]) -> None:
    """Release slots that the member owns under these epochs."""
    await database.fetch("select penstock.release($1, $2, $3, $4)", name, member, list(held.keys()), list(held.values()))


def _group(row: Any) -> Group:
    return Group(row["name"], row["slots"], row["assignor"], row["generation"], row["balanced"], row["members"])


def _metadata(text: str) -> dict[str, Any]:
    """The metadata of a member; empty when it cannot be read, so that the other members can go on."""
    try:
        found: dict[str, Any] = load_json(text)
    except Unreadable:
        return {}
    return found
