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
    # A further enqueue declares it again, as an application does that starts.
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
        await app.wait((await bill.enqueue(3)).id)
    assert done == [1, 2, 3]


async def test_a_pool_is_created_with_the_options_of_its_job_type(app: Penstock) -> None:
    await app.create_pool("tenants", slots=4, on_retry="skip", max_waiting=7, max_attempts=2)
    await app.create_job_type("plain", max_attempts=4)
    await app.create_pool("plain", convert=True, slots=4, max_waiting=9)
    kept = {record.name: (record.max_waiting, record.max_attempts) for record in await app.job_types()}
    assert kept == {"tenants": (7, 2), "plain": (9, 4)}
    assert {pool.name: pool.on_retry for pool in await app.list_pools()} == {"tenants": "skip", "plain": "block"}
