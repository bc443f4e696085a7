"""What `benchmarks/compare.py` measures of one checkout, run with that checkout's interpreter.

    PATH/.venv/bin/python -P benchmarks/compared.py MEASURE SHARE     measure; the last line is JSON
    PATH/.venv/bin/python -P benchmarks/compared.py work N            a worker process, ends when N jobs have run

It stands alone: it imports nothing of `benchmarks`, and of Penstock only what applications use, since it must run with both
checkouts. `-P` keeps this folder out of the import path. Each run has an embedded server and a database of its own, so that a
checkout is measured with its own schema and its own configuration of the server.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import structlog
import uvloop

from penstock import Job, NewEvent, Penstock
from penstock.testing import TemporaryDatabases

ON_DISK = Path(tempfile.gettempdir())
"""Where the measured PostgreSQL keeps its files: in memory a flush would cost nothing."""

PACE = 2_000
"""Jobs a second of the open loop."""

TOKEN = "token-of-the-comparison"
CONNECTIONS = 50
UNDER_WAY = 16
Found = dict[str, tuple[float, str]]
"""By name of a measure: its value, and `up` when more is better, `down` when less is."""


class Run:
    """The measures of one checkout.

    Args:
        url: A fresh database.
        share: Part of the usual amount of work.
    """

    def __init__(self, url: str, share: float) -> None:
        self.url = url
        self.found: Found = {}
        self._share = share

    async def drain(self) -> None:
        """One worker process and jobs that do nothing: rate, processor time of worker and server, write-ahead log, memory."""
        jobs = self._some(150_000)
        async with Penstock(self.url) as app:
            await app.job_type("noop").enqueue_many([{"n": n} for n in range(jobs)])
        await self._drained("drain", jobs, "noop")

    async def enqueue(self) -> None:
        """In bulk, and one by one with 16 under way."""
        jobs, single = self._some(50_000), self._some(3_000)
        async with Penstock(self.url) as app:
            noop = app.job_type("noop")
            await noop.enqueue_many([])
            payloads = [{"n": n} for n in range(jobs)]
            cpu, own = await self._cpu_s(), _used_s(psutil.Process())
            started = time.perf_counter()
            await noop.enqueue_many(payloads)
            self._up("enqueue in bulk, jobs/s", jobs / (time.perf_counter() - started))
            own = _used_s(psutil.Process()) - own
            self._down("enqueue in bulk, CPU µs/job", (await self._cpu_s() - cpu + own) / jobs * 1e6)

            async def one(n: int) -> None:
                await noop.enqueue({"n": n})

            cpu, own = await self._cpu_s(), _used_s(psutil.Process())
            self._up(f"enqueue, {UNDER_WAY} under way, jobs/s", single / await _crowd(single, UNDER_WAY, one))
            own = _used_s(psutil.Process()) - own
            self._down(f"enqueue, {UNDER_WAY} under way, CPU µs/job", (await self._cpu_s() - cpu + own) / single * 1e6)

    async def latency(self) -> None:
        """From when a job was due to the start of its handler: idle, and in an open loop at 2,000 jobs a second.

        A job is stamped with the time when it was due, so that a sender that falls behind hides nothing.
        """
        async with Penstock(self.url) as app:
            stamped = app.job_type("stamped", int)
            await stamped.enqueue_many([])
            count = self._some(100)
            async with self._worker(count, "stamped") as result:
                for _ in range(count):
                    await asyncio.sleep(random.uniform(0.03, 0.1))
                    await stamped.enqueue(time.time_ns())
                self._waits("latency, idle", (await result())["waits_ms"])
            count = self._some(10_000)
            async with self._worker(count, "stamped") as result:
                await paced(count, PACE, stamped.enqueue_many)
                self._waits(f"latency at {PACE:,} jobs/s", (await result())["waits_ms"])

    async def pools(self) -> None:
        """Drains of pools with few and many keys, and the waits of quiet keys beside a noisy one."""
        # Enough of them that the first plans and connections do not count.
        jobs = self._some(60_000)
        for keys in (1, 1_000, 20_000):
            async with Penstock(self.url) as app:
                pool = app.pool(f"keys{keys}")
                await pool.enqueue_many([(f"key{n % keys}", n) for n in range(jobs)])
            await self._drained(f"pool with {keys:,} keys, drain", jobs, f"keys{keys}")
        count = self._some(4_000)
        chance = random.Random(4)
        async with Penstock(self.url) as app:
            noisy = app.pool("noisy")
            await noisy.enqueue_many([])

            async def send(stamps: list[int]) -> None:
                await noisy.enqueue_many(
                    [("noisy" if chance.random() < 0.9 else f"quiet{chance.randrange(999)}", stamp) for stamp in stamps]
                )

            async with self._worker(count, "noisy") as result:
                await paced(count, PACE // 2, send)
                self._waits("quiet keys beside a noisy one", (await result())["waits_ms"])

    async def streams(self) -> None:
        """Append, one batch and 16 batches under way, and consume; batches of 100 events of 100 bytes."""
        events, batch = self._some(300_000), 100
        payload = random.Random(1).randbytes(100)
        items = [NewEvent(payload, str(n)) for n in range(batch)]
        async with Penstock(self.url) as app:
            stream = app.stream("compared", bytes, partitions=4)
            await stream.declare()

            async def append(_: int) -> None:
                await stream.append_many(items)

            for under_way in (1, UNDER_WAY):
                cpu, own = await self._cpu_s(), _used_s(psutil.Process())
                took = await _crowd(events // batch, under_way, append)
                self._up(f"append, {under_way} under way, events/s", events / took)
                own = _used_s(psutil.Process()) - own
                self._down(f"append, {under_way} under way, CPU µs/event", (await self._cpu_s() - cpu + own) / events * 1e6)
            seen, cpu, own, started = 0, await self._cpu_s(), _used_s(psutil.Process()), time.perf_counter()
            wanted = 2 * (events // batch) * batch
            size: dict[str, Any] = {_keyword(stream.consume, "max_batch_size", "size"): batch}
            async with stream.consume("compared", **size) as batches:
                async for each in batches:
                    seen += len(each)
                    if seen >= wanted:
                        break
            self._up("consume, events/s", seen / (time.perf_counter() - started))
            own = _used_s(psutil.Process()) - own
            self._down("consume, CPU µs/event", (await self._cpu_s() - cpu + own) / seen * 1e6)

    async def topics(self) -> None:
        """Publish to 5,000 subscribers, and drain a queue of copies."""
        size = self._some(5_000)
        connection = await asyncpg.connect(self.url)
        async with Penstock(self.url) as app:
            topic = app.topic("compared")
            await topic.declare()
            await app.job_type("copies").enqueue_many([])
            await connection.execute(
                "select count(*) from penstock.subscribe_many($1,"
                " array(select 'c' || n from generate_series(1, $2::integer) as n), p_queue => 'copies')",
                "compared",
                size,
            )
            cpu, own = await self._cpu_s(), _used_s(psutil.Process())
            started, messages = time.perf_counter(), 16
            for n in range(messages):
                await topic.publish({"text": "x" * 1000, "n": n})
            self._up("publish, copies/s", messages * size / (time.perf_counter() - started))
            own = _used_s(psutil.Process()) - own
            self._down("publish, CPU µs/copy", (await self._cpu_s() - cpu + own) / (messages * size) * 1e6)
        await connection.close()
        await self._drained("copies of a topic, drain", messages * size, "copies")

    async def http(self) -> None:
        """PUT of single jobs over 50 connections, from one client process, to one server process."""
        async with _http_server(self.url) as (pid, host, port):
            await self._put(pid, host, port)

    async def _put(self, pid: int, host: str, port: int) -> None:
        admin = f"Authorization: Bearer admin.{TOKEN}\r\nContent-Type: application/json"

        def request(method: str, path: str, body: bytes) -> bytes:
            head = f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\n{admin}\r\nContent-Length: {len(body)}\r\n\r\n"
            return head.encode() + body

        connections = [await asyncio.open_connection(host, port) for _ in range(CONNECTIONS)]
        kind = {"name": "echo", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
        await _exchange(connections[0], request("POST", "/v1/jobs", json.dumps(kind).encode()))
        put = request("PUT", "/v1/jobs/echo/random_id", b'{"data": {"user-agent": "compare"}}')
        jobs = self._some(15_000)
        cpu = _used_s(psutil.Process(pid))
        took = await _crowd(jobs, CONNECTIONS, lambda n: _exchange(connections[n % CONNECTIONS], put), lanes=True)
        self._up(f"HTTP PUT, {CONNECTIONS} connections, jobs/s", jobs / took)
        self._down("HTTP PUT, server's CPU µs/job", (_used_s(psutil.Process(pid)) - cpu) / jobs * 1e6)
        for _, writer in connections:
            writer.close()

    # -- how

    def _some(self, usual: int) -> int:
        return max(20, int(usual * self._share))

    def _up(self, name: str, value: float) -> None:
        self.found[name] = (value, "up")

    def _down(self, name: str, value: float) -> None:
        self.found[name] = (value, "down")

    def _waits(self, name: str, waits: Sequence[float]) -> None:
        ordered = sorted(waits)
        for percent in (50, 99):
            self._down(f"{name}, p{percent} ms", ordered[min(len(ordered) - 1, len(ordered) * percent // 100)])

    async def _drained(self, name: str, jobs: int, kind: str) -> None:
        """Drain what waits with one worker process."""
        connection = await asyncpg.connect(self.url)
        await connection.execute("checkpoint")
        log, cpu = await connection.fetchval("select pg_current_wal_insert_lsn()"), await self._cpu_s()
        async with self._worker(jobs, kind) as result:
            seen = await result()
        written = await connection.fetchval("select pg_current_wal_insert_lsn() - $1::pg_lsn", log)
        if left := await connection.fetchval("select count(*) from penstock.queued_jobs where name = $1", kind):
            raise RuntimeError(f"{left} jobs are not settled")
        await connection.close()
        self._up(f"{name}, jobs/s", jobs / seen["seconds"])
        self._down(f"{name}, worker's CPU µs/job", seen["cpu_s"] / jobs * 1e6)
        self._down(f"{name}, server's CPU µs/job", (await self._cpu_s() - cpu) / jobs * 1e6)
        self._down(f"{name}, log bytes/job", float(written) / jobs)
        self._down(f"{name}, worker's MB", seen["rss_mb"])

    @asynccontextmanager
    async def _worker(self, jobs: int, kind: str) -> AsyncIterator[Callable[[], Awaitable[dict[str, Any]]]]:
        """A worker process that ends when so many jobs have run; yields how to wait for what it saw."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", __file__, "work", str(jobs), kind,
            env={**os.environ, "PENSTOCK_DATABASE_URL": self.url}, stdout=subprocess.PIPE, limit=2**24,
        )  # fmt: skip

        async def result() -> dict[str, Any]:
            output, _ = await asyncio.wait_for(process.communicate(), 300)
            seen: dict[str, Any] = json.loads(output.splitlines()[-1])
            return seen

        try:
            assert process.stdout is not None
            if b"ready" not in await asyncio.wait_for(process.stdout.readline(), 60):
                raise RuntimeError("the worker process ended before it was ready")
            yield result
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _cpu_s(self) -> float:
        """Seconds of processor time that the database server has used so far."""
        connection = await asyncpg.connect(self.url)
        folder = await connection.fetchval("select current_setting('data_directory')")
        await connection.close()
        server = psutil.Process(int((Path(folder) / "postmaster.pid").read_text().split()[0]))
        while True:
            try:
                # Of backends that have ended it is among the server's own.
                return sum(_used_s(process) for process in (server, *server.children()))
            except psutil.NoSuchProcess:  # one ended in between: count again
                server.cpu_times()


async def _crowd(count: int, width: int, do: Callable[[int], Awaitable[None]], *, lanes: bool = False) -> float:
    """Do something `count` times with `width` under way; returns the seconds. `lanes`: hand over the number of the lane."""
    left = iter(range(count))

    async def lane(number: int) -> None:
        for n in left:
            await do(number if lanes else n)

    started = time.perf_counter()
    await asyncio.gather(*(lane(number) for number in range(width)))
    return time.perf_counter() - started


async def paced(count: int, rate: int, send: Callable[[list[int]], Awaitable[object]]) -> None:
    """An open loop: send stamps of when each was due, in nanoseconds, as soon as it is due."""
    started, sent = time.time_ns(), 0
    while sent < count:
        due = min(count, (time.time_ns() - started) * rate // 10**9)
        if due > sent:
            await send([started + n * 10**9 // rate for n in range(sent, due)])
            sent = due
        await asyncio.sleep(0.001)


async def _exchange(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes) -> None:
    reader, writer = connection
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    body = await reader.readexactly(int(length[1])) if length else b""
    if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 201", b"HTTP/1.1 202")):
        raise RuntimeError(f"{head.splitlines()[0]!r}: {body[:300]!r}")


@asynccontextmanager
async def _http_server(url: str) -> AsyncIterator[tuple[int, str, int]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "penstock", "server", "--port", "0",
        env={**os.environ, "PENSTOCK_DATABASE_URL": url, "PENSTOCK_HTTP_TOKEN": TOKEN}, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        found = re.search(r"http://([^:/\s]+):(\d+)", said)
        if found is None:
            raise RuntimeError(f"the HTTP server said {said!r}")
        yield process.pid, found[1], int(found[2])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _used_s(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:4]))


def _keyword(function: Callable[..., object], *names: str) -> str:
    """The one of an argument's names, newest first, that this checkout has."""
    return next(name for name in names if name in inspect.signature(function).parameters)


async def work(expected: int, kind: str) -> None:
    """Work until `expected` jobs have run, and print what was seen."""
    ran, first, waits = 0, 0.0, []
    app, own = Penstock(), psutil.Process()

    async def noop(job: Job[Any]) -> None:
        nonlocal ran, first
        if ran == 0:
            first = time.perf_counter()
        ran += 1

    async def stamped(job: Job[Any]) -> None:
        nonlocal ran
        if job.key != "noisy":
            waits.append((time.time_ns() - job.data) / 1e6)
        ran += 1

    if kind.startswith(("keys", "noisy")):
        pool: Any = app.pool(kind)
        # The commit before may still call it `handler`.
        declare = getattr(pool, "job", None) or pool.handler
        declare(stamped if kind == "noisy" else noop)
    else:
        app.job(kind)(stamped if kind == "stamped" else noop)
    async with app:
        worker = await app.worker()
        task = asyncio.create_task(worker.run())
        await worker.started()
        idle = _used_s(own)
        print("ready", flush=True)
        while ran < expected and not task.done():
            await asyncio.sleep(0.005)
        worker.stop()
        await task
        # With the results of the last jobs in the database.
        seconds = time.perf_counter() - first
    seen = {"seconds": seconds, "waits_ms": waits, "cpu_s": _used_s(own) - idle, "rss_mb": own.memory_info().rss / 1e6}
    print(json.dumps(seen))


def main() -> None:
    """Measure, or be a worker."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    if sys.argv[1] == "work":
        uvloop.run(work(int(sys.argv[2]), sys.argv[3]))
        return
    with TemporaryDatabases(parent=ON_DISK) as databases, databases.database() as url:
        run = Run(url, float(sys.argv[2]))
        uvloop.run(getattr(run, sys.argv[1])())
    print(json.dumps(run.found))


if __name__ == "__main__":
    main()
