"""What an open page of the dashboard costs: processor time of the server and of the poller's connection, page by page.

The database has ten million finished and a million waiting jobs of a hundred types, made by SQL. A server runs on it; for each
page the server is measured for a while without a page and for as long with one that is open, live, as a browser holds it. The
poller's own backend is measured by its process, so that vacuum and checkpoints of the database do not count.

    TMPDIR=/dev/shm .venv/bin/python -m benchmarks.dashboard
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import asyncpg
import httpx
import psutil

from benchmarks.processor_time import of_server, used
from penstock import Penstock
from penstock.testing import TemporaryDatabases

_TOKEN = "token-of-the-benchmark"
_TYPES = 100
_DAYS = 10
_AT_ONCE = 250_000
_ARCHIVE = """
    insert into penstock.archived_jobs
        (id, finished_at, created_at, run_after, started_at, status, attempt, max_attempts, priority, name, worker, key,
        signature, data, errors)
    select
        (lpad(to_hex(n), 12, '0') || '70008000' || lpad(to_hex(n), 12, '0'))::uuid, moment, moment - interval '2 s',
        moment - interval '2 s', moment - interval '1 s',
        (case when failed then 'failed' else 'succeeded' end)::penstock.archived_job_status,
        1, 1, 0, 'type-' || n % 100, 'w' || n % 20, 'k' || n % 1000,
        case when failed then substr(md5((n % 50)::text), 1, 16) end, '{"customer": "acme", "amount": 12.5}',
        case when failed then jsonb_build_array(jsonb_build_object(
            'type', 'ValueError', 'message', 'no order ' || n,
            'traceback', repeat('  File "shop.py", line 1, in ship' || chr(10), 20)
        )) end
    from generate_series($1::bigint, $1::bigint + $2::bigint - 1) as n
    cross join lateral (
        select
            penstock.clock() - (1 - n / $3::double precision) * interval '1 day' * $4::integer as moment,
            n % 1009 = 0 as failed
    ) as made
"""
_WAIT = """
    select count(*)
    from penstock.enqueue_many(
        'type-' || $1::integer, array_fill('{"customer": "acme", "amount": 12.5}'::jsonb, array[$2::integer])
    )
"""
_RATES = """
    insert into penstock.rates (name, wide, at, succeeded, failed, retried, others, waits, runs, wait_s, run_s)
    select name, wide, at, 100, 1, 2, 0, buckets, buckets, 10, 10
    from (select '' as name union all select 'type-' || n from generate_series(0, 99) as n) as named
    cross join (
        select array_fill(5.0::double precision, array[19]) as buckets, date_trunc('hour', penstock.clock()) as hour
    ) as made
    cross join lateral (
        select false as wide, generate_series(hour - interval '1 hour', penstock.clock(), '1 minute') as at
        union all
        select true, generate_series(hour - interval '1 day', penstock.clock(), '15 minutes')
    ) as span
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a page costs, in per cent of a core.

    Attributes:
        database: The poller's connection.
        server: The server, beyond what it uses without a page.
        bytes_s: Bytes a second that the browser gets.
    """

    database: float
    server: float
    bytes_s: float


async def fill(url: str, archived: int, waiting: int) -> None:
    """Make the jobs."""
    async with Penstock(url) as app:
        for number in range(_TYPES):
            await app.create_job_type(f"type-{number}")
    sql = await asyncpg.connect(url)
    try:
        await sql.execute("alter system set autovacuum = off")
        await sql.execute("select pg_reload_conf()")
        for day in range(_DAYS + 1):
            await sql.execute("select penstock.ensure_archive(penstock.clock() - $1 * interval '1 day')", day)
        for first in range(0, archived, _AT_ONCE):
            await sql.execute(_ARCHIVE, first, min(_AT_ONCE, archived - first), archived, _DAYS, timeout=3600)
        for number in range(_TYPES):
            await sql.execute(_WAIT, number, waiting // _TYPES, timeout=3600)
        await sql.execute(_RATES)
        await sql.execute("vacuum (analyze)", timeout=3600)
        await sql.execute("checkpoint", timeout=3600)
    finally:
        await sql.close()


@contextmanager
def server(url: str) -> Iterator[tuple[psutil.Process, str]]:
    """A server, and its address."""
    environment = os.environ | {"PENSTOCK_DATABASE_URL": url, "PENSTOCK_HTTP_TOKEN": _TOKEN}
    command = [sys.executable, "-m", "penstock", "server", "--port", "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = next(found[1] for line in process.stdout if (found := re.search(r"listening on (http://\S+)", line)))
        yield psutil.Process(process.pid), address
        process.terminate()


async def cost_of(page: str, process: psutil.Process, address: str, sql: asyncpg.Connection, seconds: float) -> Cost:
    """Open a page for some seconds, after as many without one."""
    without = of_server(process)
    await asyncio.sleep(seconds)
    without = of_server(process) - without
    async with httpx.AsyncClient(base_url=address, auth=("admin", _TOKEN), timeout=60) as client:
        before, began, got = of_server(process), time.monotonic(), 0
        backend_before = await _poller(sql)
        try:
            async with asyncio.timeout(seconds), client.stream("GET", "/live", params={"page": page}) as answer:
                answer.raise_for_status()
                async for chunk in answer.aiter_bytes():
                    got += len(chunk)
        except TimeoutError:
            pass
        took = time.monotonic() - began
        database = await _poller(sql) - backend_before
        return Cost(100 * database / took, 100 * (of_server(process) - before - without) / took, got / took)


async def _poller(sql: asyncpg.Connection) -> float:
    """Seconds that the poller's backends have used."""
    rows = await sql.fetch("select pid from pg_stat_activity where application_name = 'penstock dashboard'")
    return sum(used(psutil.Process(row["pid"])) for row in rows)


async def measure(url: str, process: psutil.Process, address: str, seconds: float, pages: list[str]) -> None:
    """Print what each page costs."""
    sql = await asyncpg.connect(url)
    try:
        for page in pages:
            cost = await cost_of(page, process, address, sql, seconds)
            print(
                f"{page or 'overview':10} {cost.database + cost.server:6.3f} % of a core: "
                f"database {cost.database:.3f} %, server {cost.server:.3f} %; {cost.bytes_s:,.0f} bytes/s",
                flush=True,
            )
    finally:
        await sql.close()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archived", type=int, default=10_000_000)
    parser.add_argument("--queued", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=300.0, help="for which each page is open")
    parser.add_argument("--pages", default=",failures,types,jobs", help="paths, with commas; the empty one is the overview")
    given = parser.parse_args()
    with TemporaryDatabases() as databases, databases.database() as url:
        began = time.monotonic()
        asyncio.run(fill(url, given.archived, given.queued))
        made = f"{given.archived:,} finished and {given.queued:,} waiting jobs"
        print(f"{made}, made in {time.monotonic() - began:,.0f} s", flush=True)
        with server(url) as (process, address):
            asyncio.run(measure(url, process, address, given.seconds, given.pages.split(",")))


if __name__ == "__main__":
    main()
