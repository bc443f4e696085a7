"""Fan-out: what a publish costs by the number of subscribers, waiting for all of them, and working copies beside ordinary jobs.

    .venv/bin/python -m benchmarks.topics                            # everything, about a minute
    .venv/bin/python -m benchmarks.topics --only fanout --most 100000

On one embedded PostgreSQL (fsync on). The payload has 1 KB; write-ahead log is counted after a checkpoint, without its full pages
in the first publish, and with the publishes between.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from datetime import timedelta
from typing import Any

import asyncpg
import uvloop

from benchmarks.environments import ON_DISK
from benchmarks.http import TOKEN, peak_mb, server
from benchmarks.report import percentile, print_rows
from penstock import Job, Penstock, Settings, Topic
from penstock.testing import TemporaryDatabases

PAYLOAD = {"text": "x" * 1000}
CLIENTS = "array(select 'c' || n from generate_series(1, $2::integer) as n)"
ROUNDS = 3
Rows = list[tuple[str, str, str]]


async def fanout(url: str, rows: Rows, most: int) -> None:
    """Publish to 1, 100, 10,000 and 100,000 subscribers; and as many enqueues of the same payload, for comparison."""
    connection = await asyncpg.connect(url)
    async with Penstock(url, settings=Settings(command_timeout=timedelta(minutes=5))) as app:
        for size in (n for n in (1, 100, 10_000, 100_000) if n <= most):
            topic = app.topic(f"to-{size}")
            await topic.declare()
            started = time.perf_counter()
            await connection.execute(f"select count(*) from penstock.subscribe_many($1, {CLIENTS})", topic.name, size)
            rows.append((f"subscribe {size:,} at once", f"{time.perf_counter() - started:.3f} s", ""))
            await topic.publish(PAYLOAD)
            seconds, wal = [], []
            for _ in range(ROUNDS):
                await connection.execute("checkpoint")
                await topic.publish(PAYLOAD)  # carries the full pages that follow a checkpoint
                before = await connection.fetchval("select pg_current_wal_insert_lsn()")
                started = time.perf_counter()
                await topic.publish(PAYLOAD)
                seconds.append(time.perf_counter() - started)
                wal.append(await _written(connection, before) / size)
            rows.append(
                (
                    f"publish to {size:,}",
                    f"{statistics.median(seconds) * 1000:,.1f} ms",
                    f"{size / statistics.median(seconds):,.0f} copies/s",
                )
            )
            rows.append((f"write-ahead log, to {size:,}", f"{statistics.median(wal):,.0f} bytes/subscriber", ""))
        stored = "select count(*), count(*) filter (where data <> 'null') from penstock.queued_jobs"
        for copies, payloads in await connection.fetch(stored):
            rows.append(("copies waiting", f"{copies:,}", f"with a payload of their own: {payloads}"))
        plain = app.job_type("plain")
        size = min(most, 10_000)
        await plain.enqueue_many([PAYLOAD] * size)
        before = await connection.fetchval("select pg_current_wal_insert_lsn()")
        await plain.enqueue_many([PAYLOAD] * size)
        each = await _written(connection, before) / size
        rows.append((f"write-ahead log of {size:,} ordinary jobs", f"{each:,.0f} bytes/job", "the payload in each"))
    await connection.close()


async def foreground(url: str, rows: Rows, subscribers: int = 1_000) -> None:
    """Publish and wait for 1,000 live subscribers, all in one worker process."""
    app = Penstock(url, settings=Settings(concurrency=subscribers))
    topic: Topic[Any] = app.topic("all")
    for n in range(subscribers):
        topic.subscriber(f"c{n}")(_answer)
    async with app:
        await topic.declare()
        started = time.perf_counter()
        worker = await app.worker()
        rows.append((f"a worker subscribes {subscribers:,} handlers", f"{time.perf_counter() - started:.2f} s", ""))
        working = asyncio.create_task(worker.run())
        await worker.started()
        await topic.publish(0, background=False)
        took = []
        for n in range(20):
            started = time.perf_counter()
            receipt = await topic.publish(n, background=False)
            took.append(time.perf_counter() - started)
            assert receipt.complete, receipt
            assert len(receipt.outcomes or []) == subscribers
        took.sort()
        rows.append((
            f"publish and wait for {subscribers:,} live subscribers",
            f"p50 {percentile(took, 50) * 1000:,.0f} ms, p99 {percentile(took, 99) * 1000:,.0f} ms",
            f"{subscribers / statistics.median(took):,.0f} outcomes/s",
        ))  # fmt: skip
        worker.stop()
        await working


async def _answer(job: Job[int]) -> int:
    return job.data


async def working(url: str, rows: Rows, size: int = 20_000) -> None:
    """Claim and settle copies beside ordinary jobs, in turn, medians; and the time from publish to the handler."""
    connection = await asyncpg.connect(url)
    async with Penstock(url) as app:
        plain = app.job_type("plain")
        topic = app.topic("t")
        await topic.declare()
        await app.enqueue_many(app.job_type("copies"), [])
        await connection.execute(
            f"select count(*) from penstock.subscribe_many($1, {CLIENTS}, p_queue => 'copies')", topic.name, size
        )
        ordinary, copies = [], []
        for _ in range(ROUNDS):
            await plain.enqueue_many([PAYLOAD] * size)
            ordinary.append(size / await _drain(connection, "plain", size))
            await topic.publish(PAYLOAD)
            copies.append(size / await _drain(connection, "copies", size))
            await connection.execute("vacuum penstock.queued_jobs")
        ratios = [ours / theirs for ours, theirs in zip(copies, ordinary, strict=True)]
        rows.append(("claim and settle, ordinary jobs of 1 KB", f"{statistics.median(ordinary):,.0f} jobs/s", "1.00"))
        rows.append(("claim and settle, copies", f"{statistics.median(copies):,.0f} jobs/s", f"{statistics.median(ratios):.2f}"))

        seen: asyncio.Queue[float] = asyncio.Queue()

        @app.topic("u").subscriber("live")
        async def live(job: Job[Any]) -> None:
            seen.put_nowait(time.perf_counter())

        worker = await app.worker("u_live")
        running = asyncio.create_task(worker.run())
        await worker.started()
        took = []
        for _ in range(100):
            await asyncio.sleep(0.25)
            started = time.perf_counter()
            await app.topic("u").publish(PAYLOAD)
            took.append(await seen.get() - started)
        took.sort()
        rows.append((
            "publish to the start of the handler, idle", f"p50 {percentile(took, 50) * 1000:.1f} ms",
            f"p99 {percentile(took, 99) * 1000:.1f} ms",
        ))  # fmt: skip
        worker.stop()
        await running
    await connection.close()


async def live(url: str, rows: Rows, connections: int = 1_000) -> None:
    """Deliver each message to 1,000 connections by Server-Sent Events, all at one server process.

    From the answer to the publish, when it is committed, until the last connection has it.
    """
    with server(url) as (process, client):
        client.post("/v1/topics", json={"name": "live"}).raise_for_status()
        before = peak_mb(process.pid)
        arrivals: asyncio.Queue[float] = asyncio.Queue()
        subscribed = asyncio.Semaphore(0)
        host, port = client.base_url.host, client.base_url.port
        authorization = f"Authorization: Bearer admin.{TOKEN}"
        request = f"GET /v1/topics/live/deliveries HTTP/1.1\r\nHost: {host}\r\n{authorization}\r\n\r\n".encode()
        started = time.perf_counter()
        readers = []
        opening = asyncio.Semaphore(50)
        for _ in range(connections):
            readers.append(asyncio.create_task(_receive(str(host), port or 80, request, opening, subscribed, arrivals)))
        for _ in range(connections):
            await subscribed.acquire()
        rows.append((f"{connections:,} connections subscribe", f"{time.perf_counter() - started:.1f} s", ""))
        took = []
        async with Penstock(url) as app:
            topic = app.topic("live")
            await topic.publish(PAYLOAD)
            for _ in range(connections):
                await arrivals.get()
            for _ in range(20):
                receipt = await topic.publish(PAYLOAD)
                committed = time.perf_counter()
                assert receipt.receivers == connections, receipt
                took.append(max([await arrivals.get() for _ in range(connections)]) - committed)
        took.sort()
        rows.append((
            f"publish to {connections:,} connections, the last one",
            f"p50 {percentile(took, 50) * 1000:,.0f} ms, p99 {percentile(took, 99) * 1000:,.0f} ms",
            f"server {before:.0f} MB before, {peak_mb(process.pid):.0f} MB at most",
        ))  # fmt: skip
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _receive(
    host: str,
    port: int,
    request: bytes,
    opening: asyncio.Semaphore,
    subscribed: asyncio.Semaphore,
    arrivals: asyncio.Queue[float],
) -> None:
    async with opening:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request)
        await reader.readuntil(b"event: subscribed")
        subscribed.release()
    try:
        while True:
            await reader.readuntil(b"\nid: ")
            await reader.readuntil(b"}}\n\n")
            arrivals.put_nowait(time.perf_counter())
    finally:
        writer.close()


async def _drain(connection: asyncpg.Connection[Any], name: str, size: int) -> float:
    started = time.perf_counter()
    left = size
    while left:
        rows = await connection.fetch("select id, attempt, lease, data from penstock.claim('bench', array[$1], 500)", name)
        await connection.execute(
            "select penstock.settle($1, $2, $3)",
            [r["id"] for r in rows],
            [r["attempt"] for r in rows],
            [r["lease"] for r in rows],
        )
        left -= len(rows)
    return time.perf_counter() - started


async def _written(connection: asyncpg.Connection[Any], since: str) -> float:
    return float(await connection.fetchval("select pg_current_wal_insert_lsn() - $1::pg_lsn", since))


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.topics", description=__doc__)
    parser.add_argument("--only", choices=["fanout", "foreground", "working", "live"])
    parser.add_argument("--most", type=int, default=100_000, help="most subscribers")
    given = parser.parse_args()
    rows: Rows = []
    with TemporaryDatabases(parent=ON_DISK) as databases:
        for measure, arguments in ((fanout, (given.most,)), (foreground, ()), (working, ()), (live, ())):
            if given.only in (None, measure.__name__):
                with databases.database() as url:
                    uvloop.run(measure(url, rows, *arguments))
    print_rows(rows)


if __name__ == "__main__":
    main()
