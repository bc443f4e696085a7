"""Events that may end their workers: counted when a member is lost, handled alone, and set aside by the consumer's policy."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

from conftest import eventually
from penstock import Event, NewEvent, Penstock
from penstock.consuming import part
from penstock.testing import consumed, working

Sql: TypeAlias = "asyncpg.Connection[Any]"
SUSPECT = "update penstock.group_offsets set crashes = $1, crashed_at = next_offset"


@pytest.mark.parametrize("policy", ["retry", "skip", "dead-letter"])
async def test_an_event_that_ended_its_workers_twice_is_set_aside_as_the_policy_says(
    app: Penstock, sql: Sql, policy: Any
) -> None:
    orders = app.stream("orders", int, partitions=1)
    handled: list[int] = []

    @app.consumer(orders, group="g", on_failure=policy)
    async def handle(event: Event[int]) -> None:
        handled.append(event.data)

    await orders.append_many([13, 1, 2])
    await sql.execute("select penstock.declare_consumer_group('orders', 'g')")
    await sql.execute(SUSPECT, 4)
    async with working(app):
        if policy == "retry":
            aside = "select paused_because from penstock.group_offsets where quarantined"
            because = await eventually(lambda: sql.fetchval(aside), "the quarantine")
            assert because == "offset 0: Fail: it has ended its workers, twice while no other suspect was handled"
            assert handled == []
            # Who resumes it has mended it.
            await sql.execute("select penstock.resume_partitions('orders', 'g')")
            await consumed(orders, "g")
            assert handled == [13, 1, 2]
            assert await sql.fetchval("select crashes = 0 and crashed_at is null from penstock.group_offsets")
            return
        await consumed(orders, "g")
    assert handled == [1, 2]
    dead = await sql.fetch("select name from penstock.streams where name = 'orders.dead'")
    assert len(dead) == (policy == "dead-letter")


async def test_suspects_are_handled_one_by_one_until_they_are_past_the_place(
    app: Penstock, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "_NEAR", 5)
    orders = app.stream("orders", int, partitions=3)
    await orders.append_many([NewEvent(n, key=str(n)) for n in range(60)])
    await sql.execute("select penstock.declare_consumer_group('orders', 'g')")
    await sql.execute(SUSPECT, 2)
    await sql.execute("update penstock.group_offsets set crashes = 0, crashed_at = null where partition = 2")
    # What the database knows while an event of a suspect is handled: which one it would be.
    alone: list[tuple[int, int, list[tuple[int, int]]]] = []
    database = await app.database()

    @app.consumer(orders, group="g")
    async def handle(event: Event[int]) -> None:
        rows = await database.fetch("select partition, next_offset from penstock.group_offsets where tried")
        if event.partition != 2 and event.offset <= 5:
            alone.append((event.partition, event.offset, [(row["partition"], row["next_offset"]) for row in rows]))

    async with working(app):
        await consumed(orders, "g")
        acquitted = "select bool_and(crashes = 0 and not tried) from penstock.group_offsets"
        await eventually(lambda: sql.fetchval(acquitted), "the end of the trial")
    assert len(alone) == 12
    assert [tried for _, _, tried in alone] == [[(partition, offset)] for partition, offset, _ in alone]


async def test_a_lost_member_counts_where_its_events_can_have_caused_it(app: Penstock, sql: Sql) -> None:
    orders = app.stream("orders", int, partitions=4)
    await orders.append_many([NewEvent(n, key=str(n)) for n in range(60)])
    await sql.execute("select penstock.declare_consumer_group('orders', 'g')")
    # Nothing waits in partition 3; partition 2 is paused.
    await sql.execute(
        "update penstock.group_offsets set next_offset = bounds.next_offset from penstock.stream_bounds('orders') as bounds"
        " where bounds.partition = group_offsets.partition and bounds.partition = 3"
    )
    await sql.execute("update penstock.group_offsets set paused_at = now() where partition = 2")

    async def lose() -> list[tuple[int, int | None, bool]]:
        await sql.execute("update penstock.slots set owner = 'm', target = 'm'")
        await sql.execute("select penstock.lose_partitions('orders/g', 'm')")
        rows = await sql.fetch("select crashes, crashed_at, tried from penstock.group_offsets order by partition")
        return [tuple(row) for row in rows]

    quiet = (0, None, False)
    assert await lose() == [(1, 0, False), (1, 0, False), quiet, quiet]
    await sql.execute("update penstock.group_offsets set next_offset = 3 where partition = 1")
    assert await lose() == [(2, 0, False), (2, 3, False), quiet, quiet]
    # A further one without a trial says nothing new.
    assert await lose() == [(2, 0, False), (2, 3, False), quiet, quiet]
    await sql.execute("update penstock.group_offsets set tried = true, next_offset = 4 where partition = 1")
    assert await lose() == [(2, 0, False), (3, 4, False), quiet, quiet]
    # Another event: once.
    await sql.execute("update penstock.group_offsets set tried = true, next_offset = 5 where partition = 1")
    assert await lose() == [(2, 0, False), (3, 5, False), quiet, quiet]
    await sql.execute("update penstock.group_offsets set tried = true where partition = 1")
    assert await lose() == [(2, 0, False), (4, 5, False), quiet, quiet]
    # Slots that move are no crash.
    await sql.execute("update penstock.slots set owner = 'm', target = 'm'")
    await sql.execute("select penstock.vacate('orders/g', 'm', array[0], '{}')")
    assert await sql.fetchval("select crashes from penstock.group_offsets where partition = 0") == 2


async def test_a_commit_that_hangs_in_a_transaction_holds_up_no_eviction(app: Penstock, sql: Sql, url: str) -> None:
    orders = app.stream("orders", int, partitions=2)
    await orders.append_many([NewEvent(n, key=str(n)) for n in range(20)])
    await sql.execute("select penstock.declare_consumer_group('orders', 'g')")
    await sql.execute("update penstock.slots set owner = 'm', target = 'm', epoch = 1")
    await sql.execute("select penstock.begin_partitions('orders', 'g', 'm', '{0,1}', '{1,1}')")
    hanging = await asyncpg.connect(url)
    try:
        async with hanging.transaction():
            await hanging.execute("select penstock.commit_exactly('orders', 'g', 'm', 0, 1, 0, 1)")
            await sql.execute("set lock_timeout = '5s'")
            await sql.execute("select penstock.vacate('orders/g', 'm', null, '{}')")
            crashes = await sql.fetch("select crashes from penstock.group_offsets order by partition")
            assert [row["crashes"] for row in crashes] == [0, 1]
    finally:
        await hanging.close()
