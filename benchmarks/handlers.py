"""What middleware, dependencies, encryption, batches, metrics and traces cost a worker, as a share of a drain.

    .venv/bin/python -m benchmarks.handlers                              # all tables: about 40 minutes on two quiet cores
    .venv/bin/python -m benchmarks.handlers --only observed --rounds 21  # handlers, observed or busy
    .venv/bin/python -m benchmarks.handlers --jobs 2000 --rounds 1       # a quick look

One worker process drains jobs that do nothing, or (the table `busy`) jobs that take a millisecond of the processor, on a fresh
database. In each round all variants have their turn, in an order that is turned around from round to round, and each is
compared with the first one of the same round. One of them is the first one once more: what it differs by is noise. The ratio
is the median over the rounds, and beside it stand the two values between which the true median lies with a confidence of 95 %
(by order statistics, which assume nothing about the noise). Processor time, of the worker and of the server together, says
more than the rate where a machine is shared. Results: `benchmarks/results/handlers.json`, and `handlers.md` with the tables
for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import structlog
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks import processor_time
from benchmarks.environments import ON_DISK, ROOT
from benchmarks.variants import BUSY, HANDLERS, JOB_TYPE, OBSERVED, Variant, application
from penstock.testing import TemporaryDatabases

PARTS: Mapping[str, Mapping[str, Variant]] = {"handlers": HANDLERS, "observed": OBSERVED, "busy": BUSY}
"""The tables: handlers; metrics and traces of jobs that do nothing; and the same of jobs that take a millisecond."""
_BUSY_SHARE = 0.05
"""Part of the jobs that a drain of jobs of a millisecond has."""
RESULTS = Path(__file__).parent / "results"
ENDS_WITHIN_S = 600
_BATCH = 10_000
_CONFIDENCE = 0.95
console = Console(width=160)


@dataclass(slots=True)
class Measured:
    """A variant's values, one for each round."""

    title: str
    jobs_per_s: list[float] = field(default_factory=list)
    worker_us: list[float] = field(default_factory=list)
    """Microseconds of the worker's processor for each job."""
    server_us: list[float] = field(default_factory=list)
    """The same of PostgreSQL."""
    exported: list[int] = field(default_factory=list)
    """Spans that reached the exporter."""

    @property
    def cpu_us(self) -> list[float]:
        """Of both together."""
        return [ours + theirs for ours, theirs in zip(self.worker_us, self.server_us, strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which values the median of the distribution lies, with at least 95 % confidence; of few values the extremes."""
    ordered, number = sorted(values), len(values)
    below, tail = 0.0, 0
    for rank in range(number // 2):
        below += math.comb(number, rank) / 2**number
        if below > (1 - _CONFIDENCE) / 2:
            break
        tail = rank
    return ordered[tail], ordered[number - 1 - tail]


class Drains:
    """The drains of some variants.

    Args:
        databases: Where fresh databases are made.
        variants: The variants; the first one is what the others are compared with.
        jobs: Jobs of a drain.
    """

    def __init__(self, databases: TemporaryDatabases, variants: Mapping[str, Variant], jobs: int) -> None:
        self._databases = databases
        self._jobs = jobs
        self.variants = variants
        self.results = {name: Measured(variant.title) for name, variant in variants.items()}

    def round(self, number: int) -> None:
        """Measure each variant once."""
        names = list(self.variants)
        for name in names if number % 2 == 0 else reversed(names):
            with self._databases.database() as url:
                uvloop.run(self._drain(url, name))

    async def _drain(self, url: str, name: str) -> None:
        environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "PENSTOCK_LOG_LEVEL": "warning"}
        os.environ["PENSTOCK_DATABASE_URL"] = url
        connection = await asyncpg.connect(url)
        await self._enqueue(connection, self.variants[name])
        await connection.execute("checkpoint")
        process = psutil.Process(await self._server(connection))
        before = processor_time.of_server(process)
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.variants", name, str(self._jobs),
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, limit=2**24,
        )  # fmt: skip
        try:
            output, _ = await asyncio.wait_for(worker.communicate(), ENDS_WITHIN_S)
        finally:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()
        server_s = processor_time.of_server(process) - before
        left = await connection.fetchval("select count(*) from penstock.queued_jobs")
        done = await connection.fetchval("select count(*) from penstock.archived_jobs where status = 'succeeded'")
        await connection.close()
        if worker.returncode != 0 or left or done != self._jobs:
            raise RuntimeError(f"{name}: the worker ended with {worker.returncode}; {done} jobs succeeded, {left} are left")
        seen: dict[str, Any] = json.loads(output.splitlines()[-1])
        result = self.results[name]
        result.jobs_per_s.append(self._jobs / seen["seconds"])
        result.worker_us.append(seen["cpu_s"] / self._jobs * 1e6)
        result.server_us.append(server_s / self._jobs * 1e6)
        result.exported.append(seen["exported"])

    async def _enqueue(self, connection: asyncpg.Connection[Any], variant: Variant) -> None:
        async with application(variant) as app:
            await app.declare()
            if not variant.sampled:
                await app.types[JOB_TYPE].enqueue_many([{"n": n} for n in range(self._jobs)])
                return
        # As from as many requests: each job has a trace of its own, of which one in so many is sampled.
        for start in range(0, self._jobs, _BATCH):
            await connection.execute(
                "select count(*) from penstock.enqueue_many($1,"
                " array(select jsonb_build_object('n', n) from generate_series($2::integer, $3) as n), p_options =>"
                " array(select jsonb_build_object('traceparent', '00-' || md5('trace' || n) || '-' || left(md5('span' || n), 16)"
                " || case when n % $4 = 0 then '-01' else '-00' end) from generate_series($2::integer, $3) as n))",
                JOB_TYPE,
                start,
                min(start + _BATCH, self._jobs) - 1,
                variant.sampled,
            )

    @staticmethod
    async def _server(connection: asyncpg.Connection[Any]) -> int:
        folder = await connection.fetchval("select current_setting('data_directory')")
        return int((Path(folder) / "postmaster.pid").read_text().split()[0])


def rows(results: Sequence[Measured]) -> list[tuple[str, ...]]:
    """A row of the table for each variant; the first one is what the others are compared with."""
    first, found = results[0], []
    for result in results:
        row = [
            result.title, f"{statistics.median(result.jobs_per_s):,.0f}", f"{statistics.median(result.worker_us):.1f}",
            f"{statistics.median(result.server_us):.1f}",
        ]  # fmt: skip
        if result is first:
            row += ["-", "-"]
        else:
            row.append(_ratio([ours / theirs for ours, theirs in zip(result.jobs_per_s, first.jobs_per_s, strict=True)]))
            row.append(_ratio([ours / theirs for ours, theirs in zip(result.cpu_us, first.cpu_us, strict=True)]))
        found.append(tuple(row))
    return found


def _ratio(ratios: Sequence[float]) -> str:
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


COLUMNS = (
    "variant", "jobs/s", "worker's µs/job", "server's µs/job", "rate, of the first (95 %)", "processor time, of the first (95 %)",
)  # fmt: skip


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.handlers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[*PARTS], help="only this table")
    parser.add_argument("--jobs", type=int, default=100_000, help="jobs of a drain (100000)")
    parser.add_argument("--rounds", type=int, default=15, help="how often each variant is measured (15)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    tables: dict[str, list[Measured]] = {}
    with TemporaryDatabases(parent=ON_DISK) as databases:
        for part in [arguments.only] if arguments.only else PARTS:
            jobs = int(arguments.jobs * _BUSY_SHARE) if part == "busy" else arguments.jobs
            drains = Drains(databases, PARTS[part], jobs)
            for number in range(arguments.rounds):
                console.print(f"{part}: round {number + 1} of {arguments.rounds}", style="dim")
                drains.round(number)
            tables[part] = list(drains.results.values())
            table = Table(*COLUMNS, box=None, pad_edge=False)
            for row in rows(tables[part]):
                table.add_row(*row)
            console.print(table)
    _write(arguments.results, tables, arguments)


def _write(folder: Path, tables: Mapping[str, Sequence[Measured]], arguments: argparse.Namespace) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "jobs": arguments.jobs, "rounds": arguments.rounds, "load": os.getloadavg(), "python": platform.python_version(),
        "processors": os.cpu_count(),
    }  # fmt: skip
    values = {
        part: {
            one.title: {
                "jobs_per_s": one.jobs_per_s, "worker_us": one.worker_us, "server_us": one.server_us, "exported": one.exported,
            }
            for one in found
        }
        for part, found in tables.items()
    }  # fmt: skip
    (folder / "handlers.json").write_text(json.dumps({"about": about, "values": values}, indent=1) + "\n")
    lines: list[str] = []
    for found in tables.values():
        lines += ["| " + " | ".join(COLUMNS) + " |", "|---" + "|--:" * (len(COLUMNS) - 1) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows(found)] + [""]
    (folder / "handlers.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
