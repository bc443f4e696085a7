"""Spark: the connector beside Spark's own JDBC, the history pipeline, and what it costs the queue. `python -m benchmarks.spark`.

The JDBC driver is Debian's (libpostgresql-jdbc-java). JDBC is measured twice: as it is by default, one connection that
fetches everything at once, and with what an expert sets (partitions, fetch size, batched inserts). Needs socat, since JDBC
speaks TCP only and the embedded server a Unix socket only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.environments import ON_DISK
from benchmarks.spark_batches import EVENTS, IDLE_PER_S, MicroBatches, missed
from penstock.history.lake import Lake
from penstock.spark import bulk, session
from penstock.spark.history import Pipeline
from penstock.spark.schemas import ARCHIVED_JOBS
from penstock.testing import TemporaryDatabases

JDBC_JAR = Path("/usr/share/java/postgresql.jar")
_TURN_S = 6


def ask(url: str, query: str, *args: Any) -> list[Any]:
    async def run() -> list[Any]:
        connection = await asyncpg.connect(url)
        try:
            return list(await connection.fetch(query, *args, timeout=600))
        finally:
            await connection.close()

    return asyncio.run(run())


def fill(url: str, jobs: int) -> None:
    """An archive of some minutes, written directly: what is measured is reading it."""
    ask(url, "select count(*) from penstock.declare_job_type('t')")
    for at in range(0, jobs, 5_000):
        ask(
            url,
            "insert into penstock.archived_jobs (id, finished_at, created_at, run_after, started_at, status, attempt,"
            " max_attempts, priority, name, worker, key, data) select gen_random_uuid(), moment, moment - interval '2 s',"
            " moment - interval '1 s', moment - make_interval(secs => random()), 'succeeded', 1, 5, 0, 'type-' || n % 5, 'w',"
            " 'key-' || n % 1000, jsonb_build_object('n', n, 'text', repeat('x', 60))"
            " from (select n, now() - interval '5 minutes' + make_interval(secs => n * 1e-4) as moment"
            " from generate_series($1::integer, $2::integer) n) numbered",
            at,
            min(at + 4_999, jobs - 1),
        )
    ask(url, "analyze penstock.archived_jobs")


def timed(work: Callable[[], Any], runs: int) -> float:
    """The median time of some runs after one to warm up."""
    work()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


class Bench:
    """Collects rows of the table."""

    def __init__(self, url: str, jobs: int, runs: int, lake: str) -> None:
        self.url, self.jobs, self.runs, self.lake = url, jobs, runs, lake
        self.rows: list[tuple[str, str, str]] = []
        self.missed: list[str] = []
        config = {"spark.driver.memory": "2g", **({"spark.jars": str(JDBC_JAR)} if JDBC_JAR.exists() else {})}
        self.spark = session(master="local[2]", config=config)
        parts = urlsplit(url)
        self.jdbc = {
            "url": f"jdbc:postgresql://{parts.hostname}:{parts.port}{parts.path}",
            "driver": "org.postgresql.Driver",
            "user": parts.username or "",
        }

    def note(self, what: str, seconds: float, rows: int, base: float | None = None) -> None:
        compared = "" if base is None else f"{base / seconds:.2f} times the speed of JDBC"
        self.row(what, f"{seconds:.2f} s, {rows / seconds:,.0f}/s", compared)

    def row(self, *row: str) -> None:
        """Keep a row, and print it at once: the whole takes minutes."""
        self.rows.append((row[0], row[1], row[2] if len(row) > 2 else ""))
        print(*row, sep=" | ", flush=True)

    def read(self) -> None:
        spark, url = self.spark, self.url
        bounds = ask(url, "select min(finished_at)::text, max(finished_at)::text from penstock.archived_jobs")[0]
        query = (
            "(select id::text, name, status::text, key, unique_key, priority, attempt, max_attempts, worker, created_at,"
            " run_after, started_at, finished_at, expires_at, data::text, errors::text, result::text, replay_of::text from"
            " penstock.archived_jobs) as jobs"
        )

        def noop(frame: Any) -> None:
            frame.write.format("noop").mode("overwrite").save()

        def load(reader: Any) -> None:
            noop(reader.load())

        # Equal work in each block of rows: the same columns, by each reader.
        few = "(select name, status::text, finished_at from penstock.archived_jobs) as jobs"
        bases: dict[str, float | None] = {"all columns": None, "3 columns": None}
        if JDBC_JAR.exists():
            for columns, asked in (("all columns", query), ("3 columns", few)):
                plain = spark.read.format("jdbc").options(**self.jdbc, dbtable=asked)
                bases[columns] = default = timed(partial(load, plain), self.runs)
                self.note(f"read, {columns}: JDBC, defaults", default, self.jobs)
                tuned = spark.read.format("jdbc").options(
                    **self.jdbc, dbtable=asked, fetchsize="10000", numPartitions="4", partitionColumn="finished_at",
                    lowerBound=bounds[0], upperBound=bounds[1],
                )  # fmt: skip
                expert = timed(partial(load, tuned), self.runs)
                self.note(f"read, {columns}: JDBC, 4 partitions, fetch size 10,000", expert, self.jobs, default)
        ours = spark.read.format("penstock").option("url", url).option("minPartitions", "4")
        # The columns that JDBC reads. Dropping one after the load would read it too, and copy every row once more.
        same = ",".join(name for name in ARCHIVED_JOBS if name != "xid")
        seconds = timed(lambda: noop(ours.option("columns", same).load()), self.runs)
        self.note("read, all columns: penstock", seconds, self.jobs, bases["all columns"])
        seconds = timed(lambda: noop(ours.option("columns", "name,status,finished_at").load()), self.runs)
        self.note("read, 3 columns: penstock", seconds, self.jobs, bases["3 columns"])

    def write(self) -> None:
        spark, url = self.spark, self.url
        frame = spark.range(self.jobs).selectExpr("id as n", "repeat('x', 60) as text")
        frame = bulk.as_jobs(frame, bulk.Columns()).localCheckpoint()
        base = None
        if JDBC_JAR.exists():
            # What a job has, and the key that keeps its id from coming twice.
            ask(
                url,
                "create table if not exists public.plain (id uuid primary key default gen_random_uuid(), name text not null,"
                " seq bigserial, run_after timestamptz not null default now(), created_at timestamptz not null default now(),"
                " max_attempts smallint not null default 5, priority smallint not null default 0, data jsonb not null)",
            )
            ask(url, "create index if not exists plain_name on public.plain (name, seq)")
            rows = frame.selectExpr("'t' as name", "data")

            def jdbc(**more: str) -> None:
                ask(url, "truncate public.plain")
                to = {**self.jdbc, "url": self.jdbc["url"] + "?reWriteBatchedInserts=true&stringtype=unspecified"}
                rows.write.format("jdbc").options(**to, dbtable="public.plain", **more).mode("append").save()

            base = timed(jdbc, self.runs)
            self.note("write: JDBC, defaults, into a table with the columns and keys of jobs", base, self.jobs)
            tuned = timed(lambda: jdbc(batchsize="10000"), self.runs)
            self.note("write: JDBC, batches of 10,000, the same", tuned, self.jobs, base)

        def ours() -> None:
            ask(url, "truncate penstock.queued_jobs")
            bulk.enqueue(frame, url, "t", slice_rows=self.jobs)

        seconds = timed(ours, self.runs)
        self.note("write: penstock, jobs in the queue, exactly once", seconds, self.jobs, base)
        ask(url, "truncate penstock.queued_jobs")

    def batches(self) -> None:
        """Micro-batches by partitions, and an idle query: the budgets."""
        measured = MicroBatches(self.spark, self.url)
        by_width = measured.by_partitions(runs=self.runs)
        one = by_width[1][0]
        for width, (seconds, opened) in by_width.items():
            self.row(
                f"a batch of {EVENTS:,} events over {width} partitions",
                f"{seconds:.2f} s, {opened} connections opened",
                f"{seconds / one:.2f} of one partition",
            )
        idle = measured.idle()
        self.row("an idle query over 200 streams", f"{idle:.1f} transactions/s", f"at most {IDLE_PER_S:.0f}")
        self.missed += missed(by_width, idle)

    def history(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            ran = Pipeline(self.spark, self.url, Lake("bench", folder)).run()
            self.note("history pipeline, batches of 200,000", time.perf_counter() - started, ran.jobs)

    def latency(self) -> None:
        """From the archive to the sink of a running query, and its smallest batch."""
        arrived: list[float] = []

        def batch(frame: Any, _: int) -> None:
            arrived.extend(time.time() - row.finished_at.timestamp() for row in frame.select("finished_at").collect())

        with tempfile.TemporaryDirectory() as folder:
            query = (
                self.spark.readStream.format("penstock").option("url", self.url).option("columns", "finished_at").load()
                .writeStream.foreachBatch(batch).option("checkpointLocation", folder).start()
            )  # fmt: skip
            while not arrived:
                self._one()
                time.sleep(1)
            arrived.clear()
            for count in range(1, 31):
                self._one()
                deadline = time.monotonic() + 30
                while len(arrived) < count and time.monotonic() < deadline:
                    time.sleep(0.005)
            query.stop()
        waits = sorted(arrived)
        self.row("job finished to foreachBatch", f"p50 {waits[len(waits) // 2] * 1000:.0f} ms, most {waits[-1] * 1000:.0f} ms")

    def drain(self) -> None:
        """What a continuous pipeline costs the queue beside it, by what the archive has of each second of long drains.

        Both rates come from one drain, since the machine's own speed changes from minute to minute. First a pipeline that does
        not wait for others, stopped and going on by turns of some seconds; then one as it is by default, whose batches come
        about once a minute under load: the whole drain beside its seconds without Spark's work.
        """
        ask(self.url, "select count(*) from penstock.declare_job_type('noop')")
        working: dict[int, bool] = {}
        with (
            self._pipeline("--throttle-timeout", "0") as pipeline,
            self._meanwhile(lambda done: _by_turns(pipeline, working, done)),
        ):
            rates = self._by_second(3 * self.jobs, working)
        without, beside = statistics.mean(rates[False]), statistics.mean(rates[True])
        self.row("drain, the pipeline stopped", f"{without:,.0f} jobs/s", f"in {len(rates[False])} seconds")
        self.row("drain, the pipeline working", f"{beside:,.0f} jobs/s", f"{beside / without:.2f}, in {len(rates[True])} seconds")
        working = {}
        with self._pipeline() as pipeline, self._meanwhile(lambda done: _at_work(pipeline, working, done)):
            rates = self._by_second(4 * self.jobs, working)
        without, beside = statistics.mean(rates[False]), statistics.mean(rates[False] + rates[True])
        share = f"{beside / without:.2f}, Spark at work in {len(rates[True])} of {len(rates[False] + rates[True])} seconds"
        self.row("drain, the pipeline as by default", f"{beside:,.0f} jobs/s", share)

    @contextmanager
    def _pipeline(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """A continuous pipeline that has run for a while, and caught up."""
        command = [sys.executable, "-m", "penstock", "history", "run", "--continuous", "--name", "beside", *options]
        pipeline = subprocess.Popen(
            [*command, "--lake", self.lake], env={**os.environ, "PENSTOCK_DATABASE_URL": self.url}, process_group=0
        )
        try:
            self._caught_up(pipeline)
            self._drained(self.jobs)
            self._caught_up(pipeline)
            yield pipeline
        finally:
            pipeline.terminate()
            pipeline.wait()

    @contextmanager
    def _meanwhile(self, work: Callable[[threading.Event], None]) -> Iterator[None]:
        done = threading.Event()
        with ThreadPoolExecutor(1) as other:
            working = other.submit(work, done)
            try:
                yield
            finally:
                done.set()
            working.result()

    def _by_second(self, jobs: int, working: dict[int, bool]) -> dict[bool, list[int]]:
        """Drain, and tell the jobs of its seconds, with and without the pipeline at work."""
        self._drained(jobs)
        settled = {
            row["second"]: row["jobs"]
            for row in ask(
                self.url,
                "select extract(epoch from date_trunc('second', finished_at))::bigint as second, count(*) as jobs"
                " from penstock.archived_jobs where name = 'noop' group by 1",
            )
        }
        rates: dict[bool, list[int]] = {True: [], False: []}
        for second, at_work in list(working.items()):
            # A drain begins and ends within a second.
            if settled.keys() >= {second - 1, second, second + 1}:
                rates[at_work].append(settled[second])
        return rates

    def _caught_up(self, pipeline: subprocess.Popen[bytes]) -> None:
        behind = (
            "select (select count(*) from penstock.archived_jobs)"
            " > coalesce((select jobs from penstock.lakes where name = 'beside'), 0) as some"
        )
        while ask(self.url, behind)[0]["some"]:
            if pipeline.poll() is not None:
                raise RuntimeError(f"the pipeline ended with {pipeline.returncode}")
            time.sleep(0.5)

    def _drained(self, jobs: int) -> None:
        """Enqueue jobs, and have one worker process run them."""
        for at in range(0, jobs, 100_000):
            some = min(100_000, jobs - at)
            ask(self.url, "select count(*) from penstock.enqueue_many('noop', array_fill('1'::jsonb, array[$1::integer]))", some)
        command = [sys.executable, "-m", "penstock", "worker", "benchmarks.app:app", "--type", "noop"]
        worker = subprocess.Popen(command, env={**os.environ, "PENSTOCK_DATABASE_URL": self.url})
        try:
            while ask(self.url, "select exists (select from penstock.queued_jobs where name = 'noop') as some")[0]["some"]:
                if worker.poll() is not None:
                    raise RuntimeError(f"the worker ended with {worker.returncode}")
                time.sleep(0.2)
        finally:
            worker.terminate()
            worker.wait()

    def _one(self) -> None:
        ask(
            self.url,
            "insert into penstock.archived_jobs (id, finished_at, created_at, run_after, status, attempt, max_attempts,"
            " priority, name, data) values (gen_random_uuid(), clock_timestamp(), now(), now(), 'succeeded', 1, 5, 0, 't', '{}')",
        )


def _by_turns(pipeline: subprocess.Popen[bytes], working: dict[int, bool], done: threading.Event) -> None:
    for turn in count():
        os.killpg(pipeline.pid, signal.SIGCONT if turn % 2 else signal.SIGSTOP)
        first = int(time.time()) + 1
        working.update(dict.fromkeys(range(first, first + _TURN_S - 1), turn % 2 == 1))
        if done.wait(_TURN_S):
            break
    os.killpg(pipeline.pid, signal.SIGCONT)


def _at_work(pipeline: subprocess.Popen[bytes], working: dict[int, bool], done: threading.Event) -> None:
    java = next(child for child in psutil.Process(pipeline.pid).children(recursive=True) if "java" in child.name())
    used = sum(java.cpu_times()[:2])
    while not done.wait(1 - time.time() % 1):
        before, used = used, sum(java.cpu_times()[:2])
        working[int(time.time()) - 1] = used - before > 0.1


@contextmanager
def over_tcp(url: str) -> Iterator[str]:
    """The same database over TCP, since JDBC knows no Unix sockets: through socat, for both sides."""
    host = parse_qs(urlsplit(url).query)["host"][0]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    forwarder = subprocess.Popen(
        [
            "socat",
            "-b",
            "262144",
            f"TCP-LISTEN:{port},bind=127.0.0.1,fork,reuseaddr,nodelay",
            f"UNIX-CONNECT:{host}/.s.PGSQL.5432",
        ]
    )
    parts = urlsplit(url)
    try:
        yield f"postgresql://{parts.username}@127.0.0.1:{port}{parts.path}"
    finally:
        forwarder.kill()
        forwarder.wait()


def main() -> int:
    """Run everything and print the table. Returns 1 when a budget is not met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=["read", "write", "batches", "history", "latency", "drain"], action="append")
    arguments = parser.parse_args()
    with TemporaryDatabases(parent=ON_DISK) as databases, databases.database() as socket_url:
        fill(socket_url, arguments.jobs)
        with over_tcp(socket_url) as url, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as lake:
            bench = Bench(url, arguments.jobs, arguments.runs, lake)
            for measure in (bench.read, bench.write, bench.batches, bench.history, bench.latency, bench.drain):
                if not arguments.only or measure.__name__ in arguments.only:
                    measure()
            bench.spark.stop()
    table = Table(box=None, pad_edge=False)
    for column in ("measured", "value", "compared with JDBC's defaults"):
        table.add_column(column)
    for row in bench.rows:
        table.add_row(*row)
    Console(width=160).print(table)
    print(json.dumps(bench.rows))
    for budget in bench.missed:
        print(f"over the budget: {budget}", file=sys.stderr)
    return 1 if bench.missed else 0


if __name__ == "__main__":
    sys.exit(main())
