"""Pools against a real database: order of keys, turns of keys, and hand-overs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import uuid4

import asyncpg
import pytest

from penstock import Backoff, Conflict, Delivery, InvalidInput, Job, NewJob, Penstock, RateLimit, Settings, Status
from penstock.groups import queries as ownership
from penstock.groups import rebalance as balance
from penstock.pools import queries as pools
from penstock.testing import run_due_jobs
from tests.waiting import eventually
from tests.workers import Workers

Sql: TypeAlias = "asyncpg.Connection[Any]"
QUICK = Backoff(base=timedelta(milliseconds=30), cap=timedelta(milliseconds=60))


class Seen:
    """What a handler ran, and whether two jobs of one key ever ran at once."""

    def __init__(self) -> None:
        self.order: dict[str, list[int]] = defaultdict(list)
        self.running: dict[str, int] = defaultdict(int)
        self.most = 0
        self.most_of_key = 0
        self.finished = 0

    async def run(self, job: Job[Any], seconds: float = 0.0) -> None:
        key = str(job.key)
        self.order[key].append(job.data)
        self.running[key] += 1
        self.most = max(self.most, sum(self.running.values()))
        self.most_of_key = max(self.most_of_key, self.running[key])
        try:
            await asyncio.sleep(seconds)
        finally:
            self.running[key] -= 1
        self.finished += 1


async def enqueue(pool: Any, keys: int, each: int) -> None:
    await pool.enqueue_many([(f"k{key}", n) for n in range(each) for key in range(keys)])


async def test_jobs_of_a_key_run_in_order_one_at_a_time_and_keys_in_parallel(app: Penstock) -> None:
    seen = Seen()
    pool = app.pool("work", slots=8)

    @pool.job
    async def handle(job: Job[int]) -> None:
        await seen.run(job, 0.001)

    async with Workers(app):
        await enqueue(pool, 20, 30)
        await eventually(lambda: seen.finished == 600, "all jobs")
    assert all(order == list(range(30)) for order in seen.order.values())
    assert seen.most_of_key == 1
    assert seen.most > 5


async def test_a_lone_key_is_not_slow(app: Penstock) -> None:
    seen = Seen()
    pool = app.pool("work", slots=8)

    @pool.job
    async def handle(job: Job[int]) -> None:
        await seen.run(job)

    await enqueue(pool, 1, 3000)
    async with Workers(app):
        await eventually(lambda: seen.finished == 3000, "all jobs")
    assert seen.order["k0"] == list(range(3000))


async def test_sql_enqueues_into_a_pool(app: Penstock, sql: Sql) -> None:
    seen = Seen()
    pool = app.pool("work", slots=8)

    @pool.job
    async def handle(job: Job[int]) -> None:
        await seen.run(job)

    async with Workers(app):
        await sql.execute("select penstock.enqueue('work', '7', p_key => 'acme')")
        await eventually(lambda: seen.order == {"acme": [7]}, "the job")


@pytest.mark.parametrize("on_retry", ["block", "skip"])
async def test_a_retry_blocks_its_key_or_lets_others_pass(app: Penstock, on_retry: Any) -> None:
    seen = Seen()
    # Where others pass, they have the time to do so.
    backoff = Backoff(base=timedelta(seconds=1), cap=timedelta(seconds=1)) if on_retry == "skip" else QUICK
    pool = app.pool("work", slots=4, on_retry=on_retry, max_attempts=4, backoff=backoff)

    @pool.job
    async def handle(job: Job[int]) -> None:
        await seen.run(job)
        if job.data == 1 and job.attempt < 3:
            raise ValueError("not yet")

    await enqueue(pool, 2, 4)
    async with Workers(app):
        await eventually(lambda: seen.finished == 12, "all attempts")
    expected = [0, 1, 1, 1, 2, 3] if on_retry == "block" else [0, 1, 2, 3, 1, 1]
    assert seen.order["k0"] == expected
    assert seen.order["k1"] == expected
    assert seen.most_of_key == 1


async def test_a_job_that_fails_for_good_frees_its_key(app: Penstock) -> None:
    seen = Seen()
    pool = app.pool("work", slots=4, max_attempts=1)

    @pool.job
    async def handle(job: Job[int]) -> None:
        await seen.run(job)
        if job.data == 1:
            raise ValueError("never")

    await enqueue(pool, 1, 3)
    async with Workers(app):
        await eventually(lambda: seen.order["k0"] == [0, 1, 2], "all jobs")
        await eventually(lambda: idle(app), "the end")
    assert [r.status for r in await app.find_many(name="work", status="failed")] == [Status.FAILED]


async def idle(app: Penstock) -> bool:
    return all(c.ready + c.deferred + c.in_progress == 0 for c in await app.counts())


async def test_order_holds_while_workers_come_and_go(app: Penstock) -> None:
    seen = Seen()
    pool = app.pool("work", slots=16)

    @pool.job
    async def handle(job: Job[int]) -> None:
        await seen.run(job, 0.002)

    async with Workers(app) as working:
        first = working.workers[0][0]
        await enqueue(pool, 16, 40)
        await eventually(lambda: seen.finished > 60)
        second = await working.add()
        await eventually(lambda: seen.finished > 200)
        await working.remove(first)
        await working.add()
        await eventually(lambda: seen.finished > 400)
        await working.remove(second)
        await eventually(lambda: seen.finished == 640, "all jobs")
        await eventually(lambda: idle(app), "the end")
    assert all(order == list(range(40)) for order in seen.order.values())
    assert seen.most_of_key == 1


async def test_a_quiet_key_is_served_beside_a_noisy_one(app: Penstock) -> None:
    seen = Seen()
    pool = app.pool("work", slots=4)
    at: dict[str, int] = {}

    @pool.job
    async def handle(job: Job[int]) -> None:
        at.setdefault(str(job.key), len(seen.order["noisy"]))
        await seen.run(job, 0.005)

    app.context.settings = app.settings.model_copy(update={"concurrency": 2})
    await pool.enqueue_many([("noisy", n) for n in range(5000)])
    async with Workers(app):
        await eventually(lambda: len(seen.order["noisy"]) > 20)
        for n in range(5):
            await pool.enqueue(f"quiet{n}", 0)
            before = len(seen.order["noisy"])
            await eventually(lambda n=n: f"quiet{n}" in at)  # type: ignore[misc]
            assert at[f"quiet{n}"] - before < 100


@pytest.mark.parametrize("keys", [2, 12])
@pytest.mark.parametrize("limit", [None, 1])
async def test_weights_give_a_key_more_jobs_a_turn(app: Penstock, keys: int, limit: int | None) -> None:
    pool = app.pool("work", slots=1, weights={"heavy": 3}, prefetch_per_key=1, concurrency=limit)
    order: list[str] = []

    @pool.job
    async def handle(job: Job[int]) -> None:
        order.append(str(job.key))
        await asyncio.sleep(0.002)

    app.context.settings = app.settings.model_copy(update={"concurrency": 1, "claim_limit": 40})
    names = ["heavy", *[f"light{n}" for n in range(keys - 1)]]
    jobs = 36 if keys == 2 else 15
    await pool.enqueue_many([(key, n) for n in range(jobs) for key in names])
    async with Workers(app):
        await eventually(lambda: len(order) == jobs * keys, "all jobs")
    # While all keys have jobs.
    while_all = order[: max(place for place, key in enumerate(order) if key == "heavy") + 1]
    light = sum(key != "heavy" for key in while_all) / (keys - 1)
    # A turn ends early when its key is busy as a claim comes by: less than 3 on a busy machine, but never the 1 of no weight.
    assert 1.8 <= while_all.count("heavy") / max(light, 1) <= 4, while_all


async def test_a_turn_that_a_limit_cut_short_goes_on_and_no_key_is_passed_over(app: Penstock, sql: Sql) -> None:
    pool = app.pool("work", slots=1, weights={"a": 3}, concurrency=2)
    await pool.declare()
    await pool.enqueue_many([(key, n) for n in range(9) for key in "abc"])
    await sql.execute("select penstock.join_group('work', 'm', gen_random_uuid())")
    await sql.execute("update penstock.slots set owner = 'm', target = 'm', epoch = 1")
    taken: list[str] = []
    after, left = (None, None), None
    for _ in range(5):
        *rows, last = await sql.fetch(
            "select * from penstock.claim_keys('m', 'work', '{0}', '{1}', 10, 1, $1, $2, '{}', $3)", *after, left
        )
        taken.append("".join(sorted(row["key"] for row in rows)))
        await sql.fetch(
            "select * from penstock.settle($1, $2, $3)",
            [row["id"] for row in rows], [row["attempt"] for row in rows], [row["lease"] for row in rows],
        )  # fmt: skip
        after, left = (last["at_slot"], last["at_key"]), last["turn_left"]
    # Two at a time: three of a, one of b, one of c, and again.
    assert taken == ["aa", "ab", "ac", "aa", "bc"]


async def test_a_limit_of_the_type_does_not_keep_the_last_key_waiting(app: Penstock) -> None:
    seen = Seen()
    pool = app.pool("work", slots=1, concurrency=1)
    order: list[str] = []

    @pool.job
    async def handle(job: Job[int]) -> None:
        order.append(str(job.key))
        await seen.run(job, 0.005)

    await enqueue(pool, 5, 10)
    async with Workers(app):
        await eventually(lambda: seen.finished == 50, "all jobs")
    # Every key comes once in each round.
    assert {tuple(sorted(order[place : place + 5])) for place in range(0, 50, 5)} == {("k0", "k1", "k2", "k3", "k4")}


async def test_the_rate_of_a_key_is_limited_and_the_others_go_on(app: Penstock, sql: Sql) -> None:
    pool = app.pool("work", slots=4, key_rate=RateLimit(3, timedelta(seconds=1)))

    @pool.job
    async def handle(job: Job[int]) -> None:
        pass

    async with Workers(app):
        await pool.enqueue_many([("noisy", n) for n in range(9)] + [(f"quiet{n}", n) for n in range(20)])
        await eventually(lambda: idle(app), "the end")
    starts = [row[0] for row in await sql.fetch("select started_at from penstock.archived_jobs where key = 'noisy' order by 1")]
    for n in range(len(starts) - 3):
        assert starts[n + 3] - starts[n] >= timedelta(seconds=0.99)
    quiet = await sql.fetchval("select max(started_at) from penstock.archived_jobs where key like 'quiet%'")
    assert quiet < starts[-1]


async def test_keys_with_a_rate_that_never_come_again_are_forgotten(app: Penstock, sql: Sql) -> None:
    pool = app.pool("work", int, key_rate=RateLimit(5, timedelta(minutes=1)))
    seen = Seen()

    @pool.job
    async def run(job: Job[int]) -> None:
        await seen.run(job)

    async with Workers(app):
        await enqueue(pool, keys=20, each=1)
        await eventually(lambda: seen.finished == 20)
        assert await sql.fetchval("select count(*) from penstock.rate_windows") == 20
        await sql.execute("update penstock.rate_windows set ends_at = ends_at - interval '1 hour'")
        await pool.enqueue_many([(f"other{n}", n) for n in range(10)])
        await eventually(lambda: seen.finished == 30)
    assert await sql.fetchval("select count(*) from penstock.rate_windows where key not like 'other%'") == 0


async def test_jobs_in_flight_of_a_key_can_be_more_than_one(app: Penstock) -> None:
    seen = Seen()
    pool = app.pool("work", slots=4, key_concurrency=3)

    @pool.job
    async def handle(job: Job[int]) -> None:
        await seen.run(job, 0.02)

    await enqueue(pool, 1, 30)
    async with Workers(app):
        await eventually(lambda: seen.finished == 30, "all jobs")
    assert seen.most_of_key == 3


async def test_a_pool_can_grow_while_it_works(app: Penstock) -> None:
    seen = Seen()
    pool = app.pool("work", slots=4)

    @pool.job
    async def handle(job: Job[int]) -> None:
        await seen.run(job, 0.002)

    async with Workers(app) as working:
        await working.add()
        await enqueue(pool, 30, 20)
        await eventually(lambda: seen.finished > 50)
        await pool.resize(32)
        await enqueue(pool, 30, 20)
        await eventually(lambda: seen.finished == 1200, "all jobs")
        assert len(await pool.slots()) == 32
    assert all(order == [*range(20), *range(20)] for order in seen.order.values())
    assert seen.most_of_key == 1
    with pytest.raises(Conflict, match="cannot have 8 slots"):
        await pool.resize(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("select penstock.enqueue('work', '1')", "no key"),
        ("select penstock.enqueue('work', '1', p_key => 'a', p_priority => 3)", "has a priority"),
        ("select penstock.declare_pool('x', '{\"on_retry\": \"wait\"}')", "invalid options"),
        ("select penstock.declare_pool('x', '{\"slotz\": 1}')", "unknown option: slotz"),
        ("select penstock.declare_pool('x', '{\"weights\": {\"a\": 0}}')", "invalid options"),
        ("select penstock.declare_pool('x', '{\"key_rate_limit\": 3}')", "invalid options"),
        ("select penstock.set_weight('work', 'a', 0)", "invalid weight"),
        ("select * from penstock.claim_keys('m', 'work', '{}', '{}', 0)", "invalid limit"),
    ],
)
async def test_bad_input_is_refused(app: Penstock, call: str, message: str) -> None:
    await app.pool("work").declare()
    with pytest.raises(InvalidInput, match=message):
        await (await app.database()).fetch(call)


async def test_a_job_with_a_time_or_an_end_keeps_it(app: Penstock) -> None:
    seen = Seen()
    pool = app.pool("work", slots=4)

    @pool.job
    async def handle(job: Job[int]) -> None:
        await seen.run(job)

    await pool.enqueue("a", 2, run_after=timedelta(milliseconds=300))
    await pool.enqueue("a", 1)
    await pool.enqueue("b", 1, expires_at=timedelta(milliseconds=-1))
    await pool.enqueue("b", 2)
    async with Workers(app):
        await eventually(lambda: idle(app), "the end")
    assert seen.order == {"a": [1, 2], "b": [2]}
    assert len(await app.find_many(name="work", status="expired")) == 1


async def test_jobs_from_before_the_type_became_a_pool_run_too(app: Penstock, url: str) -> None:
    old = app.job_type("work", int)
    await old.enqueue_many([NewJob(n, key="a") for n in range(3)] + [NewJob(3)])
    async with Penstock(url) as later:
        seen = Seen()
        pool = later.pool("work", slots=4)

        @pool.job
        async def handle(job: Job[int]) -> None:
            await seen.run(job)

        # A declaration does not change what a type is: its jobs would need keys, and its workers get none any more.
        with pytest.raises(Conflict, match="work is a plain job type"):
            await (await later.worker()).run()
        await pools.create_pool(await app.database(), "work", {"slots": 4}, {}, convert=True)
        async with Workers(later):
            await eventually(lambda: seen.finished == 4, "all jobs")
        assert seen.order["a"] == [0, 1, 2]


async def test_a_running_job_of_a_pool_can_be_cancelled(app: Penstock) -> None:
    seen = Seen()
    pool = app.pool("work", slots=4)

    @pool.job
    async def handle(job: Job[int]) -> None:
        await seen.run(job, 60 if job.data == 0 else 0)

    async with Workers(app):
        first = await pool.enqueue("a", 0)
        await pool.enqueue("a", 1)
        await eventually(lambda: seen.order["a"] == [0])
        assert await app.cancel(first.id) == "cancelling"
        await eventually(lambda: seen.order["a"] == [0, 1], "the next job")
    assert (await app.find(first.id)).status is Status.CANCELLED


async def test_a_slot_that_comes_back_waits_for_the_handler_that_still_ends(app: Penstock, sql: Sql) -> None:
    pool = app.pool("work", str, slots=64)
    starts: dict[str, int] = defaultdict(int)
    ending, may_end = asyncio.Event(), asyncio.Event()
    together = False

    @pool.job
    async def run(job: Job[str]) -> None:
        nonlocal together
        starts[job.data] += 1
        if job.data == "slow":
            together = together or (ending.is_set() and not may_end.is_set())
        if starts[job.data] > 1:
            return
        try:
            await asyncio.Event().wait()
        finally:
            if job.data == "slow":
                ending.set()
                await may_end.wait()

    assert pool.slot_of("a") != pool.slot_of("b")
    await pool.enqueue("a", "slow")
    await pool.enqueue("b", "quick")
    async with Workers(app):
        await eventually(lambda: len(starts) == 2)
        # Evicted, as after a pause; it joins again at once.
        await sql.execute("select penstock.leave_group('work', id), penstock.tell_member('work', id) from penstock.members")
        await ending.wait()
        await eventually(lambda: starts["quick"] == 2, "the other key")
        may_end.set()
        await eventually(lambda: starts["slow"] == 2, "the key whose handler has ended")
    assert not together


# -- a rule of one's own


async def test_a_rule_of_its_own_places_keys_by_metadata(app: Penstock) -> None:
    def connected(key: str, workers: Any) -> int | None:
        return next((n for n, worker in enumerate(workers) if key in worker.metadata.get("clients", [])), None)

    pool = app.pool("requests", int, assign=connected)
    await pool.declare()
    async with (
        pool.worker("one", metadata={"clients": ["ada"]}) as one,
        pool.worker("two", metadata={"clients": ["bob"]}) as two,
    ):
        await pool.enqueue("bob", 1)
        await pool.enqueue("ada", 2)
        await pool.enqueue("eve", 3)
        jobs_of_one, jobs_of_two = one.jobs(), two.jobs()
        first, second = await anext(jobs_of_two), await anext(jobs_of_one)
        assert (first.key, second.key) == ("bob", "ada")
        await first.ack()
        await second.ack()
        # No worker has the client eve: the job waits until one publishes it.
        await one.set_metadata({"clients": ["ada", "eve"]})
        third = await anext(jobs_of_one)
        assert third.key == "eve"
        await third.ack()


async def test_of_metadata_said_at_once_the_last_counts(app: Penstock) -> None:
    pool = app.pool("requests", int, assign=lambda key, workers: 0)
    await pool.declare()
    async with pool.worker("one") as worker:
        await asyncio.gather(*[worker.set_metadata({"n": n}) for n in range(20)])
        assert [member.metadata for member in await pool.workers()] == [{"n": 19}]


async def test_a_key_that_comes_while_targets_are_computed_is_placed_next_time(app: Penstock, sql: Sql) -> None:
    pool = app.pool("requests", int, assign=lambda key, workers: 0)
    await pool.declare()
    await pool.enqueue("early", 1)
    database = await app.database()
    async with database.transaction() as transaction:
        await ownership.join(transaction, "requests", "m", uuid4(), timedelta(seconds=10), {})
        seen = await ownership.slots(transaction, "requests")
        # Enqueues do not wait for the lock of the group.
        await sql.execute("select penstock.enqueue('requests', '2', p_key => 'late')")
        await ownership.set_targets(transaction, "requests", {slot.slot: "m" for slot in seen})
    targets = {slot.key: slot.target for slot in await pool.slots()}
    assert targets == {"early": "m", "late": None}
    assert await balance.rebalance(database, "requests", lambda key, workers: 0) == 1, "the late key stays without an owner"
    assert {slot.target for slot in await pool.slots()} == {"m"}


async def test_an_open_transaction_with_a_new_key_does_not_hold_up_who_joins(app: Penstock, sql: Sql) -> None:
    pool = app.pool("requests", int, assign=lambda key, workers: 0)
    await pool.declare()
    async with sql.transaction():
        await sql.execute("select penstock.enqueue('requests', '1', p_key => 'ada')")
        async with asyncio.timeout(30), pool.worker("w"):
            assert [member.id for member in await pool.workers()] == ["w"]


async def test_settings_reach_the_members(url: str, sql: Sql) -> None:
    async with Penstock(url, settings=Settings(heartbeat_interval=timedelta(seconds=1), dead_after=timedelta(seconds=3))) as app:
        pool = app.pool("work", int, slots=2)
        async with pool.worker("w"):
            assert await sql.fetchval("select dead_after from penstock.members where id = 'w'") == timedelta(seconds=3)


async def test_slots_that_stay_are_not_touched_by_a_join_or_a_leave(app: Penstock) -> None:
    pool = app.pool("work", int, slots=64)
    async with pool.worker("a") as first, pool.worker("b") as second:
        await eventually(lambda: len(first.slots) == len(second.slots) == 32)
        before = {slot.slot: slot for slot in await pool.slots()}
        async with pool.worker("c") as third:
            await eventually(lambda: len(third.slots) == 21)
            joined = {slot.slot: slot for slot in await pool.slots()}
            moved = {n for n in before if joined[n] != before[n]}
            assert len(moved) == 21
            assert {joined[n].owner for n in moved} == {"c"}
        await eventually(lambda: len(first.slots) + len(second.slots) == 64)
        after = {slot.slot: slot for slot in await pool.slots()}
        assert {n for n in before if after[n] != before[n]} == moved


async def test_an_at_most_once_job_in_a_pool_is_not_started_again(app: Penstock, sql: Sql) -> None:
    seen = Seen()
    pool = app.pool("work", slots=4, delivery=Delivery.AT_MOST_ONCE)

    @pool.job
    async def handle(job: Job[int]) -> None:
        await seen.run(job, 60 if job.data == 0 else 0)

    async with Workers(app):
        first = await pool.enqueue("a", 0)
        await pool.enqueue("a", 1)
        await eventually(lambda: seen.order["a"] == [0])
        (member,) = await pool.workers()
        await sql.execute("select penstock.leave_group('work', $1)", member.id)
        await eventually(lambda: seen.order["a"] == [0, 1], "the next job")
    record = await app.find(first.id)
    assert (record.status, record.errors[0]["type"]) == (Status.FAILED, "WorkerLeft")


async def test_the_queue_of_a_pool_obeys_the_limit_of_its_type(app: Penstock) -> None:
    seen = Seen()
    pool = app.pool("work", slots=8, concurrency=3)

    @pool.job
    async def handle(job: Job[int]) -> None:
        await seen.run(job, 0.01)

    await enqueue(pool, 20, 3)
    async with Workers(app) as working:
        await working.add()
        await eventually(lambda: seen.finished == 60, "all jobs")
    assert seen.most <= 3


async def test_a_claim_under_an_old_epoch_gets_nothing(app: Penstock, sql: Sql) -> None:
    pool = app.pool("work", int, slots=1)
    await pool.enqueue("a", 1)
    await sql.execute("select penstock.join_group('work', 'm', gen_random_uuid())")
    await sql.execute("update penstock.slots set owner = 'm', target = 'm', epoch = 5")
    claim = "select count(*) from penstock.claim_keys($1, 'work', '{0}', array[$2::bigint], 10) where id is not null"
    assert await sql.fetchval(claim, "m", 4) == 0
    with pytest.raises(asyncpg.PostgresError, match="no member"):
        await sql.fetchval(claim, "n", 5)
    assert await sql.fetchval(claim, "m", 5) == 1


async def test_run_due_jobs_runs_those_of_pools_in_order(app: Penstock) -> None:
    seen = Seen()
    pool = app.pool("work", slots=4)

    @pool.job
    async def handle(job: Job[int]) -> None:
        await seen.run(job)

    await enqueue(pool, 3, 4)
    assert len(await run_due_jobs(app)) == 12
    await enqueue(pool, 1, 2)
    await run_due_jobs(app)
    assert seen.order == {"k0": [0, 1, 2, 3, 0, 1], "k1": [0, 1, 2, 3], "k2": [0, 1, 2, 3]}
    assert [member.id for member in await pool.workers()] == [None]
