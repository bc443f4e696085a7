"""The maintenance of one stream: new segments, retention and compaction."""

from __future__ import annotations

from penstock.postgres.database import Database
from penstock.streams import queries


async def maintain(database: Database, name: str) -> tuple[bool, int, int]:
    """Roll segments, apply retention and compact one stream. Returns (rolled, number retired, number compacted)."""
    rolled, retired, compacted = False, 0, 0
    while True:
        rolls, drops, compacts = await queries.maintain_stream(database, name)
        rolled, retired = rolled or rolls, retired + drops
        # Each call begins segments in the partitions that are not locked at that moment.
        if not rolls:
            break
    # Each call is a transaction that rewrites a bounded number of bytes.
    while compacts:
        rewritten = await queries.compact_stream(database, name)
        if not rewritten:
            break
        compacted += rewritten
    return rolled, retired, compacted
