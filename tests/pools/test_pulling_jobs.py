"""Jobs of a pool that a program pulls and settles itself: in order, and only while it owns their slots."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Backoff, Conflict, JobOptions, Penstock, Settings
from penstock.jobs import claim_queries
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
QUICK: JobOptions = {"max_attempts": 4, "backoff": Backoff(base=timedelta(milliseconds=30), cap=timedelta(milliseconds=60))}


async def test_a_program_pulls_jobs_and_settles_them(app: Penstock) -> None:
    pool = app.pool("fibonacci", int, slots=4, **QUICK)
    order: list[tuple[str | None, int, int]] = []
    for n in range(3):
        await pool.enqueue("a", n)
    async with pool.worker("my-worker") as worker:
        async for job in worker.jobs():
            order.append((job.key, job.data, job.attempt))
            if job.data == 1 and job.attempt == 1:
                await job.fail("not yet")
            else:
                await job.ack()
            if job.data == 2:
                break
    assert order == [("a", 0, 1), ("a", 1, 1), ("a", 1, 2), ("a", 2, 1)]
    assert len(await app.find_many(name="fibonacci", status="succeeded")) == 3


@pytest.fixture
def plain(url: str) -> Iterator[Penstock]:
    """An app that is used without a loop."""
    app = Penstock(url)
    yield app
    app.sync.close()


def test_a_thread_without_a_loop_pulls_jobs_and_settles_them(plain: Penstock) -> None:
    pool = plain.pool("fibonacci", int, slots=4, **QUICK)
    pool.sync.enqueue_many([("a", n) for n in range(3)])
    order: list[tuple[str | None, int, int]] = []
    with pool.sync.worker("my-worker") as worker:
        assert worker.id == "my-worker"
        worker.set_metadata({"clients": ["ada"]})
        for job in worker.jobs():
            order.append((job.key, job.data, job.attempt))
            assert not job.cancelled
            job.progress({"order": len(order)})
            job.extend(timedelta(minutes=1))
            if job.data == 1 and job.attempt == 1:
                job.fail("not yet")
            elif job.data == 2:
                job.release()
                break
            else:
                job.ack({"n": job.data})
        assert worker.slots == [0, 1, 2, 3]
        with pytest.raises(Conflict, match="settled already"):
            job.ack()
    assert order == [("a", 0, 1), ("a", 1, 1), ("a", 1, 2), ("a", 2, 1)]
    assert len(plain.sync.find_many(name="fibonacci", status="succeeded")) == 2
    assert len(plain.sync.find_many(name="fibonacci", status="queued")) == 1
    assert pool.sync.workers()[-1].id is None


def test_threads_share_the_jobs_of_a_pull_worker(plain: Penstock) -> None:
    pool = plain.pool("work", int, slots=4)
    pool.sync.enqueue_many([(f"k{n}", n) for n in range(40)])
    taken: list[int] = []
    done = threading.Event()

    def take() -> None:
        for job in worker.jobs():
            taken.append(job.data)
            job.ack()
            if len(taken) == 40:
                done.set()

    with pool.sync.worker() as worker:
        threads = [threading.Thread(target=take) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert done.wait(60)
    for thread in threads:
        thread.join(60)
    assert sorted(taken) == list(range(40))


async def test_keys_come_in_parallel_and_a_key_waits_for_its_ack(app: Penstock) -> None:
    pool = app.pool("work", int, slots=4)
    await pool.enqueue_many([(key, n) for n in range(2) for key in "abc"])
    async with pool.worker(prefetch=3) as worker:
        jobs = worker.jobs()
        first = [await anext(jobs) for _ in range(3)]
        assert {job.key for job in first} == {"a", "b", "c"}
        fourth = asyncio.create_task(anext(jobs))  # type: ignore[arg-type]
        done, _ = await asyncio.wait([fourth], timeout=0.3)
        assert not done, "a second job of a key came before the first was acknowledged"
        await first[1].ack()
        assert (await fourth).key == first[1].key


async def test_a_second_live_worker_with_an_id_is_refused(app: Penstock) -> None:
    pool = app.pool("work", int, slots=4)
    async with pool.worker("my-worker"):
        with pytest.raises(Conflict, match="alive"):
            async with pool.worker("my-worker"):
                pass
    async with pool.worker("my-worker") as worker:
        await eventually(lambda: worker.slots == [0, 1, 2, 3])


async def test_what_is_not_acknowledged_goes_back_in_order(app: Penstock) -> None:
    pool = app.pool("work", int, slots=4)
    await pool.enqueue_many([("a", n) for n in range(3)])
    async with pool.worker() as worker:
        assert (await anext(worker.jobs())).data == 0  # type: ignore[arg-type]
    async with pool.worker() as worker:
        async for job in worker.jobs():
            assert (job.data, job.attempt) == (0, 1)
            await job.ack()
            break


async def test_a_job_whose_slot_moves_before_it_is_asked_for_goes_back_at_once(url: str, sql: Sql) -> None:
    async with Penstock(url, settings=Settings(handover_grace=timedelta(hours=1))) as app:
        pool = app.pool("work", int, slots=4)
        await pool.enqueue_many([(f"k{n}", n) for n in range(8)])
        async with pool.worker("one") as one:
            held = await anext(one.jobs())  # type: ignore[arg-type]
            async with asyncio.timeout(30):
                while await sql.fetchval("select count(*) from penstock.queued_jobs where status = 'in-progress'") < 8:
                    await asyncio.sleep(0.01)
            # The program of the first is busy with one job; none of the others keeps its slot from moving.
            async with asyncio.timeout(30), pool.worker("two") as two:
                first = await anext(two.jobs())  # type: ignore[arg-type]
                assert first.key != held.key
                assert first.attempt == 1
                await first.ack()
            await held.ack()


async def test_a_slot_moves_only_when_a_claim_that_is_under_way_has_ended(url: str, sql: Sql) -> None:
    await sql.execute(
        "create function hold_up() returns trigger language plpgsql as"
        " $$ begin perform pg_advisory_xact_lock_shared(7); return new; end $$;"
        "create trigger hold_up before update on penstock.queued_jobs for each row"
        " when (new.status = 'in-progress') execute function hold_up();"
        "select pg_advisory_lock(7)"
    )
    async with Penstock(url, settings=Settings(handover_grace=timedelta(hours=1))) as app:
        pool = app.pool("work", int, slots=2)
        await pool.enqueue_many([(f"k{n}", n) for n in range(8)])
        async with pool.worker("one") as one, asyncio.timeout(30):
            held_up = (
                "select exists (select from pg_locks where locktype = 'advisory' and objid = 7 and not granted"
                " and database = (select oid from pg_database where datname = current_database()))"
            )
            while not await sql.fetchval(held_up):
                await asyncio.sleep(0.01)
            async with pool.worker("two") as two:
                while len(one.slots) > 1:
                    await asyncio.sleep(0.01)
                # What runs already gets as far as it can before the claim ends.
                for _ in range(20):
                    await sql.fetchval("select 1")
                await sql.execute("select pg_advisory_unlock(7)")
                assert (await anext(two.jobs())).attempt == 1  # type: ignore[arg-type]


async def test_a_pulled_job_is_given_out_only_while_it_may_start(app: Penstock, sql: Sql) -> None:
    pool = app.pool("work", int, slots=4, visibility_timeout=timedelta(seconds=2))
    await pool.enqueue("a", 1)
    async with pool.worker("one") as worker:
        # A claimed job for which the program does not ask in time is released and claimed again, with all its attempts.
        leases = set()
        async with asyncio.timeout(30):
            while len(leases) < 3:
                leases |= {
                    row["lease"] for row in await sql.fetch("select lease from penstock.queued_jobs where lease is not null")
                }
                await asyncio.sleep(0.01)
        job = await anext(worker.jobs())  # type: ignore[arg-type]
        assert job.attempt == 1
        await job.ack()


async def test_an_ack_after_the_slot_was_lost_is_refused(app: Penstock, sql: Sql) -> None:
    pool = app.pool("work", int, slots=2)
    await pool.enqueue("a", 1)
    async with pool.worker("one") as worker:
        job = await anext(worker.jobs())  # type: ignore[arg-type]
        await sql.execute("select penstock.leave_group('work', 'one')")
        with pytest.raises(Conflict, match="no longer belongs"):
            await job.ack()


async def test_jobs_that_are_lost_leave_their_places_free(app: Penstock, sql: Sql) -> None:
    pool = app.pool("work", int, slots=4)
    await pool.enqueue_many([(f"k{n}", n) for n in range(8)])
    async with pool.worker("one", prefetch=4) as worker:
        jobs = worker.jobs()
        held = await anext(jobs)  # type: ignore[arg-type]
        claimed = "select count(*) = 4 from penstock.queued_jobs where status = 'in-progress'"
        await eventually(lambda: sql.fetchval(claimed), "a job at each place")
        # As when others took it for dead: the program has one of the jobs, and has not asked for the others.
        await sql.execute("select penstock.leave_group('work', 'one')")
        await eventually(lambda: held.cancelled, "the loss to be known")
        again: list[Any] = []

        async def take() -> None:
            while len(again) < 4:
                again.append(await anext(jobs))  # type: ignore[arg-type]

        taking = asyncio.create_task(take())
        await eventually(lambda: sql.fetchval(claimed), "a claim for each of the four places")
        await eventually(taking.done, "a job at each of the four places")
        for job in again:
            await job.ack()
        assert len({job.key for job in again}) == 4


async def test_an_ack_under_way_while_the_job_comes_back_is_answered(
    app: Penstock, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, may_go = asyncio.Event(), asyncio.Event()

    async def slow_settle(*given: Any, **options: Any) -> dict[Any, str]:
        under_way.set()
        await may_go.wait()
        return await settle(*given, **options)

    pool = app.pool("work", int, slots=2)
    await pool.enqueue("a", 1)
    async with pool.worker("one") as worker:
        jobs_of_one = worker.jobs()
        job = await anext(jobs_of_one)  # type: ignore[arg-type]
        settle = claim_queries.settle
        monkeypatch.setattr(claim_queries, "settle", slow_settle)
        acking = asyncio.create_task(job.ack())
        await under_way.wait()
        await sql.execute("select penstock.leave_group('work', 'one')")
        again = await anext(jobs_of_one)  # type: ignore[arg-type]
        assert again.id == job.id
        may_go.set()
        with pytest.raises(Conflict, match="no longer belongs"):
            await asyncio.wait_for(acking, 60)
        await again.ack()
    assert await sql.fetchval("select status from penstock.archived_jobs") == "succeeded"
