"""Benchmarks count processor time while processes end under their eyes."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress

import psutil
import pytest

from benchmarks import processor_time
from tests.waiting import until


class Losing(psutil.Process):
    """A process that loses its children as soon as they have been listed."""

    lost = 0

    def children(self, recursive: bool = False) -> list[psutil.Process]:
        found = super().children(recursive)
        for child in found:
            child.kill()
            child.wait(60)
        self.lost += len(found)
        return found


def test_processes_that_end_meanwhile_do_not_end_the_benchmark() -> None:
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            # They are zombies until they are waited for.
            for child in [subprocess.Popen(["true"]) for _ in range(4)]:
                child.wait()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(40):
            assert processor_time.of_children("redis-server") == 0.0
    finally:
        stop.set()
        thread.join()


def test_a_process_that_ends_while_those_of_a_server_are_counted_does_not_end_the_benchmark() -> None:
    # The system counts in hundredths of a second.
    used = "import subprocess, sys, time\nwhile time.process_time() < 0.05: pass\n"
    code = used + "for _ in range(3): subprocess.run([sys.executable, '-c', 'input()'])\ninput()"
    server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        until(psutil.Process(server.pid).children, "a child")
        process = Losing(server.pid)
        assert processor_time.of_server(process) > 0.0
        assert process.lost > 0
    finally:
        server.kill()
        server.communicate()


def test_time_of_processes_that_have_ended_counts() -> None:
    # Children in a row, each of which uses some time and ends.
    code = "import subprocess, sys\nfor _ in range(20): subprocess.run([sys.executable, '-c', 'sum(range(100000))'])\ninput()"
    server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        process, last = psutil.Process(server.pid), 0.0
        while process.children() or last == 0.0:
            now = processor_time.of_server(process)
            last = max(last, now)
        assert processor_time.of_server(process) > 0.0
    finally:
        with suppress(BrokenPipeError):
            server.communicate(b"\n")
    with pytest.raises(psutil.NoSuchProcess):
        processor_time.of_server(process)
