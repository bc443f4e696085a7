"""Dropping job types and pools in an application."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Conflict, Job, NotFound, Penstock, Status
from penstock.testing import running_worker

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def test_a_type_is_dropped_and_its_archive_stays(app: Penstock) -> None:
    bill = app.job_type("bill", int)
    receipt = await bill.enqueue(1)
    with pytest.raises(Conflict, match="jobs of bill wait"):
        await app.drop_job_type("bill")
    await app.drop_job_type("bill", force=True)
    found = await app.find(receipt.id)
    assert found is not None and (found.status, found.reason) == (Status.CANCELLED, "dropped")
    assert [job.id for job in await app.find_many(name="bill")] == [receipt.id]
    with pytest.raises(NotFound, match="no such job type: bill"):
        await app.drop_job_type("bill")
    with pytest.raises(NotFound, match="no such job type: bill"):
        await app.replay(receipt.id)
    # An enqueue does not create it again, also in the process that dropped it; a declaration does.
    with pytest.raises(NotFound, match="no such job type: bill, it was dropped at"):
        await bill.enqueue(2)
    await bill.declare()
    await bill.enqueue(2)
    assert [record.name for record in await app.job_types()] == ["bill"]


async def test_a_pool_is_dropped_when_its_workers_have_stopped(app: Penstock) -> None:
    tenants = app.pool("tenants", slots=4)

    @tenants.job
    async def work(job: Job[int]) -> None: ...

    async with running_worker(app):
        await tenants.enqueue("acme", 1)
        with pytest.raises(Conflict, match="pool tenants has workers"):
            await app.drop_pool("tenants", force=True)
    with pytest.raises(Conflict, match="tenants is a pool"):
        await app.drop_job_type("tenants")
    await app.drop_pool("tenants", force=True)
    assert await app.list_pools() == [] and await app.job_types() == []
    with pytest.raises(NotFound, match="no such job type: tenants, it was dropped at"):
        await tenants.enqueue("acme", 2)
    with pytest.raises(NotFound, match="no such job type: tenants, it was dropped at"):
        await tenants.start("acme")
    await tenants.declare()
    await tenants.enqueue("acme", 2)
    assert [pool.name for pool in await app.list_pools()] == ["tenants"]


async def test_a_worker_goes_on_with_its_other_types_when_one_is_dropped(app: Penstock) -> None:
    done: list[int] = []

    @app.job
    async def bill(number: int) -> None:
        done.append(number)

    @app.job
    async def ship(number: int) -> None:
        done.append(number)

    async with running_worker(app):
        await app.wait((await bill.enqueue(1)).id)
        await app.drop_job_type("bill")
        await app.wait((await ship.enqueue(2)).id)
        # What is created again is worked on by the same worker.
        await bill.declare()
        await app.wait((await bill.enqueue(3)).id)
    assert done == [1, 2, 3]


async def test_a_pool_is_created_with_the_options_of_its_job_type(app: Penstock) -> None:
    await app.create_pool("tenants", slots=4, on_retry="skip", max_waiting=7, max_attempts=2)
    await app.create_job_type("plain", max_attempts=4)
    await app.create_pool("plain", convert=True, slots=4, max_waiting=9)
    kept = {record.name: (record.max_waiting, record.max_attempts) for record in await app.job_types()}
    assert kept == {"tenants": (7, 2), "plain": (9, 4)}
    assert {pool.name: pool.on_retry for pool in await app.list_pools()} == {"tenants": "skip", "plain": "block"}


def declared_in(url: str) -> tuple[Penstock, Any]:
    """A process that declares the type `bill` and the pool `tenants`, and has not called anything."""
    app = Penstock(url)
    app.pool("tenants", slots=4)
    return app, app.job_type("bill", int)


@pytest.mark.parametrize("first", ["opened", "has enqueued", "has called nothing"])
async def test_no_enqueue_creates_a_type_again_that_was_dropped_hours_ago(app: Penstock, url: str, sql: Sql, first: str) -> None:
    shop, bill = declared_in(url)
    try:
        if first == "opened":
            await shop.open()
        elif first == "has enqueued":
            await bill.enqueue(1)
        else:
            await app.create_job_type("bill")
            await app.create_pool("tenants")
        await app.drop_job_type("bill", force=True)
        await app.drop_pool("tenants")
        # The clock of the database goes on by three hours, seen from the drop, and maintenance runs.
        passed = "set dropped_at = dropped_at - interval '3 hours', look_at = look_at - interval '3 hours'"
        await sql.execute(f"update penstock.dropped_types {passed}")
        await sql.fetch("select penstock.recover()")
        for enqueue in (
            lambda: bill.enqueue(2),
            lambda: shop.enqueue("bill", 2),
            lambda: bill.options(connection=sql).enqueue(2),
        ):
            with pytest.raises(NotFound, match="no such job type: bill, it was dropped at") as refused:
                await enqueue()
            assert "penstock declare MODULE:APP" in (refused.value.hint or "")
        with pytest.raises(NotFound, match="no such job type: tenants, it was dropped at"):
            await shop.enqueue("tenants", 1, key="acme")
        assert await app.job_types() == [] and await app.list_pools() == []
        # What the error says to do.
        assert await shop.declare() == ["pool tenants", "job bill"]
        await bill.enqueue(3)
        await shop.enqueue("tenants", 1, key="acme")
    finally:
        await shop.close()


async def test_a_program_that_opens_its_application_creates_a_dropped_type_again(app: Penstock, url: str) -> None:
    await app.create_job_type("bill")
    await app.drop_job_type("bill")
    shop, bill = declared_in(url)
    async with shop:
        await bill.enqueue(1)
