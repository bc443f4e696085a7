"""What the scripts of all systems with durable steps have in common: their commands. Nothing but the standard library.

    python -m benchmarks.peers.flows_NAME prepare 0 URL    make the schema
    python -m benchmarks.peers.flows_NAME start N URL      start N orders, each a flow of three steps: pay, reserve, ship
    python -m benchmarks.peers.flows_NAME work N URL       work until N orders have ended

A step returns a small document, which its system keeps before the next step begins. The last line of each command is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from importlib.metadata import version
from typing import Any, ClassVar

STEPS = ("pay", "reserve", "ship")
UNDER_WAY = 8
"""In how many threads, or on how many connections, a system starts and works where it has no other way of doing many at once."""


class Ended:
    """The orders that have ended in this process."""

    def __init__(self) -> None:
        self.expected = 0
        self.numbers: list[int] = []
        self.steps: list[tuple[int, str]] = []
        self.first = self.last = 0.0
        self.done = threading.Event()

    def step(self, order: int, step: str) -> dict[str, Any]:
        """What a step does; returns its result."""
        if not self.first:
            self.first = time.perf_counter()
        self.steps.append((order, step))
        return {"order": order, "step": step, "ok": True}

    def order(self, order: int) -> None:
        """An order has ended."""
        self.numbers.append(order)
        if len(self.numbers) >= self.expected:
            self.last = time.perf_counter()
            self.done.set()


ENDED = Ended()
"""One for the process."""


class Flows(ABC):
    """A system that is measured."""

    packages: ClassVar[tuple[str, ...]]
    """The distributions whose versions matter, the system's own first."""

    def prepare(self, url: str) -> None:  # noqa: B027 - some make it when they start
        """Make the schema."""

    @abstractmethod
    def start(self, url: str, orders: int) -> float:
        """Start orders with the numbers 0 to `orders` - 1 in the fastest way there is; returns the seconds without connecting."""

    @abstractmethod
    def work(self, url: str) -> None:
        """Run a worker until `ENDED.done`. Steps call `ENDED.step`, and an order at its end `ENDED.order`."""


def main(flows: Flows) -> None:
    """Run the command in the arguments and print its result."""
    command, count, url = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    result: dict[str, Any] = {"versions": {name: version(name) for name in flows.packages}}
    if command == "prepare":
        flows.prepare(url)
    elif command == "start":
        result["seconds"] = flows.start(url, count)
    elif command == "work":
        ENDED.expected = count
        threading.Thread(target=_end, args=(result,), daemon=True).start()
        flows.work(url)
        ENDED.done.wait()
        time.sleep(60)  # The other thread ends the process.
    else:
        sys.exit(f"no such command: {command}")
    print(json.dumps(result), flush=True)


def _end(result: dict[str, Any]) -> None:
    """Print the result when all orders have ended; how long a system takes to stop is not measured."""
    ENDED.done.wait()
    each_once = sorted(ENDED.numbers) == list(range(ENDED.expected)) and len(set(ENDED.steps)) == len(STEPS) * ENDED.expected
    print(json.dumps(result | {"seconds": ENDED.last - ENDED.first, "each_once": each_once}), flush=True)
    os._exit(0)
