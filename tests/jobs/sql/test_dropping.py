"""Dropping job types and pools through SQL: what is refused, what is left, and that no job loses its type."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest

from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
RUN = "jobs of ship run, or other transactions work with them"
LOOKED = (
    "select look_at > penstock.clock() from penstock.dropped_types"
    " cross join lateral (select count(*) from penstock.recover()) as recovered"
)
"""Whether maintenance, which this runs, no longer looks for jobs of the dropped type each time."""
OF_TYPES = ["type_priorities", "large_payloads", "rate_windows", "place_waiters", "leases", "unique_periods", "handlers", "jobs"]
OF_POOLS = [*OF_TYPES, "pools", "key_weights", "paused_keys", "standing_jobs", "standing_messages"]


@pytest.fixture(params=["plain", "pool"])
async def kind(request: pytest.FixtureRequest, sql: Sql) -> str:
    """A job type `ship`, plain or a pool."""
    if request.param == "pool":
        await sql.execute("select penstock.declare_pool('ship', '{\"slots\": 4}')")
    else:
        await sql.execute("select penstock.create_job_type('ship')")
    return str(request.param)


async def drop(sql: Sql, kind: str, *, force: bool = False) -> None:
    await sql.execute(f"select penstock.{'drop_pool' if kind == 'pool' else 'drop_job_type'}('ship', $1)", force)


async def refusal(sql: Sql, kind: str, *, force: bool = False) -> str:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await drop(sql, kind, force=force)
    assert refused.value.sqlstate == "PS409", refused.value
    return str(refused.value)


async def enqueue(sql: Sql, kind: str, name: str = "ship", **options: Any) -> UUID:
    id = uuid4()
    key = "acme" if kind == "pool" else None
    await sql.execute(
        "select penstock.enqueue($1, p_id => $2, p_key => $3, p_run_after => $4)", name, id, key, options.get("run_after")
    )
    return id


async def run(sql: Sql, kind: str) -> tuple[UUID, int]:
    """Claim a job, as the owner of its slot in a pool."""
    if kind == "pool":
        await sql.execute("select penstock.join_group('ship', 'w', gen_random_uuid())")
        await sql.execute("update penstock.slots set owner = 'w', target = 'w', epoch = 1")
        job = await sql.fetchrow("select * from penstock.claim_keys('w', 'ship', '{0,1,2,3}', '{1,1,1,1}', 1)")
    else:
        job = await sql.fetchrow("select * from penstock.claim('w', '{ship}', 1)")
    return job["id"], job["lease"]


async def left(sql: Sql, tables: list[str]) -> dict[str, int]:
    counts = {table: await sql.fetchval(f"select count(*) from penstock.{table} where name = 'ship'") for table in tables}
    return {table: count for table, count in counts.items() if count}


async def ended(sql: Sql) -> dict[UUID, tuple[str, str | None]]:
    return {
        id: (status, reason)
        for id, status, reason in await sql.fetch("select id, status::text, reason from penstock.archived_jobs")
    }


async def test_nothing_is_left_of_a_dropped_type_but_its_archive(sql: Sql, kind: str) -> None:
    other = "select penstock.create_job_type('other')"
    await sql.execute(other)
    await sql.execute("select penstock.enqueue('other')")
    changed = '{"rate_limit": 1000, "rate_period": "1 minute"}'
    await sql.execute("select penstock.change_job_type('ship', $1::jsonb)", changed)
    id = await enqueue(sql, kind)
    if kind == "plain":
        _, lease = await run(sql, kind)
        await sql.fetch("select * from penstock.settle(array[$1::uuid], '{1}', array[$2::bigint])", id, lease)
    else:
        await sql.execute("select penstock.cancel($1)", id)
        await sql.execute("select penstock.set_weight('ship', 'acme', 3), penstock.pause_key('ship', 'acme')")
    await drop(sql, kind)
    assert await left(sql, OF_POOLS) == {}
    assert (
        await sql.fetchval("select count(*) from penstock.groups") + await sql.fetchval("select count(*) from penstock.slots")
        == 0
    )
    assert set(await ended(sql)) == {id}
    assert [tuple(row) for row in await sql.fetch("select name from penstock.queued_jobs")] == [("other",)]
    with pytest.raises(asyncpg.PostgresError, match="no such (job type|pool): ship") as refused:
        await drop(sql, kind)
    assert refused.value.sqlstate == "PS404"
    with pytest.raises(asyncpg.PostgresError, match="no such job type: ship"):
        await enqueue(sql, kind)


async def test_what_waits_is_cancelled_only_when_forced(sql: Sql, kind: str) -> None:
    later = await sql.fetchval("select now() + interval '1 day'")
    ids = {await enqueue(sql, kind), await enqueue(sql, kind, run_after=later)}
    assert "jobs of ship wait" in await refusal(sql, kind)
    assert await ended(sql) == {}
    await drop(sql, kind, force=True)
    assert await ended(sql) == dict.fromkeys(ids, ("cancelled", "dropped"))
    assert await left(sql, [*OF_POOLS, "queued_jobs"]) == {}


@pytest.mark.parametrize("force", [False, True])
async def test_a_type_is_not_dropped_under_jobs_that_run(sql: Sql, force: bool) -> None:
    await sql.execute("select penstock.create_job_type('ship')")
    id = await enqueue(sql, "plain")
    _, lease = await run(sql, "plain")
    assert RUN in await refusal(sql, "plain", force=force)
    await sql.fetch("select * from penstock.settle(array[$1::uuid], '{1}', array[$2::bigint])", id, lease)
    await drop(sql, "plain", force=force)
    assert await ended(sql) == {id: ("succeeded", None)}


async def test_a_pool_is_not_dropped_under_its_workers(sql: Sql) -> None:
    await sql.execute("select penstock.declare_pool('ship', '{\"slots\": 4}')")
    await enqueue(sql, "pool")
    await run(sql, "pool")
    for force in (False, True):
        assert "pool ship has workers" in await refusal(sql, "pool", force=force)
    # A worker that is silent does not hold it up, but the job that it runs does, until its attempt has been ended.
    await sql.execute("select set_config('penstock.clock', (now() + interval '1 hour')::text, false)")
    assert RUN in await refusal(sql, "pool", force=True)
    await sql.execute("select penstock.leave_group('ship', 'w', session) from penstock.members")
    await drop(sql, "pool", force=True)
    assert list((await ended(sql)).values()) == [("cancelled", "dropped")]


async def test_standing_jobs_go_with_a_pool_only_when_forced(sql: Sql) -> None:
    await sql.execute("select penstock.declare_pool('ship', '{\"slots\": 4}')")
    await sql.execute("select penstock.start_standing('ship', 'acme', '1')")
    await sql.execute("select penstock.notify_standing('ship', 'acme', '2')")
    assert "pool ship has standing jobs" in await refusal(sql, "pool")
    await drop(sql, "pool", force=True)
    assert await left(sql, OF_POOLS) == {}


@pytest.mark.parametrize(
    ("made_by", "words"),
    [
        ("select penstock.declare_pool('ship')", "ship is a pool"),
        ("select penstock.declare_schedule('ship', 'every', '60', now(), 'job'), penstock.create_job_type('ship')", "a schedule"),
    ],
)
async def test_types_that_something_else_needs_stay(sql: Sql, made_by: str, words: str) -> None:
    await sql.execute(made_by)
    assert words in await refusal(sql, "plain", force=True)


async def test_the_queue_of_a_subscriber_and_a_pool_to_which_a_topic_forwards_stay(sql: Sql) -> None:
    await sql.execute("select penstock.declare_topic('memos'), penstock.declare_pool('ship', '{\"slots\": 4}')")
    await sql.execute("select penstock.subscribe('memos', 'desk')")
    with pytest.raises(asyncpg.PostgresError, match="is the queue of a subscriber of topic memos") as refused:
        await sql.execute("select penstock.drop_job_type('memos_desk', true)")
    assert refused.value.sqlstate == "PS409"
    await sql.execute(
        "insert into penstock.subscriptions (topic, client_id, queue, key, after_seq, created_at)"
        " values ('memos', 'x', 'ship', 'acme', 0, now())"
    )
    assert "topic memos has a subscription that forwards to ship" in await refusal(sql, "pool", force=True)


async def test_too_many_jobs_are_to_be_purged_first(sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('ship')")
    await sql.execute("select penstock.enqueue_many('ship', array_fill('{}'::jsonb, array[10001]))")
    with pytest.raises(asyncpg.PostgresError, match="more than 10000 jobs of ship wait or run") as refused:
        await drop(sql, "plain", force=True)
    assert "penstock.start_operation('purge', '{\"name\": \"ship\"}')" in (refused.value.hint or "")
    await sql.execute("select penstock.cancel(id) from penstock.queued_jobs limit 1")
    await drop(sql, "plain", force=True)
    assert await sql.fetchval("select count(*) from penstock.archived_jobs") == 10_001


async def test_a_job_that_is_enqueued_while_its_type_is_dropped_ends_as_cancelled(sql: Sql, kind: str, url: str) -> None:
    other = await asyncpg.connect(url)
    try:
        transaction = other.transaction()
        await transaction.start()
        late = await enqueue(other, kind)
        await drop(sql, kind)
        # Maintenance in the meantime does not forget the name.
        await sql.execute("select set_config('penstock.clock', (now() + interval '2 hours')::text, false)")
        await sql.fetch("select penstock.recover()")
        await transaction.commit()
        await sql.fetch("select penstock.recover()")
        assert await ended(sql) == {late: ("cancelled", "dropped")}
        await eventually(lambda: sql.fetchval(LOOKED), "maintenance looks less often")
        await sql.execute("select set_config('penstock.clock', (now() + interval '367 days')::text, false)")
        await eventually(lambda: forgotten(sql), "the name is forgotten after a year")
    finally:
        await other.close()


async def test_a_transaction_that_read_before_a_drop_and_writes_hours_later_leaves_no_job(sql: Sql, kind: str, url: str) -> None:
    other = await asyncpg.connect(url)
    try:
        transaction = other.transaction(isolation="repeatable_read")
        await transaction.start()
        # It has read, and written nothing: the number of no transaction tells of it.
        assert await other.fetchval("select count(*) from penstock.jobs") == 1
        await drop(sql, kind)
        await sql.execute("select set_config('penstock.clock', (now() + interval '2 hours')::text, false)")
        await eventually(lambda: sql.fetchval(LOOKED), "maintenance looks less often")
        late = await enqueue(other, kind)
        await transaction.commit()
        await sql.execute("select set_config('penstock.clock', (now() + interval '4 hours')::text, false)")
        await sql.fetch("select penstock.recover()")
        assert await ended(sql) == {late: ("cancelled", "dropped")}
        assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 0
    finally:
        await other.close()


@pytest.mark.parametrize("hours", [0, 2, 24])
async def test_the_error_of_a_late_enqueue_says_that_the_type_was_dropped_and_what_to_do(sql: Sql, kind: str, hours: int) -> None:
    await drop(sql, kind)
    for passed in range(hours + 1):
        clock = "select set_config('penstock.clock', (now() + $1::integer * interval '1 hour')::text, false)"
        await sql.execute(clock, passed)
        await sql.fetch("select penstock.recover()")
    declare = "declare_pool('ship', p_again => false)" if kind == "pool" else "declare_job_type('ship', p_again => false)"
    for call in ("enqueue('ship', p_key => 'acme')", declare):
        with pytest.raises(asyncpg.PostgresError, match="no such job type: ship, it was dropped at 20") as refused:
            await sql.execute(f"select penstock.{call}")
        assert refused.value.sqlstate == "PS404"
        assert "penstock declare MODULE:APP" in (refused.value.hint or "")
    assert await left(sql, ["jobs", "pools"]) == {}
    # A declaration of its own creates it again.
    await sql.execute(f"select penstock.{declare.replace('false', 'true')}")
    await enqueue(sql, kind)


async def test_a_type_that_never_was_is_created_by_any_declaration(sql: Sql) -> None:
    await sql.execute("select penstock.declare_job_type('bill', p_again => false)")
    await sql.execute("select penstock.declare_pool('tenants', p_again => false)")
    assert await sql.fetchval("select count(*) from penstock.jobs") == 2


async def forgotten(sql: Sql) -> bool:
    await sql.fetch("select penstock.recover()")
    return not await sql.fetchval("select count(*) from penstock.dropped_types")


async def test_a_type_that_is_created_again_has_the_jobs_that_are_enqueued_for_it(sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('ship')")
    await drop(sql, "plain")
    await sql.execute("select penstock.create_job_type('ship')")
    id = await enqueue(sql, "plain")
    await sql.fetch("select penstock.recover()")
    assert (await run(sql, "plain"))[0] == id
    assert await forgotten(sql)


async def test_a_claim_that_is_under_way_holds_a_drop_up(sql: Sql, url: str) -> None:
    await sql.execute("select penstock.create_job_type('ship')")
    id = await enqueue(sql, "plain")
    other = await asyncpg.connect(url)
    try:
        transaction = other.transaction()
        await transaction.start()
        _, lease = await run(other, "plain")
        assert RUN in await refusal(sql, "plain", force=True)
        await transaction.commit()
        assert RUN in await refusal(sql, "plain", force=True)
        await other.fetch("select * from penstock.settle(array[$1::uuid], '{1}', array[$2::bigint])", id, lease)
        await drop(sql, "plain")
    finally:
        await other.close()


async def test_types_are_dropped_and_created_at_the_same_time_as_jobs_are_enqueued_and_none_is_lost(sql: Sql, url: str) -> None:
    """Whatever was acknowledged ends, or waits in a type that is there."""
    sent: list[UUID] = []
    connections = [await asyncpg.connect(url) for _ in range(3)]

    async def produce(connection: Sql) -> None:
        for _ in range(100):
            try:
                sent.append(await enqueue(connection, "plain"))
            except asyncpg.PostgresError as error:
                assert error.sqlstate == "PS404", error

    try:
        work = asyncio.gather(*(produce(connection) for connection in connections))
        while not work.done():
            await sql.execute("select penstock.declare_job_type('ship')")
            try:
                await drop(sql, "plain", force=True)
            except asyncpg.PostgresError as error:
                # A job came between its look at the jobs and its last one.
                assert error.sqlstate == "PS409" and "other transactions work with them" in str(error), error
        await work
        if await sql.fetchval("select count(*) from penstock.jobs"):
            await drop(sql, "plain", force=True)
        await sql.fetch("select penstock.recover()")
        assert await ended(sql) == dict.fromkeys(sent, ("cancelled", "dropped"))
        assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 0
    finally:
        for connection in connections:
            await connection.close()
