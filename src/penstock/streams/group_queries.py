"""One typed function for each SQL function about consumer groups. No logic beyond converting rows to models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import orjson

from penstock.core.encryption import Keyring, owner_of_events
from penstock.postgres.database import Database
from penstock.streams.group_models import Lag, opened_lag

_NO_KEYS = Keyring()


@dataclass(frozen=True, slots=True)
class Begun:
    """The position of a group in a partition, see `penstock.begin_partitions`."""

    next_offset: int
    revision: int
    paused: bool
    waits: bool
    crashes: int = 0
    crashed_at: int | None = None
    doubt: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit: all events of a partition before `next_offset` are done."""

    partition: int
    epoch: int
    revision: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a commit; `done` is False when the partition has to be begun again, or has another owner."""

    done: bool
    paused: bool


async def declare_group(database: Database, name: str, group: str, start: str, *, retry: bool = False) -> str:
    """Create a consumer group unless it exists. Returns the name of the membership group of its members."""
    return str(await database.fetchval("select penstock.declare_consumer_group($1, $2, $3)", name, group, start, retry=retry))


async def begin_partitions(database: Database, name: str, group: str, member: str, epochs: Mapping[int, int]) -> dict[int, Begun]:
    """Begin to consume partitions, {partition: epoch}. Partitions that the member does not own are left out."""
    rows = await database.fetch(
        "select * from penstock.begin_partitions($1, $2, $3, $4, $5)",
        name,
        group,
        member,
        list(epochs.keys()),
        list(epochs.values()),
    )
    return {row["partition"]: Begun(*tuple(row)[1:]) for row in rows}


async def try_partition(
    database: Database, name: str, group: str, partition: int, epoch: int, *, tried: int, acquitted: bool = False
) -> bool:
    """Record how many events of a suspect partition are on trial now; 0: none. Returns False when the epoch has changed."""
    query = "select penstock.try_partition($1, $2, $3, $4, $5, $6)"
    return bool(await database.fetchval(query, name, group, partition, epoch, tried, acquitted, retry=True))


async def commit_offsets(
    database: Database, name: str, group: str, member: str, commits: Sequence[Commit]
) -> dict[int, Committed]:
    """Commit offsets, one for each partition."""
    rows = await database.fetch(
        "select * from penstock.commit_offsets($1, $2, $3, $4, $5, $6, $7)",
        name,
        group,
        member,
        [commit.partition for commit in commits],
        [commit.epoch for commit in commits],
        [commit.revision for commit in commits],
        [commit.next_offset for commit in commits],
    )
    return {row["partition"]: Committed(row["committed"], row["paused"]) for row in rows}


def commit_as_json(group: str, member: str, commit: Commit, first_offset: int) -> str:
    """A commit of the events from `first_offset` on, as the document of `penstock.commit_json`."""
    return orjson.dumps({"group": group, "member": member, **asdict(commit), "first_offset": first_offset}).decode()


async def dead_letter(
    database: Database, name: str, group: str, member: str, commit: Commit, first_offset: int, error: str
) -> int:
    """Append the events from `first_offset` up to the commit's offset to the dead letters, and commit. Raises `Conflict`."""
    return int(
        await database.fetchval(
            "select penstock.dead_letter($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            name,
            group,
            member,
            commit.partition,
            commit.epoch,
            commit.revision,
            first_offset,
            commit.next_offset,
            error,
        )
    )


async def quarantine_partition(database: Database, name: str, group: str, member: str, commit: Commit, error: str) -> None:
    """Commit, and pause the partition there. Raises `Conflict` when the member no longer owns it."""
    await database.fetch(
        "select penstock.quarantine_partition($1, $2, $3, $4, $5, $6, $7, $8)", name, group, member, *_place(commit), error
    )


async def note_failure(database: Database, name: str, group: str, member: str, commit: Commit, attempt: int, error: str) -> bool:
    """Record that a handler fails at the event `commit.next_offset`. False: the partition has another owner, or it is done."""
    return bool(await database.fetchval(
        "select penstock.note_failure($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        name, group, member, commit.partition, commit.epoch, commit.revision, commit.next_offset, attempt, error,
    ))  # fmt: skip


async def halt_partition(database: Database, name: str, group: str, member: str, commit: Commit, error: str) -> None:
    """Commit, and record why the consumer halts there. Raises `Conflict` when the member no longer owns the partition."""
    await database.fetch(
        "select penstock.halt_partition($1, $2, $3, $4, $5, $6, $7, $8)", name, group, member, *_place(commit), error
    )


def _place(commit: Commit) -> tuple[int, int, int, int]:
    return commit.partition, commit.epoch, commit.revision, commit.next_offset


async def replay_dead(
    database: Database, name: str, limit: int, offsets: Mapping[int, int] | None, before: Sequence[int] | None = None
) -> int:
    """Append dead letters to the stream again, only those `before` an offset of each partition. Returns their number."""
    given = (None, None) if offsets is None else (list(offsets.keys()), list(offsets.values()))
    return int(await database.fetchval("select penstock.replay_dead($1, $2, $3, $4, $5)", name, limit, *given, before))


async def seek_group(database: Database, name: str, group: str, offsets: Mapping[int, int]) -> int:
    """Move a group to other offsets. Raises `NotFound`, `InvalidInput`."""
    query = "select penstock.seek_group($1, $2, $3, $4)"
    return int(await database.fetchval(query, name, group, list(offsets.keys()), list(offsets.values())))


async def pause_partitions(
    database: Database, name: str, group: str, partitions: Sequence[int] | None, reason: str | None
) -> int:
    """Pause partitions of a group. Returns how many were not paused before."""
    return int(await database.fetchval("select penstock.pause_partitions($1, $2, $3, $4)", name, group, partitions, reason))


async def resume_partitions(database: Database, name: str, group: str, partitions: Sequence[int] | None) -> int:
    """End a pause or quarantine. Returns how many partitions were paused."""
    return int(await database.fetchval("select penstock.resume_partitions($1, $2, $3)", name, group, partitions))


async def lag(database: Database, name: str, group: str | None, keyring: Keyring | None = None) -> list[Lag]:
    """The lag of a group (None: of all groups) in each partition; what `keyring` does not open of errors is "encrypted"."""
    rows = await database.fetch("select * from penstock.group_lag($1, $2)", name, group)
    return [opened_lag(Lag(*row), owner_of_events(name), keyring or _NO_KEYS) for row in rows]


async def drop_group(database: Database, name: str, group: str) -> None:
    """Drop a consumer group. Raises `NotFound`, `Conflict` while it has members."""
    await database.fetch("select penstock.drop_consumer_group($1, $2)", name, group)
