"""What the scripts of all systems have in common: their commands, and what their handlers note.

    python -m benchmarks.peers.NAME prepare 0 URL      make the schema
    python -m benchmarks.peers.NAME enqueue N URL      enqueue N jobs in bulk
    python -m benchmarks.peers.NAME drain N URL        work until N jobs have run
    python -m benchmarks.peers.NAME trickle N URL      enqueue 2 N and a few jobs one by one, each with the time in it
    python -m benchmarks.peers.NAME latency N URL      work until those have run

A worker prints `ready` when it starts; the last line of each command is JSON. This module needs nothing but the standard library,
for it is imported in every environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import version
from typing import Any, ClassVar

WARM_UP = 20
"""So many jobs of a trickle come before those that count: the worker may still be connecting."""


IDLE_S = (0.2, 0.3)
"""Between jobs to an idle worker: it has gone to sleep, if it ever does."""

SPARSE_S = (0.03, 0.1)
"""Between jobs to a worker that is nearly idle."""

STOPS_WITHIN_S = 10
"""A worker that has run all jobs gets so long for its graceful stop."""


class Seen:
    """What the handlers of this process saw. Handlers may run in threads: appending to a list is all that they share."""

    def __init__(self) -> None:
        self.expected = 0
        self.stamped = False
        self.values: list[int] = []
        self.first = self.last = 0.0
        self.done = threading.Event()

    def note(self, value: int) -> None:
        """A handler started with this value: the job's number, or when it was enqueued."""
        self.values.append(time.time_ns() - value if self.stamped else value)
        if not self.first:
            self.first = time.perf_counter()
        if len(self.values) >= self.expected:
            self.last = time.perf_counter()
            self.done.set()

    async def all(self) -> None:
        """Wait in a loop until all expected jobs have run."""
        while not self.done.is_set():
            await asyncio.sleep(0.02)

    def result(self) -> dict[str, Any]:
        """What is printed in the end."""
        if self.stamped:
            waits = [round(wait / 1e6, 3) for wait in self.values[WARM_UP:]]
            return {"idle_ms": waits[: len(waits) // 2], "sparse_ms": waits[len(waits) // 2 :]}
        return {"seconds": self.last - self.first, "each_once": sorted(self.values) == list(range(self.expected))}


SEEN = Seen()
"""One for the process, in a module of its own: some systems import the module of a handler by its name a second time."""


class Peer(ABC):
    """A system that is measured. Methods are plain; those of asyncio's systems run a loop of their own."""

    packages: ClassVar[tuple[str, ...]]
    """The distributions whose versions matter, the system's own first."""

    def prepare(self, url: str) -> None:  # noqa: B027 - most stores need no schema
        """Make the schema."""

    @abstractmethod
    def enqueue(self, url: str, jobs: int) -> float:
        """Enqueue jobs with the values 0 to `jobs` - 1 in the fastest way there is; returns the seconds without connecting."""

    @abstractmethod
    def trickle(self, url: str, count: int) -> None:
        """Enqueue a job for each of `stamps(count)`, at once when it comes."""

    @abstractmethod
    def work(self, url: str) -> None:
        """Run a worker until `SEEN.done`, then stop it. Handlers call `SEEN.note` with the job's value and do nothing else."""


def stamps(count: int) -> Iterator[int]:
    """The time in nanoseconds: as often as it takes to warm up, then `count` times to a worker that is idle, then `count` times
    to one that has a little to do. The intervals are odd, so that a system that polls is not met in step.
    """
    for pause in _pauses(count):
        time.sleep(pause)
        yield time.time_ns()


async def stamps_in_loop(count: int) -> AsyncIterator[int]:
    """The same for a system whose client is on a loop, which must not be blocked in between."""
    for pause in _pauses(count):
        await asyncio.sleep(pause)
        yield time.time_ns()


def _pauses(count: int) -> list[float]:
    chance = random.Random(4)
    return [
        chance.uniform(*span) for span, times in ((SPARSE_S, WARM_UP), (IDLE_S, count), (SPARSE_S, count)) for _ in range(times)
    ]


def _end_late_worker(result: dict[str, Any]) -> None:
    """End a worker that has run all jobs and does not stop; the measurement is complete."""
    SEEN.done.wait()
    time.sleep(STOPS_WITHIN_S)
    print(json.dumps(result | SEEN.result()), flush=True)
    os._exit(0)


def main(peer: Peer) -> None:
    """Run the command in the arguments and print its result."""
    command, count, url = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    result: dict[str, Any] = {"versions": {name: version(name) for name in peer.packages}}
    if command == "prepare":
        peer.prepare(url)
    elif command == "enqueue":
        result["seconds"] = peer.enqueue(url, count)
    elif command == "trickle":
        peer.trickle(url, count)
    elif command in ("drain", "latency"):
        SEEN.stamped = command == "latency"
        SEEN.expected = WARM_UP + 2 * count if SEEN.stamped else count
        print("ready", flush=True)
        threading.Thread(target=_end_late_worker, args=(result,), daemon=True).start()
        peer.work(url)
        result |= SEEN.result()
    else:
        sys.exit(f"no such command: {command}")
    print(json.dumps(result), flush=True)
