"""Penstock beside other systems, by the same method in the same run.

Every system gets a fresh database (or Redis) for each measurement and the commands of `benchmarks.peers.protocol`: bulk enqueue
in one process; one worker process that drains what was enqueued, timed from the start of the first handler to the start of the
last; and single jobs at odd intervals to an idle worker. Just before each bulk enqueue and drain of another system Penstock does
the same, and a ratio is always that of two neighbours, so that what else the machine does in a minute touches both.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

import asyncpg
from rich.console import Console

from benchmarks import environments
from benchmarks.environments import PeerFailed
from benchmarks.report import PeerResult, write_peers
from penstock.testing import TemporaryDatabases

Store = Literal["PostgreSQL", "Redis"]
LATENCY_JOBS = 100


@dataclass(frozen=True, slots=True)
class Contestant:
    """A system that is measured, and how many jobs it drains: fewer where 100,000 would take minutes."""

    name: str
    title: str
    store: Store
    jobs: int


PENSTOCK = Contestant("penstock", "Penstock", "PostgreSQL", 100_000)
PEERS = (
    Contestant("pgqueuer", "PgQueuer", "PostgreSQL", 100_000),
    Contestant("awa", "awa", "PostgreSQL", 100_000),
    Contestant("procrastinate", "Procrastinate", "PostgreSQL", 5_000),
    Contestant("saq_postgres", "SAQ", "PostgreSQL", 10_000),
    Contestant("saq", "SAQ", "Redis", 20_000),
    Contestant("taskiq", "Taskiq", "Redis", 30_000),
    Contestant("dramatiq", "Dramatiq", "Redis", 50_000),
    Contestant("celery", "Celery", "Redis", 20_000),
    Contestant("rq", "RQ", "Redis", 10_000),
    Contestant("huey", "Huey", "Redis", 50_000),
    Contestant("arq", "arq", "Redis", 20_000),
)


class PeersRun:
    """The rounds and what came out of them.

    Args:
        databases: Where Penstock and the systems on PostgreSQL get their databases.
        peers: The names of those to measure; none: all.
        share: Part of the usual number of jobs, for a quick look.
    """

    def __init__(self, databases: TemporaryDatabases, peers: Sequence[str] = (), share: float = 1.0) -> None:
        self._databases = databases
        self._share = share
        self._console = Console()
        self._peers = [peer for peer in PEERS if not peers or peer.name in peers]
        if environments.redis_server() is None:
            without = [peer.title for peer in self._peers if peer.store == "Redis"]
            self._peers = [peer for peer in self._peers if peer.store != "Redis"]
            if without:
                self._console.print(f"[bold]redis-server is not installed; left out: {', '.join(without)}[/bold]")
        self.results = {peer.name: PeerResult(peer.title, peer.store, self._jobs(peer)) for peer in (PENSTOCK, *self._peers)}

    def run(self, rounds: int) -> list[PeerResult]:
        """Measure all of them in turn, `rounds` times, then their latency; returns Penstock first.

        What there is so far is written after each measurement, so that a run that is cut short was not for nothing.
        """
        about = self._about()
        for peer in self._peers:
            self._attempt(peer, _install)
        for number in range(rounds):
            for peer in self._peers:
                if self.results[peer.name].failure:
                    continue
                self._console.print(f"round {number + 1}: {peer.title} on {peer.store}")
                ours = self._throughput(PENSTOCK)
                self._attempt(peer, partial(self._beside, ours=ours))
                write_peers(list(self.results.values()), about)
        for peer in (PENSTOCK, *self._peers):
            if not self.results[peer.name].failure:
                self._console.print(f"enqueue to start: {peer.title} on {peer.store}")
                self._attempt(peer, self._latency)
                write_peers(list(self.results.values()), about)
        return list(self.results.values())

    def _attempt(self, peer: Contestant, measure: Callable[[Contestant], object]) -> None:
        """Measure, and go on without this system when it fails."""
        try:
            measure(peer)
        except PeerFailed as failure:
            self.results[peer.name].failure = str(failure)
            self._console.print(f"[bold]{peer.title} failed[/bold]")

    def _beside(self, peer: Contestant, ours: tuple[float, float]) -> None:
        """A system's throughput as a ratio to what Penstock has just done."""
        enqueue, drain = self._throughput(peer)
        self.results[peer.name].enqueue_ratios.append(ours[0] / enqueue)
        self.results[peer.name].drain_ratios.append(ours[1] / drain)

    def _throughput(self, peer: Contestant) -> tuple[float, float]:
        """Bulk enqueue and drain in a fresh store, in jobs a second."""
        jobs = self._jobs(peer)
        result = self.results[peer.name]
        with self._store(peer) as url:
            environments.run(peer.name, "prepare", 0, url)
            enqueued = environments.run(peer.name, "enqueue", jobs, url)
            drained = environments.run(peer.name, "drain", jobs, url)
        if not drained["each_once"]:
            raise PeerFailed("not every job ran exactly once")
        result.versions = drained["versions"]
        result.enqueue.append(jobs / enqueued["seconds"])
        result.drain.append(jobs / drained["seconds"])
        return result.enqueue[-1], result.drain[-1]

    def _latency(self, peer: Contestant) -> None:
        """From the call of enqueue in one process to the start of the handler in another, idle one."""
        with self._store(peer) as url:
            environments.run(peer.name, "prepare", 0, url)
            with environments.started(peer.name, "latency", LATENCY_JOBS, url) as worker:
                environments.ready(worker)
                environments.run(peer.name, "trickle", LATENCY_JOBS, url)
                waits = environments.finished(worker, 60)
        self.results[peer.name].idle_ms, self.results[peer.name].sparse_ms = waits["idle_ms"], waits["sparse_ms"]

    @contextmanager
    def _store(self, peer: Contestant) -> Iterator[str]:
        """The URL of an empty store of its kind, after the dirty pages of other processes have been written."""
        if peer.store == "Redis":
            with environments.redis() as url:
                yield url
        else:
            with self._databases.database() as url:
                asyncio.run(_execute(url, "checkpoint"))
                yield url

    def _about(self) -> dict[str, Any]:
        """What belongs to the figures: the servers' versions."""
        return {
            "penstock": version("penstock"),
            "PostgreSQL": asyncio.run(_execute(self._databases.server_url, "show server_version")),
            "Redis": environments.redis_version() if environments.redis_server() else None,
            "machine": subprocess.run(["uname", "-srm"], capture_output=True, text=True, check=False).stdout.strip(),
        }

    def _jobs(self, peer: Contestant) -> int:
        return max(100, int(peer.jobs * self._share))


def _install(peer: Contestant) -> None:
    environments.python_of(peer.name)


async def _execute(url: str, statement: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()
