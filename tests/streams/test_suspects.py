"""Events that may crash their workers: counted when a member is lost, handled alone, and treated by the failure policy."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Backoff, Batch, Event, NewEvent, OnFailure, Penstock
from penstock.streams.partitioner import partition_of
from penstock.testing import consumed, running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
SUSPECT = "update penstock.group_offsets set crashes = $1, crashed_at = next_offset"


@pytest.mark.parametrize("policy", ["retry", "skip", "dead-letter"])
async def test_an_event_that_ended_its_workers_three_times_is_set_aside_as_the_policy_says(
    app: Penstock, sql: Sql, policy: Any
) -> None:
    orders = app.stream("orders", int, partitions=1)
    handled: list[int] = []

    @orders.consumer(group="g", on_failure=policy)
    async def handle(event: Event[int]) -> None:
        handled.append(event.data)

    await orders.append_many([13, 1, 2])
    await sql.execute("select penstock.declare_consumer_group('orders', 'g')")
    await sql.execute(SUSPECT, 5)
    async with running_worker(app):
        if policy == "retry":
            aside = "select pause_reason from penstock.group_offsets where quarantined"
            because = await eventually(lambda: sql.fetchval(aside), "the quarantine")
            assert because == "offset 0: Fail: it has crashed its workers, three times while no other suspect was handled"
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


# Of the place where members were lost nothing more is known: trials grow. Among five events it is known: one by one.
@pytest.mark.parametrize(("doubt", "sizes"), [(1000, [1, 2, 4, 8, 5]), (5, [1, 1, 1, 1, 1])])
async def test_suspects_are_on_trial_one_at_a_time_until_they_are_past_the_place(
    app: Penstock, sql: Sql, doubt: int, sizes: list[int]
) -> None:
    orders = app.stream("orders", int, partitions=3)
    first, second = (next(str(n) for n in range(99) if partition_of(str(n), 3) == at) for at in (0, 1))
    await orders.append_many([NewEvent(n, key=key) for n in range(20) for key in (first, second)])
    await sql.execute("select penstock.declare_consumer_group('orders', 'g')")
    await sql.execute(SUSPECT, 2)
    await sql.execute("update penstock.group_offsets set doubt = $1", doubt)
    # What the database knows while events of a suspect are handled: which ones they would be.
    trials: list[tuple[int, int, int, list[tuple[int, int, int]]]] = []
    database = await app.database()

    @orders.consumer(group="g", max_batch_size=100)
    async def handle(batch: Batch[int]) -> None:
        rows = await database.fetch("select partition, next_offset, tried from penstock.group_offsets where tried > 0")
        if rows:
            trials.append((batch.partition, batch.first_offset, len(batch), [tuple(row) for row in rows]))

    async with running_worker(app):
        await consumed(orders, "g")
        over = "select bool_and(tried = 0) from penstock.group_offsets"
        await eventually(lambda: sql.fetchval(over), "the end of the trials")
    for at in (0, 1):
        assert [size for partition, _, size, _ in trials if partition == at] == sizes
    assert [tried for _, _, _, tried in trials] == [[(partition, offset, size)] for partition, offset, size, _ in trials]
    acquitted = await sql.fetchval(
        "select bool_and(crashes = 0 and doubt = 1000) from penstock.group_offsets where partition < 2"
    )
    assert acquitted == (doubt == 5), "they are suspects until they are past the place"


async def test_a_suspect_whose_handler_fails_holds_up_no_other(app: Penstock, sql: Sql) -> None:
    slow, fine = app.stream("slow", int, partitions=1), app.stream("fine", int, partitions=1)
    for stream in (slow, fine):
        await stream.declare()
        await sql.execute("select penstock.declare_consumer_group($1, 'g')", stream.name)
    await sql.execute(SUSPECT, 2)
    await slow.append(0)

    @slow.consumer(group="g", on_failure=OnFailure(backoff=Backoff(base=timedelta(hours=1), cap=timedelta(hours=1))))
    async def fail(event: Event[int]) -> None:
        raise ValueError(event.data)

    @fine.consumer(group="g")
    async def handle(event: Event[int]) -> None: ...

    async with running_worker(app):
        failing = "select exists (select from penstock.group_offsets where failing_since is not null)"
        await eventually(lambda: sql.fetchval(failing), "the failure")
        await fine.append_many(range(3))
        await consumed(fine, "g")


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

    async def lose() -> list[tuple[int, int | None, int]]:
        await sql.execute("update penstock.slots set owner = 'm', target = 'm'")
        await sql.execute("select penstock.lose_partitions('orders/g', 'm')")
        rows = await sql.fetch("select crashes, crashed_at, doubt from penstock.group_offsets order by partition")
        return [tuple(row) for row in rows]

    async def crashes() -> list[int]:
        return [row["crashes"] for row in await sql.fetch("select crashes from penstock.group_offsets order by partition")]

    quiet = (0, None, 1000)
    assert await lose() == [(1, 0, 1000), (1, 0, 1000), quiet, quiet]
    await sql.execute("update penstock.group_offsets set next_offset = 3 where partition = 1")
    assert await lose() == [(2, 0, 1000), (2, 3, 1000), quiet, quiet]
    # A further one without a trial says nothing new. Of four on trial it is one.
    assert await lose() == [(2, 0, 1000), (2, 3, 1000), quiet, quiet]
    await sql.execute("update penstock.group_offsets set tried = 4 where partition = 1")
    assert await lose() == [(2, 0, 1000), (2, 3, 4), quiet, quiet]
    await sql.execute("update penstock.group_offsets set tried = 1, next_offset = 4 where partition = 1")
    assert await lose() == [(2, 0, 1000), (3, 4, 1), quiet, quiet]
    # Another event: once.
    await sql.execute("update penstock.group_offsets set tried = 1, next_offset = 5 where partition = 1")
    assert await lose() == [(2, 0, 1000), (3, 5, 1), quiet, quiet]
    await sql.execute("update penstock.group_offsets set tried = 1 where partition = 1")
    assert await lose() == [(2, 0, 1000), (4, 5, 1), quiet, quiet]
    # A member that left, one that was lost with its node, and one that was lost with others: nothing.
    await sql.execute("update penstock.group_offsets set tried = 1 where partition = 1")
    await sql.execute("""select penstock.end_owned_work('orders/g', 'm', null, '{"type": "WorkerLeft"}')""")
    assert await crashes() == [2, 4, 0, 0]
    lost = (
        "insert into penstock.lost_workers"
        " select id, id, 'h', null, now() - interval '1 hour', now() - interval '9 s', now(), now(), null, $2"
        " from unnest($1::text[]) as id"
    )
    await sql.execute(lost, ["m"], False)
    await sql.execute("""select penstock.end_owned_work('orders/g', 'm', null, '{"type": "WorkerLost"}')""")
    assert await crashes() == [2, 4, 0, 0]
    await sql.execute("delete from penstock.lost_workers")
    await sql.execute(lost, ["m", "n"], True)
    assert await lose() == [(2, 0, 1000), (4, 5, 1), quiet, quiet]
    await sql.execute("delete from penstock.lost_workers where id = 'n'")
    await sql.execute("update penstock.group_offsets set tried = 1 where partition = 1")
    assert await lose() == [(2, 0, 1000), (5, 5, 1), quiet, quiet]
    # Slots that move are no crash.
    await sql.execute("update penstock.slots set owner = 'm', target = 'm'")
    await sql.execute("select penstock.revoke_slots('orders/g', 'm', array[0], '{}')")
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
            await sql.execute("select penstock.revoke_slots('orders/g', 'm', null, '{}')")
            crashes = await sql.fetch("select crashes from penstock.group_offsets order by partition")
            assert [row["crashes"] for row in crashes] == [0, 1]
    finally:
        await hanging.close()
