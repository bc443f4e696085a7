"""Worker processes that are restarted when they die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Fleet:
    """Worker processes that are restarted when they die, as a supervisor does.

    Args:
        url: Database.
        history: File in which handlers record their events.
        module: Module of the application.
        ahead_s: Seconds by which the clocks of its processes are ahead, where the module knows of it: of all, or of one after the
            other.
    """

    def __init__(self, url: str, history: Path, module: str = "killer_app", ahead_s: float | Sequence[float] = 0.0) -> None:
        self._module = module
        self.history = history
        history.touch()
        self.deaths = 0
        self._environment = {
            **os.environ,
            "PENSTOCK_DATABASE_URL": url,
            "KILLER_HISTORY": str(history),
        }
        self._ahead_s = [ahead_s] if isinstance(ahead_s, float) else list(ahead_s)
        self._log = history.with_suffix(".log").open("ab")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watching: asyncio.Task[None] | None = None

    def start(self, workers: int, *types: str, sabotage: str = "") -> None:
        """Start workers for these types, which lack the guarantee of this name of `broken_worker`."""
        environment = {**self._environment, "CHAOS_SABOTAGE": sabotage}
        command = [
            sys.executable,
            "-m",
            "penstock",
            "worker",
            f"tests.chaos.{self._module}:app",
            *[word for t in types for word in ("-t", t)],
        ]

        def launch(place: int) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command,
                env=environment | {"CHAOS_CLOCK_S": str(self._ahead_s[place % len(self._ahead_s)])},
                cwd=Path(__file__).parents[2],
                stdout=subprocess.DEVNULL,
                stderr=self._log,
            )

        self._processes = [launch(place) for place in range(workers)]

        async def watch() -> None:
            while True:
                await asyncio.sleep(0.1)
                for place, process in enumerate(self._processes):
                    if process.poll() is not None:
                        self.deaths += 1
                        self._processes[place] = launch(place)

        self._watching = asyncio.create_task(watch())

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.history.read_text().splitlines() if line.endswith("}")]

    def starts(self) -> Counter[str]:
        return Counter(event["id"] for event in self.events() if event["kind"] == "started")

    def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
