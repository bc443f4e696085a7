"""Penstock's streams beside Redis Streams (redis-py) and NATS JetStream (nats-py), in one run on one machine.

    .venv/bin/python -m benchmarks.streams                       # everything: about five minutes on two quiet cores
    .venv/bin/python -m benchmarks.streams --share 0.1           # a quick look
    .venv/bin/python -m benchmarks.streams --batches 100,1000 --sizes 100 --systems penstock,redis --only throughput

Each system appends in one process and consumes in another, on a fresh server. Servers sync as they do by default: PostgreSQL
before each commit is acknowledged; Redis with Debian's configuration never (snapshots at intervals); JetStream every two
minutes. So Penstock alone has on disk what it acknowledged. `append` has one batch under way, `append-many` 16, for each
system, and they are compared like with like. The systems take turns, round after round, and medians count. Processor time is
that of the client and of the server, user and system, and says more than the rates where a machine is shared. JetStream, the
slowest by far, gets fewer events. Results: `benchmarks/results/streams.json`, and `streams.md` with the tables for
docs/streams.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import platform
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import structlog
from rich.console import Console
from rich.table import Table

from benchmarks import environments, processor_time, rebalance
from benchmarks.environments import ON_DISK, PeerFailed
from penstock.testing import TemporaryDatabases

EVENTS = {1: 3_000, 10: 20_000, 100: 100_000, 1000: 200_000}
SHARES = {"penstock": 1.0, "redis": 1.0, "nats": 0.2}
SYSTEMS = {"penstock": "Penstock", "redis": "Redis Streams", "nats": "JetStream"}
PARTS = ("throughput", "latency", "rebalance")
RESULTS = Path(__file__).parent / "results"
console = Console(width=160)


@contextmanager
def nats() -> Iterator[str]:
    """An empty NATS server with JetStream; yields its URL."""
    program = shutil.which("nats-server", path="/usr/bin:/usr/sbin:/usr/local/bin")
    assert program is not None
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="penstock-bench-", ignore_cleanup_errors=True) as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        server = subprocess.Popen(
            [program, "--addr", "127.0.0.1", "--port", str(port), "--jetstream", "--store_dir", folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for(port)
            yield f"nats://127.0.0.1:{port}"
        finally:
            server.kill()
            server.wait()


def _wait_for(port: int) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise PeerFailed("nats-server did not answer")


class Run:
    """The measurements and what came out of them."""

    def __init__(self, databases: TemporaryDatabases, share: float, systems: list[str]) -> None:
        self.results: list[dict[str, Any]] = []
        self._databases = databases
        self._share = share
        there = {
            "penstock": True,
            "redis": environments.redis_server() is not None,
            "nats": shutil.which("nats-server", path="/usr/bin:/usr/sbin:/usr/local/bin") is not None,
        }
        self._systems = [system for system in systems if there[system]]
        for missing in set(systems) - set(self._systems):
            console.print(f"{missing}-server is not installed; left out")

    def throughput(self, batch: int, size: int, rounds: int) -> None:
        """Append and consume, each system in turn, as many rounds; what is kept is the medians."""
        rows: dict[str, list[dict[str, Any]]] = {system: [] for system in self._systems}
        for number in range(rounds):
            for system in self._systems if number % 2 == 0 else reversed(self._systems):
                rows[system].append(self._measured(system, batch, size))
                console.print(rows[system][-1])
        self.results += [_medians(rows[system]) for system in self._systems]

    def _measured(self, system: str, batch: int, size: int) -> dict[str, Any]:
        events = max(batch * 10, int(EVENTS[batch] * self._share * SHARES[system]) // batch * batch)
        row: dict[str, Any] = {"system": system, "batch": batch, "size": size, "events": events}
        with self._store(system) as url:

            def measure(command: str, count: int) -> None:
                cpu = _server_cpu_s(system, url)
                done = environments.run(f"streams_{system}", f"{command}:{batch}:{size}", count, url)
                name = command.replace("-", "_")
                row[name] = count / done["seconds"]
                row[f"{name}_cpu_us"] = done["client_cpu_us"] + (_server_cpu_s(system, url) - cpu) / count * 1e6

            try:
                # What it takes to make the stream is no event's.
                before = asyncio.run(_created(url)) if system == "penstock" else 0
                measure("append", events)
                if system == "penstock":
                    row["wal_bytes_per_event"] = (asyncio.run(_wal(url)) - before) / events
                measure("append-many", events)
                measure("consume", 2 * events)
            except PeerFailed as failure:
                row["failure"] = str(failure)[-500:]
        return row

    def latency(self) -> None:
        """From before the append to the handler of an idle consumer."""
        for system in self._systems:
            with self._store(system) as url:
                try:
                    waits = environments.run(f"streams_{system}", "latency:1:100", max(50, int(300 * self._share)), url)
                except PeerFailed as failure:
                    waits = {"failure": str(failure)[-500:]}
                self.results.append({"system": system, "latency": waits})
                console.print(self.results[-1])

    def rebalance(self) -> None:
        """What a join and a leave hold up."""
        with self._databases.database() as url:
            for row in asyncio.run(rebalance.measure(url)):
                self.results.append({"system": "penstock", "rebalance": row})
                console.print(self.results[-1])

    @contextmanager
    def _store(self, system: str) -> Iterator[str]:
        if system == "redis":
            with environments.redis() as url:
                yield url
        elif system == "nats":
            with nats() as url:
                yield url
        else:
            with self._databases.database() as url:
                yield url


def _medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several rounds; a round that failed is what is shown."""
    if failed := [row for row in rows if "failure" in row]:
        return failed[0]
    return {
        name: value if isinstance(value, str) else statistics.median(row[name] for row in rows) for name, value in rows[0].items()
    }


def _server_cpu_s(system: str, url: str) -> float:
    """Seconds of processor time that a system's server has used so far, user and system."""
    if system == "penstock":
        return processor_time.of_server(psutil.Process(asyncio.run(_postmaster(url))))
    return processor_time.of_children(f"{system}-server")


async def _postmaster(url: str) -> int:
    connection: asyncpg.Connection[Any] = await asyncpg.connect(url)
    try:
        folder = await connection.fetchval("select current_setting('data_directory')")
        return int((Path(folder) / "postmaster.pid").read_text().split()[0])
    finally:
        await connection.close()


async def _created(url: str) -> int:
    """Make the stream. Returns where the write-ahead log is then."""
    connection: asyncpg.Connection[Any] = await asyncpg.connect(url)
    try:
        await connection.execute("select penstock.create_stream('bench', 4, '{\"format\": \"bytes\"}')")
    finally:
        await connection.close()
    return await _wal(url)


async def _wal(url: str) -> int:
    connection: asyncpg.Connection[Any] = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval("select pg_current_wal_lsn() - '0/0'::pg_lsn"))
    finally:
        await connection.close()


COLUMNS = (
    "batch", "bytes", "system", "append/s", "16 under way/s", "consume/s", "append CPU µs", "consume CPU µs", "WAL B/event",
    "append ×", "16 under way ×", "consume ×", "CPU ×",
)  # fmt: skip


def table(results: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The throughput; beside the others how many times theirs Penstock's is at the same concurrency, and how many times its
    processor time theirs.
    """
    rows: list[tuple[str, ...]] = []
    ours = {(row["batch"], row["size"]): row for row in results if row.get("system") == "penstock" and "consume" in row}
    for row in results:
        if "consume" not in row:
            continue
        best = ours.get((row["batch"], row["size"]))
        compared = ("", "", "", "")
        if best is not None and row is not best:
            compared = (
                f"{best['append'] / row['append']:.1f}",
                f"{best['append_many'] / row['append_many']:.1f}",
                f"{best['consume'] / row['consume']:.1f}",
                f"{(row['append_cpu_us'] + row['consume_cpu_us']) / (_append_cpu(best) + best['consume_cpu_us']):.1f}",
            )
        rows.append(
            (
                str(row["batch"]), str(row["size"]), SYSTEMS[row["system"]], f"{row['append']:,.0f}",
                f"{row['append_many']:,.0f}", f"{row['consume']:,.0f}", f"{_append_cpu(row):.1f}",
                f"{row['consume_cpu_us']:.1f}", f"{row['wal_bytes_per_event']:,.0f}" if "wal_bytes_per_event" in row else "",
                *compared,
            )
        )  # fmt: skip
    return rows


def _append_cpu(row: dict[str, Any]) -> float:
    return float(min(row["append_cpu_us"], row.get("append_many_cpu_us", row["append_cpu_us"])))


def pauses(results: list[dict[str, Any]]) -> list[str]:
    """Latency and rebalance as lines of Markdown."""
    lines = []
    for row in results:
        if "p50_ms" in row.get("latency", {}):
            waits = row["latency"]
            lines.append(
                f"* {SYSTEMS[row['system']]}: append to the handler of an idle consumer p50 {waits['p50_ms']:.1f} ms,"
                f" p99 {waits['p99_ms']:.1f} ms"
            )
        elif "rebalance" in row:
            found = row["rebalance"]
            kinds = ", ".join(
                f"{kind} {found[kind]['median_ms']:.0f} ms (of {found[kind]['partitions']} partitions; at most"
                f" {found[kind]['longest_ms']:.0f} ms)"
                for kind in ("before", "stayed", "moved")
                if "median_ms" in found[kind]
            )
            lines.append(f"* Penstock: longest wait of an event around a {found['change']}: {kinds}")
        elif "failure" in row:
            lines.append(f"* {SYSTEMS[row['system']]}, batches of {row.get('batch')}: failed")
    return lines


def write(results: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write `streams.json` and `streams.md` into `RESULTS`."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "streams.json").write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    loads = f"load {about['load']:.1f} at the beginning and {about['load_at_end']:.1f} at the end"
    lines = [f"{about['cores']} cores, {loads}, share {about['share']}.", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in table(results)]
    (RESULTS / "streams.md").write_text("\n".join([*lines, "", *pauses(results)]) + "\n")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="part of the usual number of events")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=list(EVENTS))
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], default=[100, 1024])
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS), help=", ".join(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=3, help="how often throughput is measured; medians count (3)")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be repeated")
    arguments = parser.parse_args()
    if unknown := set(arguments.systems) - set(SYSTEMS):
        parser.error(f"unknown systems: {', '.join(unknown)}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parts = arguments.only or PARTS
    about = {"cores": psutil.cpu_count(), "machine": platform.machine(), "share": arguments.share, "load": psutil.getloadavg()[0]}
    started = time.monotonic()
    with TemporaryDatabases(parent=ON_DISK) as databases:
        run = Run(databases, arguments.share, arguments.systems)
        if "throughput" in parts:
            for size in arguments.sizes:
                for batch in arguments.batches:
                    run.throughput(batch, size, arguments.rounds)
        if "latency" in parts:
            run.latency()
        if "rebalance" in parts and "penstock" in arguments.systems:
            run.rebalance()
    about |= {"load_at_end": psutil.getloadavg()[0], "took_s": round(time.monotonic() - started)}
    write(run.results, about)
    shown = Table(*COLUMNS, box=None)
    for row in table(run.results):
        shown.add_row(*row)
    console.print(shown)
    for line in pauses(run.results):
        console.print(line, markup=False)
    console.print(f"took {about['took_s']} s; written: {RESULTS / 'streams.md'}", markup=False)


if __name__ == "__main__":
    main()
