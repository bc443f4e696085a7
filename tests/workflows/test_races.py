"""Workflows beside transactions that stay open: no end is missed, and no call waits for a row of another transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import InvalidInput, Job, NewJob, Penstock
from penstock.jobs.models import make_id
from penstock.testing import running_worker
from tests.waiting import eventually
from tests.workflows.statuses import status

Sql: TypeAlias = "asyncpg.Connection[Any]"
RESOLVE = "select penstock.resolve_workflows()"


@pytest.fixture
async def other(url: str) -> AsyncIterator[Sql]:
    """A second connection, which fails when it waits for a lock."""
    connection = await asyncpg.connect(url, server_settings={"lock_timeout": "5s"})
    await connection.execute("select penstock.create_job_type('step', '{\"max_attempts\": 1}')")
    yield connection
    await connection.close()


async def resolve(sql: Sql) -> None:
    """Do what the maintenance of a worker does."""
    while await sql.fetchval(RESOLVE):
        pass


@pytest.mark.parametrize("isolation", ["read_committed", "repeatable_read"])
@pytest.mark.parametrize(
    "end",
    [
        "select penstock.cancel(id) from penstock.waiting_jobs",
        "select penstock.advance_operation() from penstock.start_operation('purge', '{\"status\": \"waiting\"}')",
        "select penstock.drop_job_type('gone', true)",
        'select penstock.advance_operation() from penstock.start_erasure(\'{"key": "gone"}\')',
    ],
)
async def test_a_job_that_comes_behind_one_which_is_being_cancelled_does_not_wait_for_ever(
    app: Penstock, sql: Sql, other: Sql, end: str, isolation: Any
) -> None:
    await other.execute("select penstock.create_job_type('gone')")
    waits = await app.enqueue("gone", "waits", key="gone", after=await app.enqueue("step", "first"))
    transaction = sql.transaction(isolation=isolation)
    await transaction.start()
    await sql.execute(end)
    # It is waiting still for all others, who cannot lock it.
    behind = await app.enqueue("step", "behind", after=waits)
    await resolve(other)
    await transaction.commit()
    await resolve(other)
    assert await status(app, behind) == "cancelled"


@pytest.mark.parametrize("after", [True, False])
async def test_an_id_that_stands_twice_in_a_call_is_one_child(app: Penstock, sql: Sql, other: Sql, after: bool) -> None:
    first = await app.enqueue("step", "first")
    group = await app.job_group("import").open()
    id = make_id()
    new = [NewJob("x", id=id, after=first if after else None, group=group) for _ in range(2)]
    receipts = await app.enqueue_many("step", new)
    assert [receipt.outcome.value for receipt in receipts] == ["waiting" if after else "queued", "duplicate"]
    await group.seal()
    for job in (first.id, id):
        await app.cancel(job)
        await resolve(sql)
    assert ((await group.find()).added, (await group.find()).status) == (1, "cancelled")


async def test_the_erasure_of_a_message_ends_what_waits_for_its_copy(app: Penstock, sql: Sql, other: Sql) -> None:
    news = app.topic("news")
    await news.subscribe("early")
    await news.publish("x", key="gone")
    await sql.execute('select penstock.start_erasure(\'{"key": "gone"}\')')
    while await sql.fetchval("select phase from penstock.operations") != "messages":
        await sql.execute("select penstock.advance_operation()")
    # The queue is done, and then another subscriber gets the message.
    await news.subscribe("late", since=0)
    behind = await app.enqueue("step", "behind", after=await sql.fetchval("select id from penstock.queued_jobs"))
    while await sql.fetchval("select phase from penstock.operations") == "messages":
        await sql.execute("select penstock.advance_operation()")
    await resolve(sql)
    assert await status(app, behind) == "cancelled"


@pytest.mark.parametrize("table", ["waiting_jobs", "queued_jobs"])
async def test_a_signal_that_is_under_way_while_its_job_is_erased_is_erased_too(
    app: Penstock, sql: Sql, other: Sql, table: str
) -> None:
    first = await app.enqueue("step", "first") if table == "waiting_jobs" else None
    erased, kept = [await app.enqueue("step", "x", key=key, after=first) for key in ("gone", "other")]
    await sql.execute('select penstock.start_erasure(\'{"key": "gone"}\')')
    transaction = other.transaction()
    await transaction.start()
    for job in (erased, kept):
        await other.execute("select penstock.signal($1, 'approved', '\"yes\"')", job.id)

    async def is_gone() -> bool:
        await sql.execute("select penstock.advance_operation()")
        return not await sql.fetchval(f"select count(*) from penstock.{table} where id = $1", erased.id)

    async def ended() -> bool:
        await sql.execute("select penstock.advance_operation()")
        return await sql.fetchval("select phase from penstock.operations") == "vacuum"

    await eventually(is_gone, "the deletion of the job")
    while await sql.fetchval("select id from penstock.advance_operation()") is not None:
        pass
    await transaction.commit()
    await eventually(ended, "the end of the erasure")
    assert await sql.fetch("select job from penstock.job_signals") == [(kept.id,)]


async def test_a_child_of_a_group_cannot_wait_for_what_waits_for_the_group(app: Penstock, sql: Sql, other: Sql) -> None:
    outer = await app.job_group("outer").open()
    group = await app.job_group("inner", then="step", parent=outer).open()
    beside = await app.job_group("beside").open()
    behind = await app.enqueue("step", "x", after=group)
    # A child of a group, after the group in it, and what comes behind that.
    allowed = await app.enqueue("step", "x", group=outer, after=group)
    await app.enqueue("step", "x", group=beside, after=behind)
    then = (await group.find()).then_job
    assert then is not None
    for after in (group, outer, behind, allowed, then, beside):
        with pytest.raises(InvalidInput, match="which waits for this group or is the group"):
            await app.enqueue("step", "x", group=group, after=after)
    id = make_id()
    with pytest.raises(InvalidInput, match="which waits for this group"):
        await app.enqueue_many("step", [NewJob("x", id=id, after=group), NewJob("x", after=id, group=group)])
    await app.enqueue("step", "x", group=group, after=await app.enqueue("step", "x"))


async def test_a_resolve_does_not_wait_for_one_in_an_open_transaction(app: Penstock, sql: Sql, other: Sql) -> None:
    first = await app.enqueue("step", "first")
    behind = await app.enqueue("step", "behind", after=first, when="finished")
    await app.cancel(first.id)
    transaction = sql.transaction()
    await transaction.start()
    await sql.execute(RESOLVE)
    assert await other.fetchval(RESOLVE) is None
    await transaction.rollback()
    await resolve(other)
    assert await status(app, behind) == "queued"


async def test_a_worker_comes_back_when_another_transaction_resolves(app: Penstock, sql: Sql, other: Sql) -> None:
    await other.execute("select penstock.create_job_type('gone')")
    first = await app.enqueue("gone", "first")
    behind = await app.enqueue("step", "behind", after=first, when="finished")
    await app.cancel(first.id)
    transaction = sql.transaction()
    await transaction.start()
    await sql.execute(RESOLVE)

    @app.job("step")
    async def step(job: Job[Any]) -> None:
        pass

    async with running_worker(app):
        # The worker works beside it.
        await app.wait((await app.enqueue("step", "free")).id)
        await transaction.rollback()
        assert str((await app.wait(behind.id)).status) == "succeeded"


async def test_a_locked_group_does_not_stop_the_others(app: Penstock, sql: Sql, other: Sql) -> None:
    locked = [await app.job_group(name).open() for name in ("one", "two")]
    for _ in range(3):
        for group in locked:
            await app.enqueue("step", "x", group=group)
    transactions = [sql.transaction(), other.transaction()]
    for connection, transaction, group in zip((sql, other), transactions, locked, strict=True):
        await transaction.start()
        await connection.execute("select penstock.seal_group($1)", group.id)
    first = await app.enqueue("step", "first")
    behind = await app.enqueue("step", "behind", after=first, when="finished")
    await app.cancel(first.id)
    database = await app.database()
    while await database.fetchval("select penstock.resolve_workflows(2)"):
        pass
    assert await status(app, behind) == "queued"
    for transaction in transactions:
        await transaction.commit()
    await resolve(sql)
    assert [(await group.find()).added for group in locked] == [3, 3]
    assert await sql.fetchval("select count(*) from penstock.workflow_ticks") == 0


async def test_a_locked_job_does_not_stop_the_links_of_others(app: Penstock, sql: Sql, other: Sql) -> None:
    await app.enqueue_many("step", ["locked", "free"])
    (locked, *one), (free, *two) = await other.fetch("select id, attempt, lease from penstock.claim('psql', '{step}', 2)")
    held = [await app.enqueue("step", "x", after=locked) for _ in range(3)]
    behind = await app.enqueue("step", "behind", after=free)
    transaction = sql.transaction()
    await transaction.start()
    await sql.execute("select from penstock.queued_jobs where id = $1 for update", locked)
    while await other.fetchval("select penstock.resolve_workflows(2)"):
        pass
    settle = "select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint])"
    await other.fetch(settle, free, *two)
    while await other.fetchval("select penstock.resolve_workflows(2)"):
        pass
    assert await status(app, behind) == "queued"
    await transaction.rollback()
    await resolve(other)
    await other.fetch(settle, locked, *one)
    await resolve(other)
    assert [await status(app, job) for job in held] == ["queued"] * 3


async def test_a_job_behind_one_of_its_call_that_coalesces_waits_for_the_other_one(app: Penstock, sql: Sql, other: Sql) -> None:
    plain = await app.enqueue("step", "plain", unique="p")
    waits = await app.enqueue("step", "waits", unique="w", after=await app.enqueue("step", "first"))
    one, two = make_id(), make_id()
    receipts = await app.enqueue_many(
        "step",
        [
            NewJob("x", id=one, unique="p"),
            NewJob("x", id=two, unique="w", after=plain),
            NewJob("x", after=[one, two, plain], when="finished"),
        ],
    )
    assert [receipt.outcome.value for receipt in receipts] == ["coalesced", "coalesced", "waiting"]
    assert set((await app.find(receipts[2].id)).after) == {plain.id, waits.id}
    for job in (plain, waits):
        assert await status(app, receipts[2]) == "waiting"
        await app.cancel(job.id)
        await resolve(sql)
    assert await status(app, receipts[2]) == "queued"


async def test_children_that_commit_after_the_cancellation_of_their_group_are_cancelled(
    app: Penstock, sql: Sql, other: Sql
) -> None:
    group = await app.job_group("import").open()
    transaction = sql.transaction()
    await transaction.start()
    late = await app.enqueue("step", "late", group=group, connection=sql)
    inner = await sql.fetchval("select penstock.open_group('inner', p_parent => $1)", group.id)
    child = await app.enqueue("step", "child", group=inner, connection=sql)
    await app.cancel_group("import")

    async def settle() -> None:
        await resolve(other)
        while await other.fetchval("select id from penstock.advance_operation()") is not None:
            await resolve(other)
        await resolve(other)

    await settle()
    await transaction.commit()
    await settle()
    assert [await status(app, job) for job in (late, child)] == ["cancelled", "cancelled"]
    assert [found.status for found in await app.job_groups()] == ["cancelled", "cancelled"]


async def test_a_job_can_wait_for_one_of_another_group_before_it_in_the_call(app: Penstock, sql: Sql, other: Sql) -> None:
    groups = [await app.job_group(name).open() for name in ("one", "two")]
    for first, second in (groups, groups[::-1], (None, groups[0]), (groups[0], None)):
        ids = [make_id() for _ in range(3)]
        new = [
            NewJob("a", id=ids[0], group=first),
            NewJob("b", id=ids[1], group=second, after=ids[0]),
            NewJob("c", id=ids[2], group=first, after=ids[1]),
        ]
        assert [receipt.outcome.value for receipt in await app.enqueue_many("step", new)] == ["queued", "waiting", "waiting"]
    assert [(await group.find()).added for group in groups] == [6, 3]


async def test_a_resolve_does_not_wait_for_a_dependency_that_is_being_cancelled(app: Penstock, sql: Sql, other: Sql) -> None:
    await app.enqueue("step", "first")
    claimed = await other.fetchrow("select id, attempt, lease from penstock.claim('psql', '{step}', 1)")
    behind, further = [await app.enqueue("step", "behind", after=claimed["id"]) for _ in range(2)]
    transaction = sql.transaction()
    await transaction.start()
    await sql.execute("select penstock.cancel($1)", behind.id)
    await resolve(other)
    await other.fetch("select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint])", *claimed)
    await resolve(other)
    assert [await status(app, job) for job in (behind, further)] == ["waiting", "queued"]
    await transaction.rollback()
    await resolve(other)
    assert await status(app, behind) == "queued"


async def test_a_cancellation_does_not_wait_for_a_locked_group_in_it(app: Penstock, sql: Sql, other: Sql) -> None:
    outer = await app.job_group("outer").open()
    inner = await app.job_group("inner", parent=outer).open()
    child = await app.enqueue("step", "child", group=inner)
    failing = await app.enqueue("step", "failing", group=outer, priority=-9)
    transaction = sql.transaction()
    await transaction.start()
    await sql.execute("select penstock.seal_group($1)", inner.id)
    claimed = await other.fetchrow("select id, attempt, lease from penstock.claim('psql', '{step}', 1)")
    assert claimed["id"] == failing.id
    await other.fetch(
        "select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], '{failed}')", *claimed
    )
    await resolve(other)
    assert ((await outer.find()).cancelled_at is None, (await inner.find()).cancelled_at) == (False, None)
    await transaction.commit()
    await resolve(other)
    while await other.fetchval("select id from penstock.advance_operation()") is not None:
        await resolve(other)
    await resolve(other)
    assert (await status(app, child), (await inner.find()).status, (await outer.find()).status) == (
        "cancelled", "cancelled", "failed",
    )  # fmt: skip


async def test_a_release_does_not_wait_for_the_same_id_in_an_open_transaction(app: Penstock, sql: Sql, other: Sql) -> None:
    first = await app.enqueue("step", "first")
    jobs = [await app.enqueue("step", f"{n}", after=first, when="finished") for n in range(9)]
    transaction = sql.transaction()
    await transaction.start()
    await app.enqueue("step", "at once", id=jobs[4].id, connection=sql)
    await app.cancel(first.id)
    await resolve(other)
    assert [await status(app, job) for job in jobs] == ["queued"] * 4 + ["waiting"] + ["queued"] * 4
    await transaction.rollback()
    await resolve(other)
    assert await status(app, jobs[4]) == "queued"
    assert await sql.fetchval("select count(*) from penstock.job_dependencies") == 0


async def test_a_release_does_not_wait_for_the_slots_of_a_pool(app: Penstock, sql: Sql, other: Sql) -> None:
    pool = app.pool("accounts", slots=4)
    await pool.declare()
    first = await app.enqueue("step", "first")
    job = await pool.enqueue("new key", "x", after=first, when="finished")
    free = await app.enqueue("step", "x", after=first, when="finished")
    await app.cancel(first.id)
    transaction = sql.transaction()
    await transaction.start()
    # As a resize of the pool does.
    await sql.execute("select pg_advisory_xact_lock(hashtext('penstock.slots'), hashtext('accounts'))")
    await resolve(other)
    assert await status(app, free) == "queued"
    await transaction.rollback()
    await resolve(other)
    assert await status(app, job) == "queued"


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("end", ["cancel", "erase"])
async def test_the_children_of_a_job_that_ended_while_their_group_was_locked_are_cancelled(
    app: Penstock, sql: Sql, other: Sql, end: str, sealed: bool
) -> None:
    parent = await app.enqueue("step", "parent", key="gone")
    lease = await other.fetchval("select lease from penstock.claim('psql', '{step}', 1)")
    begin = "select job_group from penstock.begin_waits(array[$1::uuid], array[$2::bigint], array['gather'], array['parts'])"
    group = await other.fetchval(begin, parent.id, lease)
    child = await app.enqueue("step", "child", group=group)
    if sealed:
        await other.execute("select penstock.seal_group($1)", group)
    settle = (
        "select penstock.settle(array[$1::uuid], array[1::smallint], array[$2::bigint], array['suspended'],"
        ' array[\'{"step": "parts"}\'::jsonb])'
    )
    await other.execute(settle, parent.id, lease)
    await resolve(other)
    transaction = sql.transaction()
    await transaction.start()
    # As a pass that folds ticks of the group has it.
    await sql.execute("select from penstock.job_groups for no key update")
    if end == "cancel":
        assert await app.cancel(parent.id) == "cancelled"
    else:
        await other.execute('select penstock.advance_operation() from penstock.start_erasure(\'{"key": "gone"}\')')
        assert await other.fetchval("select count(*) from penstock.queued_jobs") == 1
    await transaction.rollback()
    await resolve(other)
    while await other.fetchval("select count(*) from penstock.operations where kind = 'cancel' and finished_at is null"):
        await other.execute("select penstock.advance_operation()")
    await resolve(other)
    assert await status(app, child) == "cancelled"
    assert (await app.find_group(group)).status == "cancelled"


async def test_many_timeouts_do_not_each_wait_for_an_open_transaction(app: Penstock, sql: Sql, other: Sql) -> None:
    ids = [make_id() for _ in range(400)]
    last = make_id()
    async with sql.transaction():
        await sql.execute(
            "insert into penstock.job_signals (at, job, name) select now(), job, 'approved' from unnest($1::uuid[]) as job", ids
        )
        # With a tenth of a second for each of them it takes 40.
        await other.execute("set statement_timeout = '30s'")
        late = "select penstock.time_out_waits($1::uuid[], array_fill('approved'::text, array[401]), now())"
        await other.execute(late, [*ids, last])
        assert await other.fetchval("select array_agg(job) from penstock.job_signals") == [last]
