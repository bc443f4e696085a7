"""A driver to be killed: moves numbers from files into the queue, or history into a lake.

Run as `python driver.py sink|history URL FOLDER STEP`: at STEP it kills itself with SIGKILL, which is what a lost machine
looks like; with the step `none` it runs to its end. `cluster URL FOLDER MASTER` reads and writes on a cluster.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.lake import Lake
from penstock.spark import session
from penstock.spark import sink as sinks
from penstock.spark.history import Pipeline


def dying_at(step: str) -> Callable[[str], None]:
    def at(reached: str) -> None:
        if reached == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return at


class DyingWriter(sinks.JobStreamWriter):
    """The real writer, whose committing process kills its driver before or after the commit."""

    def __init__(self, *given: Any, step: str, driver: int, once: str) -> None:
        super().__init__(*given)
        self._step, self._driver, self._once = step, driver, once

    def commit(self, messages: Any, batchId: int) -> None:
        if self._step == "before the commit":
            self._kill()
        super().commit(messages, batchId)
        if self._step == "after the commit" and batchId >= 1:
            self._kill()

    def _kill(self) -> None:
        os.kill(self._driver, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def sink(url: str, folder: str, step: str) -> None:
    from pyspark.sql.datasource import DataSource

    from penstock.spark.options import WriteOptions

    driver = os.getpid()

    class Dying(DataSource):
        @classmethod
        def name(cls) -> str:
            return "dying"

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:
            return DyingWriter(WriteOptions.parse(self.options), schema, overwrite, step=step, driver=driver, once=folder)

    spark = session(master="local[2]", config=FAST)
    spark.dataSource.register(Dying)
    stream = spark.readStream.schema("n int").option("maxFilesPerTrigger", "1").json(f"{folder}/source")

    def fail_sometimes(batches: Any) -> Any:
        from pyspark import TaskContext

        yield from batches
        context = TaskContext.get()
        if step == "in a task" and context is not None and context.getLocalProperty("streaming.sql.batchId") == "1":
            os.kill(driver, signal.SIGKILL)

    (
        stream.selectExpr("to_json(struct(n)) as data").mapInArrow(fail_sometimes, "data string")
        .writeStream.format("dying").option("url", url).option("job", "t")
        .option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start().awaitTermination()
    )  # fmt: skip


def history(url: str, folder: str, step: str) -> None:
    spark = session(master="local[2]", config=FAST)
    Pipeline(spark, url, Lake("main", f"{folder}/lake"), max_rows=40, after_step=dying_at(step)).run()


def cluster(url: str, folder: str, master: str) -> None:
    """Read and write on a cluster; then again, when the test has made the file `go`."""
    spark = session(master=master, config={**FAST, "spark.cores.max": "2", "spark.executor.memory": "512m"})
    for round in ("first", "second"):
        history = spark.read.format("penstock").options(url=url, columns="id,data", minPartitions="4").load()
        jobs = history.selectExpr("data", "id").repartition(4)
        jobs.selectExpr("data").write.format("penstock").options(url=url, job="t").mode("append").save()
        Path(folder, round).touch()
        deadline = time.monotonic() + 120
        while round == "first" and not Path(folder, "go").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    spark.stop()


FAST = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.codegen.wholeStage": "false",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


if __name__ == "__main__":
    {"sink": sink, "history": history, "cluster": cluster}[sys.argv[1]](*sys.argv[2:])
