"""The arithmetic of positions in the archive. Nothing here does input or output.

A snapshot says of every transaction whether it had ended when the snapshot was taken: transactions below `xmax` that are not
`running` had. The position of a reader is a snapshot: the jobs that it sees have been read. A batch is the jobs that one snapshot
sees and an earlier one did not. Nothing is therefore skipped, and a long transaction delays only itself.

A batch may be cut anywhere: `advance` makes the snapshot in between. No database took that snapshot, but it serves as well as one
that a database took. A transaction that is larger than a batch is cut by the ids of its jobs, the second part of a position.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from penstock.errors import InvalidInput

RESTORE = "restore"
"""Beside a position, a checkpoint has the number of the last restore of the database under this name."""
_TEXT = re.compile(r"(\d+):(\d+):((?:\d+(?:,\d+)*)?)")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The set of transactions that have ended: all below `xmax` except the `running` ones (in ascending order)."""

    xmax: int
    running: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(xid >= self.xmax for xid in self.running) or list(self.running) != sorted(set(self.running)):
            raise InvalidInput(f"not a snapshot: {self.xmax} with {self.running} running")

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """From PostgreSQL's text, `xmin:xmax:running,...`. Raises `InvalidInput`."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise InvalidInput(f"not a snapshot: {text[:100]!r}", hint="It looks like 100:105:101,103.")
        running = tuple(int(xid) for xid in match.group(3).split(",") if xid)
        return cls(int(match.group(2)), running)

    def __str__(self) -> str:
        xmin = self.running[0] if self.running else self.xmax
        return f"{xmin}:{self.xmax}:{','.join(map(str, self.running))}"

    def sees(self, xid: int) -> bool:
        """Whether the transaction had ended."""
        return xid < self.xmax and xid not in self.running


@dataclass(frozen=True, slots=True)
class Position:
    """What has been read: the jobs that `seen` sees, and of the transaction `part` the jobs up to the id `after`."""

    seen: Snapshot
    part: int | None = None
    after: UUID | None = None

    def as_json(self) -> dict[str, Any]:
        """The form that Spark keeps in its checkpoint."""
        document: dict[str, Any] = {"seen": str(self.seen)}
        if self.part is not None:
            document |= {"part": str(self.part), "after": str(self.after)}
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any] | str) -> Position:
        """Back from `as_json`, or from the text of it. Raises `InvalidInput`."""
        try:
            parsed = json.loads(document) if isinstance(document, str) else document
            part = parsed.get("part")
            return cls(
                Snapshot.parse(parsed["seen"]),
                None if part is None else int(part),
                None if part is None else UUID(parsed["after"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InvalidInput(
                f"not a position in the archive: {str(document)[:200]}", hint='It looks like {"seen": "100:105:101"}.'
            ) from None


@dataclass(frozen=True, slots=True)
class Window:
    """The transactions between two positions: the later one has read them, and the earlier one had not.

    Attributes:
        late: The transactions that were running at the earlier position.
        low: The first of the others.
        high: One past the last of the others.
        without: The transactions between `low` and `high` that do not belong to the batch, since they have not ended.
        part: One of the transactions whose first jobs were read before; only those after `after` belong to the batch.
        after: See `part`.
        last: One more transaction, of which only the jobs after `since` and up to `until` belong to the batch.
        since: See `last`; None: from its first job.
        until: See `last`.
    """

    late: tuple[int, ...]
    low: int
    high: int
    without: tuple[int, ...]
    part: int | None = None
    after: UUID | None = None
    last: int | None = None
    since: UUID | None = None
    until: UUID | None = None


def window(start: Position, end: Position) -> Window:
    """The transactions between two positions.

    Raises:
        InvalidInput: The second one is not later: the database was restored from a backup, or the checkpoint is that of another
            database.
    """
    if end.seen.xmax < start.seen.xmax:
        raise InvalidInput(
            f"the archive ends at transaction {end.seen.xmax}, before position {start.seen.xmax}",
            hint="The database was restored or replaced, or the checkpoint belongs to another one: see docs/restore.md.",
        )
    late = tuple(xid for xid in start.seen.running if end.seen.sees(xid))
    without = tuple(xid for xid in end.seen.running if xid >= start.seen.xmax)
    same = start.part is not None and start.part == end.part
    return Window(
        late,
        start.seen.xmax,
        end.seen.xmax,
        without,
        None if same else start.part,
        None if same else start.after,
        end.part,
        start.after if same else None,
        end.after,
    )


def check_restored(position: Position, noted: int, restored: Sequence[tuple[int, int]]) -> None:
    """Raise `InvalidInput` for a position that has seen transactions which a restore of the database has lost.

    Args:
        position: The position.
        noted: Number of the last restore before the position was noted; 0: none.
        restored: The restores, and the next transaction of the database after each.
    """
    for number, next_xid in restored:
        if number > noted and position.seen.xmax > next_xid:
            raise InvalidInput(
                f"the archive was read up to transaction {position.seen.xmax}, and the database was restored to a time at which"
                f" it ended at {next_xid}",
                hint="See docs/restore.md: penstock restore check --checkpoint; for a lake: penstock restore lake",
            )


def advance(seen: Snapshot, until: Snapshot, below: int) -> Snapshot:
    """The snapshot that sees what `seen` sees, and the transactions lower than `below` that `until` sees."""
    xmax = max(seen.xmax, min(below, until.xmax))
    held = [xid for xid in seen.running if not (until.sees(xid) and xid < below)]
    new = [xid for xid in until.running if seen.xmax <= xid < xmax]
    return Snapshot(xmax, tuple(sorted(held + new)))


def finish(seen: Snapshot, xid: int) -> Snapshot:
    """The snapshot that sees what `seen` sees, and the transaction `xid`."""
    if xid < seen.xmax:
        return Snapshot(seen.xmax, tuple(running for running in seen.running if running != xid))
    return Snapshot(xid + 1, (*seen.running, *range(seen.xmax, xid)))
