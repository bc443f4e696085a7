"""What a compaction costs: it rewrites nothing for nothing, and no more in one transaction than it is told."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import NewEvent, Penstock, Stream
from penstock.streams.maintenance import maintain

Sql: TypeAlias = "asyncpg.Connection[Any]"
SEGMENTS, KEYS = 6, 200


async def tables(sql: Sql) -> dict[int, str]:
    return {row["id"]: row["table_name"] for row in await sql.fetch("select id, table_name from penstock.segments order by id")}


async def filled(app: Penstock, sql: Sql, *, same_keys: bool) -> Stream[str]:
    """Closed segments, each with one event of each of its keys, and the open one."""
    stream = app.stream("prices", str, partitions=2, compact=True)
    for segment in range(SEGMENTS):
        await stream.append_many([NewEvent("x" * 500, key=f"k{n if same_keys else segment * KEYS + n}") for n in range(KEYS)])
        await sql.execute("select penstock.roll_segment('prices')")
    return stream


async def written(sql: Sql, call: str) -> tuple[int, int]:
    """What a call returns, and how many bytes of log the server has written meanwhile."""
    before = await sql.fetchval("select pg_current_wal_insert_lsn()")
    result = await sql.fetchval(call)
    return result, int(await sql.fetchval("select pg_current_wal_insert_lsn() - $1::pg_lsn", before))


async def state(stream: Stream[str]) -> set[tuple[int, int, str | None, Any]]:
    """The latest event of each key, as a reader from the beginning finds it."""
    latest = {}
    for partition in await stream.bounds():
        for event in await stream.read(partition, 0, 10_000):
            latest[event.key] = (partition, event.offset, event.key, event.appended_at)
    return set(latest.values())


async def test_segments_without_superseded_events_are_not_rewritten(app: Penstock, sql: Sql) -> None:
    await filled(app, sql, same_keys=False)
    before = await tables(sql)
    size = await sql.fetchval("select sum(size) from penstock.stream_segments('prices')")
    for _ in range(2):
        rewritten, log = await written(sql, "select penstock.compact_stream('prices')")
        assert rewritten == 0
        # Whatever else writes to the log at that time: it is not the stream once more.
        assert log < size / 2
    assert await tables(sql) == before
    assert await sql.fetchval("select count(*) from penstock.retired_segments") == 0


async def test_a_new_segment_does_not_have_the_clean_ones_rewritten(app: Penstock, sql: Sql) -> None:
    stream = await filled(app, sql, same_keys=False)
    await sql.execute("select penstock.compact_stream('prices')")
    before = await tables(sql)
    await stream.append_many([NewEvent("y", key="k0"), NewEvent("y", key="new"), NewEvent("y", key="new")])
    await sql.execute("select penstock.roll_segment('prices')")
    assert await sql.fetchval("select penstock.compact_stream('prices')") == 1
    after = await tables(sql)
    # The new segment has a superseded event. The one of k0 is not worth it yet: one of its two hundred.
    changed = [segment for segment, table in before.items() if after[segment] != table]
    assert changed == [max(before)]


@pytest.mark.parametrize(("bytes", "calls"), [(1, SEGMENTS - 1), (1 << 30, 1)])
async def test_a_call_rewrites_no_more_than_it_is_told(app: Penstock, sql: Sql, bytes: int, calls: int) -> None:
    stream = await filled(app, sql, same_keys=True)
    before = await state(stream)
    rewritten = []
    while done := await sql.fetchval("select penstock.compact_stream('prices', $1)", bytes):
        rewritten.append(done)
        # Each call is a transaction of its own, after which a reader finds what it found before, times included.
        assert await state(stream) == before
    # All but the last closed segment, whose events are the latest.
    assert sum(rewritten) == SEGMENTS - 1 and len(rewritten) == calls
    sizes = [row["size"] for row in await sql.fetch("select size from penstock.stream_segments('prices') order by segment")]
    assert max(sizes[: SEGMENTS - 1]) < sizes[SEGMENTS - 1]


async def test_a_limit_that_is_none_is_refused(app: Penstock, sql: Sql) -> None:
    await app.stream("prices", str, compact=True).declare()
    for wrong in (0, -1, None):
        with pytest.raises(asyncpg.PostgresError, match="number of bytes") as refused:
            await sql.execute("select penstock.compact_stream('prices', $1)", wrong)
        assert refused.value.sqlstate == "PS400"


async def test_a_worker_compacts_until_nothing_is_left(app: Penstock, sql: Sql) -> None:
    stream = await filled(app, sql, same_keys=True)
    before = await state(stream)
    _, _, compacted = await maintain(await app.database(), "prices")
    assert compacted == SEGMENTS - 1
    assert await state(stream) == before
    assert await sql.fetchval("select penstock.compact_stream('prices')") == 0
