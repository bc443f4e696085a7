"""A driver to be killed, or to work on a cluster. Run by test_kill.py and test_cluster.py.

`python driver.py both URL FOLDER STEP`: two queries at once, from a stream to a stream and from the archive to a lake. Each stops
when it has come to its part of STEP (`1` to `5`, see `STEPS`); when both have, the process kills itself with SIGKILL, which is
what a lost machine looks like. With any other word as STEP both run to their ends. They begin when there is a file `begin STEP`.

`python driver.py cluster URL FOLDER MASTER`: read, write and serve on a cluster.

`python driver.py connect URL FOLDER REMOTE`: read and write through Spark Connect.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource

from penstock.history.lake import Lake
from penstock.spark import fleet, session
from penstock.spark.history import Pipeline
from penstock.spark.source import PenstockSource
from penstock.spark.streams.source import EventStreamReader
from penstock.spark.writing import MicroBatchWriter

FAST = {
    "spark.driver.memory": "600m",
    "spark.sql.shuffle.partitions": "1",
    "spark.default.parallelism": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
STEPS = {
    "1": ("offsets noted", "jobs written"),
    "2": ("read", "attempts written"),
    "3": ("staged", "rollups written"),
    "4": ("before the commit", "files moved"),
    "5": ("after the commit", "committed"),
}


def reach(folder: str, step: str, reached: str) -> None:
    """Say that a step is reached and wait for the end, in whichever process this is."""
    if step in STEPS and reached in STEPS[step]:
        Path(folder, f"reached {step} {reached}").touch()
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            time.sleep(0.05)


class StoppingReader(EventStreamReader):
    """The real reader, which stops when a batch is planned (its offsets are in the checkpoint) or read."""

    folder = step = ""

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Any:
        found = super().partitions(start, end)
        reach(self.folder, self.step, "offsets noted")
        return found

    def read(self, partition: Any) -> Iterator[Any]:
        yield from super().read(partition)
        reach(self.folder, self.step, "read")


class StoppingWriter(MicroBatchWriter):
    """The real writer, which stops when a task has staged its rows, and before and after its commit."""

    folder = step = ""

    def write(self, iterator: Any) -> Any:
        message = super().write(iterator)
        reach(self.folder, self.step, "staged")
        return message

    def commit(self, messages: Any, batchId: int) -> None:
        reach(self.folder, self.step, "before the commit")
        super().commit(messages, batchId)
        reach(self.folder, self.step, "after the commit")


def both(url: str, folder: str, step: str) -> None:
    class Stopping(DataSource):
        """The real source, whose reader and writer stop."""

        @classmethod
        def name(cls) -> str:
            return "stopping"

        def streamReader(self, schema: Any) -> Any:
            return self._stopping(PenstockSource(self.options).streamReader(schema), StoppingReader)

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:
            return self._stopping(PenstockSource(self.options).streamWriter(schema, overwrite), StoppingWriter)

        def _stopping(self, made: Any, kind: Any) -> Any:
            made.__class__ = kind
            made.folder, made.step = folder, step
            return made

    if step in STEPS:
        threading.Thread(target=kill_when_both_reached, args=(folder, step), daemon=True).start()
    spark = session(master="local[2]", config=FAST)
    spark.dataSource.register(Stopping)
    # So that this JVM can start while an earlier driver is still at work.
    appears(Path(folder, f"begin {step}"))
    query = (
        spark.readStream.format("stopping").options(url=url, subscribe="a", startingOffsets="earliest", maxOffsetsPerTrigger="20")
        .schema("key string, n long").load().selectExpr("key", "named_struct('n', n) as value")
        .writeStream.format("stopping").options(url=url, stream="b", checkpointLocation=f"{folder}/checkpoint")
        .trigger(availableNow=True).start()
    )  # fmt: skip
    stop: Callable[[str], None] = lambda reached: reach(folder, step, reached)  # noqa: E731
    Pipeline(spark, url, Lake("main", f"{folder}/lake"), max_rows=30, after_step=stop).run()
    query.awaitTermination()
    if query.exception() is not None:
        raise SystemExit(str(query.exception()))


def appears(path: Path, within: float = 200) -> None:
    """Wait for a file."""
    deadline = time.monotonic() + within
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} did not appear")
        time.sleep(0.05)


def kill_when_both_reached(folder: str, step: str) -> None:
    wanted = [Path(folder, f"reached {step} {reached}") for reached in STEPS[step]]
    while not all(path.exists() for path in wanted):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def cluster(url: str, folder: str, master: str) -> None:
    """Read and write; with speculation, whose copies of a slow task are awaited; then serve as a fleet until drained."""
    speculation = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.minTaskRuntime": "100ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.5",
    }
    config = {**FAST, **speculation, "spark.cores.max": "2", "spark.executor.memory": "512m", "spark.task.maxFailures": "8"}
    spark = session(master=master, config=config)

    def dawdle(batches: Any) -> Iterator[Any]:
        """The first attempt of the first task waits until a copy of it has run: then both have staged all of it."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.partitionId() == 0 and not master.startswith("local"):
            copied = Path(folder, "copied")
            deadline = time.monotonic() + 100
            while context.attemptNumber() == 0 and not copied.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            if context.attemptNumber() > 0:
                copied.touch()

    for round in ("first", "second"):
        history = spark.read.format("penstock").options(url=url, columns="data", minPartitions="3").load()
        jobs = history.repartition(3).mapInArrow(dawdle, "data string")
        jobs.write.format("penstock").options(url=url, job="t").mode("append").save()
        Path(folder, round).touch()
        if round == "first":
            appears(Path(folder, "go"))
    if not master.startswith("local"):
        fleet.run(spark, url, "fleet_app:app", workers=1, fleet="f", ship=Path(__file__).parent)
    spark.stop()


def connect(url: str, folder: str, remote: str) -> None:
    """Read, write and follow through Spark Connect, on a session that knows nothing of Penstock, and on one that does."""
    spark = session(remote=remote)
    own = spark.newSession()
    numbers = own.read.format("penstock").options(url=url, columns="data").load().selectExpr("data as value")
    numbers.write.format("penstock").options(url=url, stream="a").mode("append").save()
    small = spark.read.format("penstock").options(url=url, subscribe="a", pushdown="true").load().where("partition >= 0")
    Path(folder, "read").write_text(str(small.count()))
    query = (
        spark.readStream.format("penstock").options(url=url, subscribe="a", startingOffsets="earliest").schema("n long").load()
        .selectExpr("to_json(struct(n)) as data").writeStream.format("penstock").options(url=url, job="t")
        .option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    {"both": both, "cluster": cluster, "connect": connect}[sys.argv[1]](*sys.argv[2:])
