"""Plans batches and their tasks. Nothing here does input or output.

`choose` ends a batch so that it holds at most a given number of jobs; `slices` cuts a batch for parallel tasks. All that they
need from the database are counts of jobs by transaction. A batch is determined by its two positions alone, so a restarted query
reads the same jobs again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias
from uuid import UUID

from penstock.spark.jobs.offsets import Position, Snapshot, Window, advance

Counts: TypeAlias = Sequence[tuple[int, int]]
"""Transactions in ascending order, and the number of jobs that each has archived."""


@dataclass(frozen=True, slots=True)
class Split:
    """The next transaction alone is larger than a batch, which therefore consists of its first jobs."""

    seen: Snapshot
    xid: int

    def at(self, after: UUID) -> Position:
        """The position behind the job `after` of that transaction."""
        return Position(self.seen, self.xid, after)


@dataclass(frozen=True, slots=True)
class Slice:
    """What one task reads: transactions from `low` to before `high`, or `only` those given; of a single one, a range of ids."""

    low: int
    high: int
    without: tuple[int, ...] = ()
    only: tuple[int, ...] = ()
    after: UUID | None = None
    until: UUID | None = None

    def as_range(self) -> dict[str, Any]:
        """The range in the form that `penstock.scan` takes. Numbers are text, since some JSON parsers do not keep 64 bits."""
        found: dict[str, Any] = {"low": str(self.low), "high": str(self.high)}
        if self.without:
            found["without"] = [str(xid) for xid in self.without]
        if self.only:
            found["only"] = [str(xid) for xid in self.only]
        if self.after is not None:
            found["after"] = str(self.after)
        if self.until is not None:
            found["until"] = str(self.until)
        return found


def choose(seen: Snapshot, now: Snapshot, counts: Counts, limit: int) -> Position | Split:
    """The end of the next batch: as many whole transactions as have at most `limit` jobs together.

    Args:
        seen: What has been read.
        now: A snapshot of the database.
        counts: The transactions between the two: all of them, or enough to exceed the limit.
        limit: Largest number of jobs in a batch.

    Returns:
        The end; a `Split` when the first transaction alone exceeds the limit.
    """
    total = 0
    for place, (xid, jobs) in enumerate(counts):
        total += jobs
        if total > limit:
            before = advance(seen, now, xid)
            return Split(before, xid) if place == 0 else Position(before)
    return Position(advance(seen, now, now.xmax))


def slices(batch: Window, counts: Counts, size: int, cuts: Mapping[int, Sequence[UUID]] | None = None) -> list[Slice]:
    """A batch, cut for tasks of about `size` jobs each.

    Args:
        batch: The transactions to read.
        counts: All transactions of the batch that have jobs, except its `last`.
        size: Approximate number of jobs of a task.
        cuts: Ids at which to cut large transactions.
    """
    cut: list[Slice] = []
    late = set(batch.late)
    group: list[int] = []
    gathered = 0

    def close() -> None:
        nonlocal gathered
        if group:
            low, high = group[0], group[-1] + 1
            if group[0] in late:
                cut.append(Slice(low, high, only=tuple(group)))
            else:
                cut.append(Slice(low, high, tuple(xid for xid in batch.without if low <= xid < high)))
        group.clear()
        gathered = 0

    for xid, jobs in counts:
        divided = (cuts or {}).get(xid)
        if xid == batch.part or divided:
            close()
            cut += _pieces(xid, batch.after if xid == batch.part else None, None, divided or ())
            continue
        # Late transactions are looked up one by one, so they do not share a range with the others.
        if group and (gathered + jobs > size or (xid in late) != (group[0] in late)):
            close()
        group.append(xid)
        gathered += jobs
    close()
    if batch.last is not None:
        cut += _pieces(batch.last, batch.since, batch.until, (cuts or {}).get(batch.last, ()))
    return cut


def _pieces(xid: int, after: UUID | None, until: UUID | None, at: Sequence[UUID]) -> list[Slice]:
    edges = [id for id in at if until is None or id < until]
    starts = [after, *edges]
    ends = [*edges, until]
    return [Slice(xid, xid + 1, after=low, until=high) for low, high in zip(starts, ends, strict=True)]


def even(total: int, parts: int) -> list[tuple[int, int]]:
    """`total` blocks in `parts` ranges whose sizes differ by at most one. There are fewer ranges when there are fewer blocks."""
    parts = max(1, min(parts, total))
    edges = [total * place // parts for place in range(parts + 1)]
    return [(low, high) for low, high in pairwise(edges) if high > low]
