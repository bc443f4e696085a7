"""Programs that the tests start and kill, with everything that these have started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil


class Program:
    """A process in a session of its own, which says what it has to say into a file."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self.log = log
        with log.open("wb") as said:
            # Not into a pipe: the JVM of a killed driver would hold it open.
            self.process = subprocess.Popen(
                command, stdout=said, stderr=said, start_new_session=True, env={**os.environ, **environment}
            )

    @classmethod
    def driver(cls, log: Path, *arguments: str) -> Program:
        """The script `driver.py`."""
        return cls([sys.executable, str(Path(__file__).with_name("driver.py")), *arguments], log)

    def kill(self) -> None:
        """End the process and whatever is left of its session: a JVM, and that one's Python workers."""
        left = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self.process.pid:
                    left.append(process)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=30)
        self.process.wait(30)

    def until(self, condition: Callable[[], bool], what: str, timeout: float = 200) -> None:
        """Wait for a condition; fail when the process ends before, with what it said."""
        deadline = time.monotonic() + timeout
        while not condition():
            ended = self.process.poll() is not None and not condition()
            assert time.monotonic() < deadline and not ended, f"{what}: {self.log.read_text()[-3000:]}"
            time.sleep(0.05)
