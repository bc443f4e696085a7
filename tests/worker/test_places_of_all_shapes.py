"""Places of every shape of work, with what runs for real: whatever is stopped, lost or moved at random points, nothing leaks.

`test_places` does the same with the executor alone, between single steps of the loop.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import httpx
import pytest

from penstock import Backoff, Conflict, Event, Job, NewEvent, Penstock, Settings, Standing
from penstock.pools.pool import Pool
from penstock.streams.partitioner import partition_of
from penstock.streams.stream import Stream
from tests.http.http_calls import claim, put
from tests.http.http_server import TOKEN, Served, serving
from tests.waiting import eventually
from tests.workers import Workers

Sql: TypeAlias = "asyncpg.Connection[Any]"
PLACES, KEYS, ROUNDS = 4, 8, 60
QUICK = Backoff(base=timedelta(milliseconds=10), cap=timedelta(milliseconds=20))


@pytest.fixture
def dice() -> random.Random:
    seed = secrets.randbits(32)
    print("seed", seed)
    return random.Random(seed)


@pytest.fixture
async def small(url: str) -> AsyncIterator[Penstock]:
    async with Penstock(url, settings=Settings(concurrency=PLACES)) as app:
        yield app


async def some_steps(dice: random.Random) -> None:
    """A few steps of the loop, or about as long as a statement takes."""
    for _ in range(dice.randrange(8)):
        await asyncio.sleep(0)
    if dice.random() < 0.4:
        await asyncio.sleep(dice.random() * 0.01)


async def over(app: Penstock) -> bool:
    return all(count.ready + count.deferred + count.in_progress == 0 for count in await app.counts())


async def cancelled_at_random(app: Penstock, dice: random.Random, enqueue: Callable[[int], Awaitable[Any]]) -> list[Any]:
    """Enqueue jobs, and cancel half of them at some point. Returns the ids of all."""

    async def one(number: int) -> Any:
        id = await enqueue(number)
        if dice.random() < 0.5:
            await some_steps(dice)
            await app.cancel(id)
        return id

    made = []
    for at in range(0, ROUNDS * KEYS, KEYS):
        made += await asyncio.gather(*[one(at + number) for number in range(KEYS)])
    return made


async def each_ended_once(sql: Sql, ids: list[Any]) -> None:
    rows = await sql.fetch("select id, status::text from penstock.archived_jobs where id = any ($1)", ids)
    assert len(rows) == len(ids) == len({row["id"] for row in rows})
    assert {row["status"] for row in rows} <= {"succeeded", "cancelled"}


async def test_a_pool_whose_keys_move_while_jobs_are_cancelled(small: Penstock, sql: Sql, dice: random.Random) -> None:
    """Jobs are cancelled, and keys move or are lost to workers that come and go, at any point of the jobs' lives."""
    at_gate: set[Any] = set()
    gate = asyncio.Event()

    async def work(job: Job[Any]) -> None:
        if job.data != "full":
            await some_steps(dice)
            return
        at_gate.add(job.id)
        await gate.wait()

    pool = small.pool("work", slots=16, backoff=QUICK, max_attempts=1_000)
    pool.job(work)
    async with Workers(small) as workers:
        settled = asyncio.Event()

        async def come_and_go() -> None:
            while not settled.is_set():
                other = await workers.add()
                await some_steps(dice)
                if dice.random() < 0.5:
                    # As a member that was declared dead finds it: its slots are gone, and its jobs are others'.
                    owners = sorted({slot.owner for slot in await pool.slots()} - {None}, key=str)
                    for owner in owners[:1]:
                        await sql.execute("select penstock.leave_group('work', $1)", owner)
                    await some_steps(dice)
                await workers.remove(other)

        moving = asyncio.create_task(come_and_go())

        async def enqueue(number: int) -> Any:
            return (await small.enqueue("work", "brief", key=f"k{number % KEYS}")).id

        ids = await cancelled_at_random(small, dice, enqueue)
        settled.set()
        await moving
        await eventually(lambda: over(small), "the end of all jobs", 60)
        await each_ended_once(sql, ids)
        full = {(await small.enqueue("work", "full", key=f"k{n}")).id for n in range(PLACES)}
        await eventually(lambda: at_gate >= full, "a job at each place", 60)
        gate.set()


async def test_a_pool_whose_keys_are_lost_has_its_keys_and_its_places_again(small: Penstock, sql: Sql) -> None:
    """The worker is declared dead while a job runs at each place, and others wait behind them."""
    at_gate: list[Any] = []
    stopped: list[Any] = []
    gate = asyncio.Event()
    pool = small.pool("work", slots=16, backoff=QUICK)

    @pool.job
    async def work(job: Job[Any]) -> None:
        at_gate.append(job.id)
        try:
            await gate.wait()
        except asyncio.CancelledError:
            stopped.append(job.id)
            raise

    async with Workers(small):
        receipts = await pool.enqueue_many([(f"k{number}", number) for _ in range(3) for number in range(PLACES)])
        await eventually(lambda: len(at_gate) == PLACES, "a job at each place")
        (owner,) = {slot.owner for slot in await pool.slots()}
        await sql.execute("select penstock.leave_group('work', $1), penstock.tell_member('work', $1)", owner)
        await eventually(lambda: len(stopped) == PLACES, "the end of the handlers whose jobs were lost")
        await eventually(lambda: len(at_gate) == 2 * PLACES, "a job at each place again")
        assert sorted(at_gate[PLACES:]) == sorted(stopped), "the jobs that ran, in the order of their keys"
        gate.set()
        await eventually(lambda: over(small), "the end of all jobs", 60)
        await each_ended_once(sql, [receipt.id for receipt in receipts])


async def test_a_program_that_pulls_jobs_and_is_interrupted(small: Penstock, sql: Sql, dice: random.Random) -> None:
    """It asks with a time limit, settles in every way, and is slow; jobs are cancelled, and keys move to other workers."""
    pool = small.pool("work", slots=16, backoff=QUICK, max_attempts=1_000)

    async def asked(worker: Any, jobs: AsyncIterator[Any]) -> Any:
        """The next job, unless it does not come within a moment: the iterator is made again then."""
        try:
            async with asyncio.timeout(dice.random() * 0.02):
                return jobs, await anext(jobs)
        except TimeoutError:
            return worker.jobs(), None

    async def program(worker: Any, ended: asyncio.Event) -> None:
        jobs = worker.jobs()
        while not ended.is_set():
            jobs, job = await asked(worker, jobs)
            if job is None:
                continue
            await some_steps(dice)
            with suppress(Conflict):
                way = dice.choice(["ack", "ack", "release", "fail", "snooze"])
                if way == "fail":
                    await job.fail("by chance")
                elif way == "snooze":
                    await job.snooze(timedelta(milliseconds=10))
                else:
                    await getattr(job, way)()

    async with pool.worker("stays", prefetch=PLACES) as stays:
        ended = asyncio.Event()
        working = [asyncio.create_task(program(stays, ended)) for _ in range(2)]

        async def come_and_go() -> None:
            while not ended.is_set():
                async with pool.worker(prefetch=PLACES) as other:
                    passing = asyncio.create_task(program(other, ended))
                    await asyncio.sleep(dice.random() * 0.1)
                    passing.cancel()
                    await asyncio.gather(passing, return_exceptions=True)

        moving = asyncio.create_task(come_and_go())

        async def enqueue(number: int) -> Any:
            return (await pool.enqueue(f"k{number % KEYS}", number)).id

        ids = await cancelled_at_random(small, dice, enqueue)
        await eventually(lambda: over(small), "the end of all jobs", 60)
        ended.set()
        await asyncio.gather(*working, moving)
        await each_ended_once(sql, ids)
        # All that it may hold at once can still be had.
        await pool.enqueue_many([(f"k{n}", n) for n in range(KEYS)])
        jobs = stays.jobs()
        async with asyncio.timeout(30):
            held = [await anext(jobs) for _ in range(PLACES)]  # type: ignore[arg-type]
        assert len({job.key for job in held}) == PLACES
        for job in held:
            await job.ack()


async def test_standing_jobs_that_start_stop_and_move_at_random(small: Penstock, sql: Sql, dice: random.Random) -> None:
    # A member that is taken for dead finds out a little later, and its runs go on until then: beside those of the new owner.
    taken_for_dead = dice.random() < 0.5
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()
    pool: Pool[Any] = small.pool("agents", slots=16)

    @pool.standing
    async def run(job: Standing[Any]) -> AsyncIterator[None]:
        await some_steps(dice)
        running[job.key] += 1
        most[job.key] = max(most[job.key], running[job.key])
        try:
            await some_steps(dice)
            yield
            await some_steps(dice)
        finally:
            running[job.key] -= 1

    async with Workers(small) as workers:
        settled = asyncio.Event()

        async def come_and_go() -> None:
            while not settled.is_set():
                other = await workers.add()
                await some_steps(dice)
                await workers.remove(other)

        moving = asyncio.create_task(come_and_go())
        wanted: set[str] = set()
        for _ in range(ROUNDS):
            key = f"k{dice.randrange(KEYS)}"
            if dice.random() < 0.5:
                await pool.start(key)
                wanted.add(key)
            else:
                await pool.stop(key)
                wanted.discard(key)
            await some_steps(dice)
            if taken_for_dead and dice.random() < 0.1:
                # As a member that was declared dead finds it: its slots are gone, its runs are others'.
                for slot in await pool.slots():
                    if slot.owner is not None:
                        await sql.execute("select penstock.leave_group('agents', $1)", slot.owner)
                        break
        settled.set()
        await moving
        wanted |= {f"k{n}" for n in range(0, KEYS, 2)}
        for key in sorted(wanted):
            await pool.start(key)
        await eventually(
            lambda: {key: runs for key, runs in running.items() if runs} == dict.fromkeys(wanted, 1),
            "one run of each key that is wanted",
            60,
        )
        assert taken_for_dead or max(most.values()) == 1
    assert not any(running.values())


async def test_a_consumer_whose_group_is_moved_and_paused_at_random(small: Penstock, dice: random.Random) -> None:
    at_gate: set[int] = set()
    gate, full = asyncio.Event(), asyncio.Event()
    partitions = 2 * PLACES
    keys = [next(str(n) for n in range(1_000) if partition_of(str(n), partitions) == place) for place in range(partitions)]
    events: Stream[Any] = small.stream("events", partitions=partitions)

    @events.consumer(group="g", concurrency=PLACES, auto_offset_reset="earliest")
    async def handle(event: Event[Any]) -> None:
        if not full.is_set():
            await some_steps(dice)
            return
        at_gate.add(event.partition)
        await gate.wait()

    async with Workers(small) as workers:
        settled = asyncio.Event()

        async def come_and_go() -> None:
            while not settled.is_set():
                other = await workers.add()
                await some_steps(dice)
                await workers.remove(other)

        moving = asyncio.create_task(come_and_go())
        for number in range(ROUNDS):
            await events.append_many([NewEvent(n, key) for n, key in enumerate(keys)])
            way = dice.choice(["seek", "pause", "none"])
            if way == "seek":
                await events.seek("g", dice.choice(["earliest", "latest", {dice.randrange(partitions): number // 2}]))
            elif way == "pause":
                await events.pause("g")
                await some_steps(dice)
                await events.resume("g")
            await some_steps(dice)
        settled.set()
        await moving

        async def nothing_left() -> bool:
            return not any(lag.lag for lag in await events.lag("g"))

        await eventually(nothing_left, "the end of all events", 60)
        # As many handlers as there are places begin, and no more.
        full.set()
        await events.append_many([NewEvent(n, key) for n, key in enumerate(keys)])
        await eventually(lambda: len(at_gate) >= PLACES, "a handler at each place", 60)
        assert len(at_gate) == PLACES
        gate.set()
        await eventually(nothing_left, "the end", 60)


async def test_a_program_that_pulls_batches_and_is_interrupted(small: Penstock, dice: random.Random) -> None:
    """Each batch comes in order and without a gap, whenever the program stops asking for it."""
    events: Stream[Any] = small.stream("events", int, partitions=2)
    await events.declare()
    wanted = 40 * ROUNDS
    done: dict[int, int] = dict.fromkeys(range(2), 0)
    seen: set[tuple[int, int]] = set()

    async def append() -> None:
        for at in range(0, wanted, 40):
            await events.append_many([NewEvent(n) for n in range(at, at + 40)])
            await some_steps(dice)

    appending = asyncio.create_task(append())
    async with asyncio.timeout(120):
        while len(seen) < wanted:
            async with events.consume("g", auto_offset_reset="earliest", max_batch_size=dice.choice([1, 7, 100])) as batches:
                for _ in range(dice.randrange(1, 20)):
                    try:
                        async with asyncio.timeout(dice.random() * 0.05):
                            batch = await anext(batches)
                    except TimeoutError:
                        continue
                    assert batch.first_offset <= done[batch.partition], "events between were never given to the program"
                    await some_steps(dice)
                    if dice.random() < 0.2:
                        break
                    seen |= {(event.partition, event.offset) for event in batch.events}
                    done[batch.partition] = max(done[batch.partition], batch.next_offset)
    await appending
    assert len(seen) == wanted


@pytest.fixture(scope="module")
def served(databases: Any) -> Any:
    with databases.database() as url, serving(url) as served:
        yield served


async def test_long_polls_whose_clients_go_at_random(served: Served, dice: random.Random) -> None:
    """What a client that is gone was given comes back; the places of the type are all there in the end."""
    name = f"polled-{secrets.token_hex(4)}"
    body = {"name": name, "delivery_strategy": "at_least_once", "attempts": 5, "concurrency": PLACES, "visibility_timeout_s": 2}
    with served.client() as client:
        assert client.post("/v1/jobs", json=body).status_code == 201, client.post("/v1/jobs", json=body).text
        host, port = served.base_url.removeprefix("http://").split(":")

        async def poll() -> None:
            _, writer = await asyncio.open_connection(host, int(port))
            text = b'{"worker": "w1", "wait": "60s"}'
            head = f"POST /v1/jobs/{name}/claim HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer admin.{TOKEN}\r\n".encode()
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(text) + text)
            await writer.drain()
            await some_steps(dice)
            if dice.random() < 0.3:
                writer.transport.abort()
            else:
                writer.close()

        for _ in range(ROUNDS):
            polls = [asyncio.create_task(poll()) for _ in range(dice.randrange(1, 6))]
            await some_steps(dice)
            if dice.random() < 0.5:
                await asyncio.to_thread(put, client, name)
            await asyncio.gather(*polls)
        await eventually(lambda: "penstock_waiting_requests 0.0" in client.get("/metrics").text, "the end of the polls", 60)
        for _ in range(PLACES):
            await asyncio.to_thread(put, client, name)

        held: list[dict[str, Any]] = []

        def gathered() -> bool:
            with suppress(httpx.TimeoutException):
                held.extend(claim(client, name, worker="last", limit=PLACES - len(held), wait="5s"))
            return len(held) >= PLACES

        await eventually(lambda: asyncio.to_thread(gathered), "all places of the type", 60)
