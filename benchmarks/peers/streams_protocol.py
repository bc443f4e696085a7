"""What the scripts of all logs have in common: their commands, and how they are timed. Nothing but the standard library.

    python -m benchmarks.peers.NAME append:BATCH:SIZE N URL     append N events of SIZE bytes in batches
    python -m benchmarks.peers.NAME append-many:BATCH:SIZE N URL     the same with 16 batches under way
    python -m benchmarks.peers.NAME consume:BATCH:SIZE N URL    consume them as a group, acknowledging each batch
    python -m benchmarks.peers.NAME latency:1:SIZE N URL        append N events at odd intervals, consumed by an idle group

The last line of each command is JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

KEYS = 1_000
UNDER_WAY = 16


@dataclass(frozen=True, slots=True)
class Task:
    """What to do."""

    command: str
    batch: int
    size: int
    events: int
    url: str

    @classmethod
    def of_arguments(cls) -> Task:
        """The task of this process."""
        command, batch, size = sys.argv[1].split(":")
        return cls(command, int(batch), int(size), int(sys.argv[2]), sys.argv[3])

    @property
    def payload(self) -> bytes:
        """A payload of the size that is asked for."""
        return random.Random(1).randbytes(self.size)

    @property
    def under_way(self) -> int:
        """How many batches at once."""
        return UNDER_WAY if self.command == "append-many" else 1

    @property
    def batches(self) -> int:
        """How many batches to append."""
        return self.events // self.batch


async def timed(work: Callable[[], Awaitable[int]]) -> None:
    """Do the work, which returns how many events it was, and print how long it took."""
    started, cpu = time.perf_counter(), time.process_time()
    events = await work()
    took = time.perf_counter() - started
    print(json.dumps({"events": events, "seconds": took, "client_cpu_us": (time.process_time() - cpu) / events * 1e6}))


async def trickle(events: int) -> AsyncIterator[bytes]:
    """Payloads that hold the time, at odd intervals."""
    for _ in range(events):
        await asyncio.sleep(random.uniform(0.01, 0.05))
        yield time.perf_counter_ns().to_bytes(8, "big")


def waited(payload: bytes) -> float:
    """Milliseconds since a payload of `trickle` was made, in the same process."""
    return (time.perf_counter_ns() - int.from_bytes(payload[:8], "big")) / 1e6


def print_waits(waits: list[float]) -> None:
    """Print the result of a latency command."""
    waits = sorted(waits)
    print(json.dumps({"p50_ms": statistics.median(waits), "p99_ms": waits[int(len(waits) * 0.99) - 1]}))
