"""Source, sink and fleet on clusters: Spark's own of one machine, a standalone one that loses a worker; and Spark Connect."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.spark.java import find_java
from tests.spark.programs import Program

Ask = Callable[..., list[Any]]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.kill()


def numbers(ask: Ask, table: str) -> list[int]:
    return sorted(row["n"] for row in ask(f"select (data ->> 'n')::integer as n from penstock.{table} where name = 't'"))


def test_a_cluster_of_one_machine_reads_and_writes(
    url: str, ask: Ask, archive: Any, tmp_path: Path, programs: list[Program]
) -> None:
    archive(60)
    (tmp_path / "go").touch()
    driver = Program.driver(tmp_path / "driver", "cluster", url, str(tmp_path), "local-cluster[2,1,1024]")
    programs.append(driver)
    assert driver.process.wait(240) == 0, driver.log.read_text()[-3000:]
    assert numbers(ask, "queued_jobs") == sorted([*range(1, 61)] * 2)


def test_spark_connect_reads_writes_and_follows(
    url: str, ask: Ask, archive: Any, tmp_path: Path, programs: list[Program]
) -> None:
    archive(60)
    ask("select penstock.create_stream('a', 2)")
    driver = Program.driver(tmp_path / "driver", "connect", url, str(tmp_path), "local[2]")
    programs.append(driver)
    assert driver.process.wait(240) == 0, driver.log.read_text()[-3000:]
    assert (tmp_path / "read").read_text() == "60"
    assert numbers(ask, "queued_jobs") == list(range(1, 61))


def test_a_standalone_cluster_speculates_outlives_a_worker_and_serves_a_fleet(
    url: str, ask: Ask, archive: Any, tmp_path: Path, programs: list[Program]
) -> None:
    import pyspark

    spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    environment = {
        "JAVA_HOME": str(find_java().home), "SPARK_WORKER_DIR": str(tmp_path), "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable, "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    package, address = "org.apache.spark.deploy", f"spark://127.0.0.1:{port}"
    command = [spark_class, f"{package}.master.Master", "--host", "127.0.0.1", "--webui-port", "0", "--port", str(port)]
    master = Program(command, tmp_path / "master", **environment, SPARK_LOCAL_IP="127.0.0.1")
    programs.append(master)
    workers = []
    # Spark speculates on another host only, so they are two: a machine has all of 127.0.0.0/8. The three start at once.
    for host in ("127.0.0.1", "127.0.0.2"):
        command = [spark_class, f"{package}.worker.Worker", "--host", host, "--webui-port", "0", "-c", "1", "-m", "1g", address]
        workers.append(Program(command, tmp_path / host, **environment, SPARK_LOCAL_IP=host))
    programs.extend(workers)
    archive(60)
    for worker in workers:
        worker.until(lambda log=worker.log: "Successfully registered with master" in log.read_text(), "a worker")
    driver = Program.driver(tmp_path / "driver", "cluster", url, str(tmp_path), address)
    programs.append(driver)
    driver.until((tmp_path / "first").exists, "the first round")
    # A task and its copy on the other host have both staged the same rows; they count once.
    assert (tmp_path / "copied").exists()
    assert numbers(ask, "queued_jobs") == list(range(1, 61))
    workers[0].kill()
    (tmp_path / "go").touch()
    driver.until((tmp_path / "second").exists, "the second round")
    assert numbers(ask, "queued_jobs") == sorted([*range(1, 61)] * 2)
    ask("select penstock.declare_job_type('count')")
    ask("select count(*) from penstock.enqueue_many('count', array(select to_jsonb(n) from generate_series(1, 20) n))")
    done = "select count(*) as jobs from penstock.archived_jobs where name = 'count' and status = 'succeeded'"
    driver.until(lambda: ask(done)[0]["jobs"] == 20, "the fleet's jobs")
    ask("select penstock.drain_fleet('f')")
    assert driver.process.wait(60) == 0, driver.log.read_text()[-3000:]
