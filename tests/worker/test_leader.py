"""Tasks of the leader: one process runs each, and another takes over; start-up functions come before all work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock import Conflict, InvalidInput, Leader, Penstock
from tests.waiting import eventually
from tests.workers import Workers


async def state(app: Penstock) -> Any:
    [record] = await app.leaders()
    return record


async def test_one_of_several_workers_runs_the_task_and_another_takes_over_when_it_stops(app: Penstock) -> None:
    running: list[int] = []

    @app.on_leader
    async def follow(leader: Leader) -> None:
        running.append(leader.epoch)
        try:
            await asyncio.Event().wait()
        finally:
            running.remove(leader.epoch)

    async with Workers(app) as workers:
        await workers.add()
        await eventually(lambda: running == [1], "a leader", 60)

        async def two() -> bool:
            return bool((await state(app)).candidates == 2)

        await eventually(two, "two candidates", 60)
        first = await state(app)
        assert (first.name, first.state, first.epoch) == ("follow", "running", 1)
        [leading] = [worker for worker, _ in workers.workers if first.leader.startswith(f"{worker.id}.")]
        await workers.remove(leading)
        await eventually(lambda: running == [2], "the other worker to lead", 60)
    assert running == []
    assert (await state(app)).leader is None


async def test_a_task_that_fails_starts_again_and_says_why(app: Penstock) -> None:
    calls: list[int] = []

    @app.on_leader
    async def follow(leader: Leader) -> None:
        calls.append(leader.epoch)
        if len(calls) < 3:
            raise ValueError("no prices")

    async with Workers(app):
        await eventually(lambda: len(calls) == 3, "three starts", 60)

        async def ended() -> bool:
            return bool((await state(app)).state == "ended")

        await eventually(ended, "the end of the task", 60)
    assert calls == [1, 1, 1]
    assert (await state(app)).last_error == "ValueError: no prices"


async def test_who_no_longer_leads_cannot_write(app: Penstock, sql: Any) -> None:
    got: list[Leader] = []

    @app.on_leader
    async def follow(leader: Leader) -> None:
        got.append(leader)
        await asyncio.Event().wait()

    async with Workers(app) as workers:
        await eventually(lambda: got, "a leader", 60)
        async with sql.transaction():
            await got[0].check(sql)
        assert got[0].leads
        await workers.add()
        await workers.remove(workers.workers[0][0])
        await eventually(lambda: len(got) == 2, "the next leader", 60)
        assert got[1].leads and not got[0].leads
        with pytest.raises(Conflict, match="is not the leader of follow"):
            async with sql.transaction():
                await got[0].check(sql)


async def test_no_worker_takes_over_before_a_transaction_of_the_leader_has_ended(app: Penstock, sql: Any) -> None:
    got: list[Leader] = []

    @app.on_leader
    async def follow(leader: Leader) -> None:
        got.append(leader)
        await asyncio.Event().wait()

    async with Workers(app) as workers:
        await eventually(lambda: got, "a leader", 60)
        await workers.add()
        async with sql.transaction():
            await got[0].check(sql)
            removing = asyncio.create_task(workers.remove(workers.workers[0][0]))
            waits = "select exists (select from pg_locks where not granted)"
            await eventually(lambda: sql.fetchval(waits), "the release to wait", 60)
            assert len(got) == 1
        await removing
        await eventually(lambda: len(got) == 2, "the next leader", 60)


async def test_functions_at_start_are_called_in_order_before_the_first_job(app: Penstock) -> None:
    called: list[str] = []

    @app.on_startup
    async def first() -> None:
        called.append("first")

    @app.on_startup
    def second() -> None:
        called.append("second")

    @app.job
    async def work() -> None:
        called.append("work")

    await work.enqueue()
    async with Workers(app):
        await eventually(lambda: "work" in called, "the job", 60)
    assert called == ["first", "second", "work"]


async def test_an_error_at_start_ends_the_worker_before_it_claims(app: Penstock) -> None:
    @app.on_startup
    def fail() -> None:
        raise ValueError("no model")

    @app.job
    async def work() -> None: ...

    enqueued = await work.enqueue()
    with pytest.raises(ValueError, match="no model"):
        await (await app.worker()).run()
    assert (await app.find(enqueued.id)).attempt == 1 and (await app.find(enqueued.id)).status == "queued"


def plain() -> None: ...


async def of_two(a: int, b: int) -> None: ...


async def generator() -> Any:
    yield


@pytest.mark.parametrize(
    "declare",
    [
        lambda app: app.on_leader(plain),
        lambda app: app.on_leader(of_two),
        lambda app: app.on_leader(name="a b")(generator),
        lambda app: app.on_startup(generator),
        lambda app: app.on_startup(of_two),
    ],
)
def test_what_cannot_be_a_task_is_refused(declare: Callable[[Penstock], Awaitable[None]]) -> None:
    with pytest.raises(InvalidInput):
        declare(Penstock("postgresql://nowhere"))


async def test_a_transaction_of_the_leader_that_goes_silent_does_not_hold_the_slot_for_ever(app: Penstock, sql: Any) -> None:
    got: list[Leader] = []

    @app.on_leader
    async def follow(leader: Leader) -> None:
        got.append(leader)
        await asyncio.Event().wait()

    async with Workers(app):
        await eventually(lambda: got, "a leader", 60)
        async with sql.transaction():
            await got[0].check(sql)
            assert await sql.fetchval("show idle_in_transaction_session_timeout") == "10s"
        assert await sql.fetchval("show idle_in_transaction_session_timeout") != "10s"
