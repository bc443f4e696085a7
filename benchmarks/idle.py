"""What an idle system costs: processor time of PostgreSQL, workers and a server that have nothing to do, and their statements.

On PostgreSQL as `initdb` makes it, which the embedded one is not: it compiles plans that it takes for dear.

    .venv/bin/python -m benchmarks.idle
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import asyncpg
import psutil

from benchmarks.processor_time import of_server
from penstock import Penstock
from tests.debian import postgres_bin_dir
from tests.stock_server import Kind, StockServer, serving

_APP = """
from penstock import Penstock

app = Penstock()


@app.job
async def mail(to: str = "") -> None:
    pass


for number in range({types}):
    app.job(name=f"type-{{number}}")(mail.function)
"""
_SETTLES_S = 15.0
_STARTS_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class System:
    """An idle system."""

    name: str
    workers: int = 1
    servers: int = 1
    types: int = 0
    streams: int = 0


SYSTEMS = [
    System("one worker", servers=0),
    System("one worker and a server"),
    System("10 workers and a server", workers=10),
    System("one worker and a server, 200 streams", streams=200),
    System("one worker and a server, 1,000 types", types=1000),
]


@asynccontextmanager
async def running(url: str, system: System) -> AsyncIterator[list[psutil.Process]]:
    """An idle system on an empty database, from when its workers wait for jobs: its workers, and then its servers."""
    environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "PENSTOCK_HTTP_TOKEN": "token-of-the-benchmark"}
    command = [sys.executable, "-m", "penstock"]
    sql = await asyncpg.connect(url)
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-idle-")))
            (folder / "idle.py").write_text(_APP.format(types=system.types))
            output = stack.enter_context((folder / "output").open("wb"))
            start = partial(subprocess.Popen, env=environment, cwd=folder, stdout=output, stderr=output)
            await sql.execute("drop schema if exists penstock cascade")
            if await asyncio.to_thread(start([*command, "migrate"]).wait) != 0:
                raise RuntimeError((folder / "output").read_text())
            async with Penstock(url) as app:
                for number in range(system.streams):
                    await app.stream(f"stream-{number}").declare()
            started = []
            for arguments in [["worker", "idle:app"]] * system.workers + [["server", "--port", "0"]] * system.servers:
                process = stack.enter_context(start([*command, *arguments]))
                stack.callback(process.terminate)
                started.append(psutil.Process(process.pid))
            async with asyncio.timeout(_STARTS_WITHIN_S):
                while (
                    await sql.fetchval("select count(*) from penstock.listeners where kind = 'jobs'") < system.workers
                    or (folder / "output").read_text().count("listening on") < system.servers
                ):
                    await asyncio.sleep(0.1)
            yield started
    finally:
        await sql.close()


async def measure(server: StockServer, system: System, seconds: float, *, show: bool) -> str:
    """Run a system for some seconds. Returns what it cost."""
    sql = await asyncpg.connect(server.url)
    try:
        await sql.execute("create extension if not exists pg_stat_statements")
        async with running(server.url, system) as processes:
            # What happens once at a start does not count.
            await asyncio.sleep(_SETTLES_S)
            await sql.execute("select pg_stat_statements_reset()")
            before, database_before = [of_server(process) for process in processes], of_server(psutil.Process(server.pid))
            began = time.monotonic()
            await asyncio.sleep(seconds)
            took = time.monotonic() - began
            database = (of_server(psutil.Process(server.pid)) - database_before) / took
            used = [(of_server(process) - first) / took for process, first in zip(processes, before, strict=True)]
            statements = await sql.fetch(
                "select calls, total_exec_time / calls as each, query from pg_stat_statements"
                " where query not like '%pg_stat_statements%' order by calls desc"
            )
            if show:
                for row in statements:
                    print(f"  {row['calls'] / took:6.2f}/s {row['each']:8.3f} ms  {' '.join(row['query'].split())[:100]}")
            workers, servers = sum(used[: system.workers]), sum(used[system.workers :])
            return (
                f"{system.name:40} {100 * (database + workers + servers):6.2f} % of a core: database {100 * database:.2f} %, "
                f"workers {100 * workers:.2f} %, server {100 * servers:.2f} %; "
                f"{sum(row['calls'] for row in statements) / took:.1f} statements/s"
            )
    finally:
        await sql.close()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, default=postgres_bin_dir(), help="programs of the PostgreSQL to measure on")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which each system is measured")
    parser.add_argument("--only", default="", help="systems whose names contain this")
    parser.add_argument("--show", action="store_true", help="the statements too")
    given = parser.parse_args()
    if given.bin is None:
        raise SystemExit("no PostgreSQL in /usr/lib/postgresql: give --bin")
    with serving(Kind(settings={"shared_preload_libraries": "pg_stat_statements"}), given.bin) as server:
        for system in SYSTEMS:
            if given.only in system.name:
                print(asyncio.run(measure(server, system, given.seconds, show=given.show)), flush=True)


if __name__ == "__main__":
    main()
