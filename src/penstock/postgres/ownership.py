"""One typed function for each SQL function about groups, members and slots. No logic beyond turning rows into words.

Those that take a `Transaction` belong together: who changes a group locks it, reads it, and writes new targets before the commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import orjson

from penstock.errors import Unreadable
from penstock.payload import load_json
from penstock.postgres.database import Database, Transaction


@dataclass(frozen=True, slots=True)
class Group:
    """A group; while `balanced` is less than `generation` somebody has to compute targets."""

    name: str
    slots: int
    assignor: str
    generation: int
    balanced: int
    members: int


@dataclass(frozen=True, slots=True)
class Member:
    """A member, with how many slots it has."""

    id: str
    state: str
    metadata: dict[str, Any]
    age: int
    joined_at: datetime
    seen_at: datetime
    slots: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot: who has it, who is to have it, and under which epoch it was taken last; why its key is quarantined."""

    slot: int
    owner: str | None
    target: str | None
    epoch: int
    key: str | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    """The answer to a member's heartbeat.

    Attributes:
        known: False when it was evicted; the rest says nothing then.
        members: How many there are.
        balanced: False when somebody has to compute targets.
        dead_after_s: Silence after which others evict it, counted from when this heartbeat was sent or later.
        owned: What it has, and under which epochs.
        revoked: What of that it is to give up.
        available: What it may take.
    """

    known: bool
    members: int
    balanced: bool
    dead_after_s: float
    owned: dict[int, int]
    revoked: frozenset[int]
    available: frozenset[int]


async def declare_group(database: Database, name: str, slots: int, assignor: str) -> Group:
    """Create a group when there is none. Raises `InvalidInput`, `Conflict`."""
    return _group(await database.fetchrow("select * from penstock.declare_group($1, $2, $3)", name, slots, assignor))


async def lock_group(transaction: Transaction, name: str) -> Group:
    """The group, locked until the transaction ends. Raises `NotFound`."""
    return _group(await transaction.fetchrow("select * from penstock.lock_group($1)", name))


async def members(executor: Database | Transaction, name: str) -> list[Member]:
    """The members of a group, oldest first."""
    return [
        Member(row["id"], row["state"], _metadata(row["metadata"]), row["age"], row["joined_at"], row["seen_at"], row["slots"])
        for row in await executor.fetch("select * from penstock.group_members($1)", name)
    ]


async def slots(executor: Database | Transaction, name: str) -> list[Slot]:
    """The slots of a group, in order."""
    rows = await executor.fetch("select slot, owner, target, epoch, key, error from penstock.group_slots($1)", name)
    return [Slot(*tuple(row)) for row in rows]


async def quarantine_keys(transaction: Transaction, name: str, errors: Mapping[int, str]) -> None:
    """Note for which slots the rule of the application failed; the others are free of errors."""
    await transaction.fetch("select penstock.quarantine_keys($1, $2, $3)", name, list(errors), list(errors.values()))


async def release_keys(database: Database, name: str, key: str | None = None, after: timedelta = timedelta(0)) -> int:
    """Have the rule asked again about a quarantined key, or about all. Returns how many. Raises `NotFound`."""
    return int(await database.fetchval("select penstock.release_keys($1, $2, $3)", name, key, after))


async def has_unplaced(transaction: Transaction, name: str) -> bool:
    """Whether there are slots that no assignor has seen."""
    row = await transaction.fetchrow(
        "select exists (select from penstock.slots where group_name = $1 and not placed) as unplaced", name
    )
    return bool(row["unplaced"])


async def set_targets(transaction: Transaction, name: str, target: Mapping[int, str | None]) -> int:
    """Write what an assignor decided of the slots that it saw; None: nobody. Returns how many slots will move."""
    row = await transaction.fetchrow(
        "select penstock.set_targets($1, $2, $3) as moved", name, list(target.keys()), list(target.values())
    )
    return int(row["moved"])


async def join(
    transaction: Transaction, name: str, member: str, session: UUID, dead_after: timedelta, metadata: Mapping[str, Any]
) -> Group:
    """Become a member; the group stays locked. May be repeated with the same session.

    Raises `Conflict` when a live member has that id, `NotFound`, `InvalidInput`.
    """
    row = await transaction.fetchrow(
        "select * from penstock.join_group($1, $2, $3, $4, $5::jsonb)",
        name,
        member,
        session,
        dead_after,
        orjson.dumps(dict(metadata)).decode(),
    )
    return _group(row)


async def leave(transaction: Transaction, name: str, member: str, session: UUID) -> bool:
    """End a membership. False when it was none."""
    row = await transaction.fetchrow("select penstock.leave_group($1, $2, $3) as left", name, member, session)
    return bool(row["left"])


async def evict(transaction: Transaction, name: str) -> list[str]:
    """Remove the members that were silent for too long. Returns their ids; if there are some, the group is locked."""
    row = await transaction.fetchrow("select penstock.evict($1) as evicted", name)
    return list(row["evicted"])


async def set_metadata(transaction: Transaction, name: str, member: str, metadata: Mapping[str, Any]) -> Group:
    """Change what a member says of itself; the group stays locked. Raises `NotFound` when it was evicted."""
    row = await transaction.fetchrow(
        "select * from penstock.set_metadata($1, $2, $3::jsonb)", name, member, orjson.dumps(dict(metadata)).decode()
    )
    return _group(row)


async def drain_member(transaction: Transaction, name: str, member: str, drain: bool) -> Group:
    """Move a member out, or let it take part again; the group stays locked. Raises `NotFound`."""
    return _group(await transaction.fetchrow("select * from penstock.drain_member($1, $2, $3)", name, member, drain))


async def keep_alive(
    database: Database,
    worker: str | None,
    members: Sequence[tuple[str, str, UUID]],
    blocked_s: float | None,
    blocked_by: str | None,
) -> tuple[bool, list[float | None]]:
    """Keep a worker and memberships (group, member, session) alive. Returns whether the worker is known, and the silence that
    each membership may keep; None: it was evicted, or is locked at this moment.
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
    """Say that a member lives, and hear what it has, what to give up and what to take."""
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
    """Take free slots that are meant for the member. Returns those it got, with their epochs. Raises `NotFound`."""
    rows = await database.fetch("select * from penstock.take($1, $2, $3, $4)", name, member, session, wanted)
    return {row["slot"]: row["epoch"] for row in rows}


async def release(database: Database, name: str, member: str, held: Mapping[int, int]) -> None:
    """Give up slots that the member has under these epochs."""
    await database.fetch("select penstock.release($1, $2, $3, $4)", name, member, list(held.keys()), list(held.values()))


def _group(row: Any) -> Group:
    return Group(row["name"], row["slots"], row["assignor"], row["generation"], row["balanced"], row["members"])


def _metadata(text: str) -> dict[str, Any]:
    """What a member says of itself; nothing when that cannot be read, since the others go on with it."""
    try:
        found: dict[str, Any] = load_json(text)
    except Unreadable:
        return {}
    return found
