"""All events of a stream, as the SQL functions give them."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import asyncpg

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def contents(sql: Sql, stream: str, partitions: int) -> dict[int, list[tuple[int, Any]]]:
    """All events by partition: (offset, data)."""
    rows = await sql.fetch(
        "select bounds.partition, event.event_offset, event.data"
        " from penstock.stream_bounds($1) as bounds"
        " cross join penstock.read_events($1, bounds.partition, bounds.first_offset, 100000) as event",
        stream,
    )
    found: dict[int, list[tuple[int, Any]]] = {partition: [] for partition in range(partitions)}
    for row in rows:
        found[row["partition"]].append((row["event_offset"], None if row["data"] is None else json.loads(row["data"])))
    return found
