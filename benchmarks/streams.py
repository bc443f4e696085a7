"""Penstock's streams beside Redis Streams (redis-py) and NATS JetStream (nats-py), in one run on one machine.

    .venv/bin/python -m benchmarks.streams                       # everything, some minutes
    .venv/bin/python -m benchmarks.streams --share 0.1           # a quick look
    .venv/bin/python -m benchmarks.streams --batches 100,1000 --sizes 100

Each system appends in one process and consumes in another, on a fresh server. Servers sync as they do by default: PostgreSQL
before each commit is acknowledged; Redis with Debian's configuration never (snapshots now and then); JetStream every two minutes.
So Penstock alone has on disk what it acknowledged. `append` has one batch under way; `append-many` has 16, which Penstock commits
together (the clients of the others are busy with one already). Results:
`benchmarks/results/streams.json` and `streams.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
from rich.console import Console
from rich.table import Table

from benchmarks import environments, rebalance
from benchmarks.environments import ON_DISK, PeerFailed
from penstock.testing import TemporaryDatabases

EVENTS = {1: 3_000, 10: 20_000, 100: 100_000, 1000: 200_000}
RESULTS = Path(__file__).parent / "results"
console = Console()


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

    def __init__(self, databases: TemporaryDatabases, share: float) -> None:
        self.results: list[dict[str, Any]] = []
        self._databases = databases
        self._share = share
        self._systems = ["penstock"]
        if environments.redis_server() is not None:
            self._systems.append("redis")
        if shutil.which("nats-server", path="/usr/bin:/usr/sbin:/usr/local/bin") is not None:
            self._systems.append("nats")
        for missing in {"redis", "nats"} - set(self._systems):
            console.print(f"{missing}-server is not installed; left out")

    def throughput(self, batch: int, size: int) -> None:
        """Append and consume, each system in turn."""
        events = max(batch * 10, int(EVENTS[batch] * self._share) // batch * batch)
        for system in self._systems:
            with self._store(system) as url:
                row: dict[str, Any] = {"system": system, "batch": batch, "size": size, "events": events}
                try:
                    before = asyncio.run(_wal(url)) if system == "penstock" else 0
                    appended = environments.run(f"streams_{system}", f"append:{batch}:{size}", events, url)
                    row["append"] = events / appended["seconds"]
                    if system == "penstock":
                        row["wal_bytes_per_event"] = (asyncio.run(_wal(url)) - before) / events
                        together = environments.run(f"streams_{system}", f"append-many:{batch}:{size}", events, url)
                        row["append_many"] = events / together["seconds"]
                        events_there = 2 * events
                    else:
                        events_there = events
                    consumed = environments.run(f"streams_{system}", f"consume:{batch}:{size}", events_there, url)
                    row["consume"] = events_there / consumed["seconds"]
                    row["client_cpu_us"] = appended["client_cpu_us"] + consumed["client_cpu_us"]
                except PeerFailed as failure:
                    row["failure"] = str(failure)[-500:]
                self.results.append(row)
                console.print(row)

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


async def _wal(url: str) -> int:
    connection: asyncpg.Connection[Any] = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval("select pg_current_wal_lsn() - '0/0'::pg_lsn"))
    finally:
        await connection.close()


def table(results: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The throughput, and how many times that of another system Penstock's best way is."""
    rows: list[tuple[str, ...]] = []
    ours = {(row["batch"], row["size"]): row for row in results if row.get("system") == "penstock" and "batch" in row}
    for row in results:
        if "batch" not in row or "failure" in row:
            continue
        best = ours.get((row["batch"], row["size"]), {})
        append = max(best.get("append", 0.0), best.get("append_many", 0.0))
        both = _both(append, best.get("consume", 0.0)) / _both(row["append"], row["consume"])
        rows.append(
            (
                row["system"], str(row["batch"]), str(row["size"]), f"{row['append']:,.0f}", f"{row.get('append_many', 0):,.0f}",
                f"{row['consume']:,.0f}", f"{row.get('wal_bytes_per_event', 0):,.0f}", f"{row['client_cpu_us']:.1f}",
                "" if row["system"] == "penstock" else f"{append / row['append']:.1f}",
                "" if row["system"] == "penstock" else f"{best.get('consume', 0.0) / row['consume']:.1f}",
                "" if row["system"] == "penstock" else f"{both:.1f}",
            )
        )  # fmt: skip
    return rows


def _both(append: float, consume: float) -> float:
    return 1 / (1 / append + 1 / consume) if append and consume else 0.0


COLUMNS = (
    "system", "batch", "bytes", "append/s", "16 under way/s", "consume/s", "WAL B/event", "client CPU µs", "append ×",
    "consume ×", "both ×",
)  # fmt: skip


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="part of the usual number of events")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=list(EVENTS))
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], default=[100, 1024])
    arguments = parser.parse_args()
    with TemporaryDatabases(parent=ON_DISK) as databases:
        run = Run(databases, arguments.share)
        for size in arguments.sizes:
            for batch in arguments.batches:
                run.throughput(batch, size)
        run.latency()
        run.rebalance()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "streams.json").write_text(json.dumps(run.results, indent=1) + "\n")
    rows = table(run.results)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS), *("| " + " | ".join(row) + " |" for row in rows)]
    (RESULTS / "streams.md").write_text("\n".join(lines) + "\n")
    shown = Table(*COLUMNS, box=None)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


if __name__ == "__main__":
    main()
