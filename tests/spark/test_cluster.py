"""Source and sink on clusters: Spark's own of one machine, and a standalone one that loses a worker."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.spark.java import find_java

Ask = Callable[..., list[Any]]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


class Program:
    """A process with everything that it starts, in a session of its own."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self.log = log
        with log.open("wb") as said:
            self.process = subprocess.Popen(
                command, stdout=said, stderr=said, start_new_session=True, env={**os.environ, **environment}
            )

    def kill(self) -> None:
        left = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self.process.pid:
                    left.append(process)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(30)


def until(condition: Callable[[], bool], what: str, program: Program, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline and program.process.poll() is None, f"{what}: {program.log.read_text()[-3000:]}"
        time.sleep(0.05)


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.kill()


def drive(url: str, folder: Path, master: str, programs: list[Program], between: Callable[[], None]) -> None:
    driver = Program(
        [sys.executable, str(Path(__file__).with_name("driver.py")), "cluster", url, str(folder), master], folder / "driver"
    )
    programs.append(driver)
    until((folder / "first").exists, "the first round", driver, 240)
    between()
    (folder / "go").touch()
    until((folder / "second").exists, "the second round", driver, 240)
    assert driver.process.wait(60) == 0


def test_a_cluster_of_one_machine_reads_and_writes(
    url: str, ask: Ask, archive: Any, tmp_path: Path, programs: list[Program]
) -> None:
    archive(300)
    drive(url, tmp_path, "local-cluster[2,1,1024]", programs, lambda: None)
    assert ask("select count(*) from penstock.queued_jobs")[0]["count"] == 600


def test_a_standalone_cluster_reads_and_writes_and_outlives_a_worker(
    url: str, ask: Ask, archive: Any, tmp_path: Path, programs: list[Program]
) -> None:
    import pyspark

    java = find_java()
    spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    environment = {
        "JAVA_HOME": str(java.home), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_WORKER_DIR": str(tmp_path),
        "SPARK_DAEMON_MEMORY": "256m", "PYSPARK_PYTHON": sys.executable,
    }  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    package = "org.apache.spark.deploy"
    options = ["--host", "127.0.0.1", "--webui-port", "0"]
    master = Program([spark_class, f"{package}.master.Master", *options, "--port", str(port)], tmp_path / "master", **environment)
    programs.append(master)
    until(lambda: "I have been elected leader" in master.log.read_text(), "the master", master)
    address = f"spark://127.0.0.1:{port}"
    command = [spark_class, f"{package}.worker.Worker", *options, "-c", "1", "-m", "1g", address]
    workers = [Program(command, tmp_path / f"w{number}", **environment) for number in range(2)]
    programs.extend(workers)
    for worker in workers:
        until(lambda log=worker.log: "Successfully registered with master" in log.read_text(), "a worker", worker)
    archive(300)
    drive(url, tmp_path, address, programs, workers[0].kill)
    assert ask("select count(*) from penstock.queued_jobs")[0]["count"] == 600
