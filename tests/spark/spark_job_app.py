"""Spark jobs for test_spark_jobs.py. Run as a program it is a worker for them: `python -m tests.spark.spark_job_app URL`."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from psutil import Process

from penstock import Backoff, Depends, Job, Penstock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FAST = {
    "spark.driver.memory": "600m",
    "spark.sql.shuffle.partitions": "1",
    "spark.default.parallelism": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
SOON = Backoff(timedelta(milliseconds=10))
app = Penstock(sys.argv[1] if __name__ == "__main__" else None)
app.job_type("copied")


def source() -> str:
    """A dependency, which is made in the driver."""
    return "from a dependency"


def stand_in() -> str:
    """What a test puts in place of the dependency."""
    return "from a test"


@app.spark_job("copy", master="local[2]", config=FAST, max_attempts=2, backoff=SOON, keep_result=True)
def copy(spark: SparkSession, job: Job, rows: int, made: Annotated[str, Depends(source)]) -> dict[str, Any]:
    """Enqueue a job for each row; the first attempt fails after that."""
    jobs = spark.range(rows).selectExpr("named_struct('n', id) as data")
    jobs.write.format("penstock").option("job", "copied").mode("append").save()
    job.log(f"attempt {job.attempt} {made}")
    job.progress({"rows": rows})
    if job.attempt == 1:
        raise ValueError("after the write")
    return {"rows": rows, "attempt": job.attempt}


def copy_through(spark: SparkSession, job: Job, rows: int, url: str) -> dict[str, Any]:
    """Enqueue a job for each row, also from a server that knows nothing of this database; the first attempt fails after that."""
    jobs = spark.range(rows).selectExpr("named_struct('n', id) as data")
    jobs.write.format("penstock").option("url", url).option("job", "copied").mode("append").save()
    if job.attempt == 1:
        raise ValueError("after the write")
    names = ("spark.penstock.submitted", "spark.task.maxFailures", "spark.sql.shuffle.partitions")
    shown = [word for process in (Process(), *Process().parents()) for word in process.cmdline()]
    return {
        "session": type(spark).__module__,
        "settings": [spark.conf.get(name, None) for name in names],
        "password": spark.conf.get("spark.penstock.password", None),
        "shown": any("s3cret" in word or "submitted=yes" in word for word in shown),
    }


SUBMITTED = ["--master", "local[2]", "--driver-memory", "600m", "--conf", "spark.penstock.submitted=yes"]
# A setting that a session which has begun does not take, and one that it does.
SETTINGS = {
    "spark.task.maxFailures": "7", "spark.sql.shuffle.partitions": "3", "spark.ui.enabled": "false",
    "spark.penstock.password": " s3cret = a:b\\c#d! ",
}  # fmt: skip
submitted = app.spark_job("submitted", submit=SUBMITTED, config=SETTINGS, max_attempts=2, backoff=SOON, keep_result=True)(
    copy_through
)


@app.spark_job("long", master="local[2]", config=FAST, max_attempts=1)
def long(spark: SparkSession, marker: str) -> None:
    """Write the pid of the driver to a file, and run for an hour."""
    import os

    def wait(_: Any) -> int:
        time.sleep(3600)
        return 1

    Path(marker).write_text(str(os.getpid()))
    spark.sparkContext.parallelize(range(2), 2).map(wait).count()


@app.spark_job("interrupted", master="local[2]", config=FAST, max_attempts=5, keep_result=True)
def interrupted(spark: SparkSession, job: Job, folder: str) -> int:
    """Write to the queue; the first attempt then waits to be killed with its worker."""
    import os

    jobs = spark.range(50).selectExpr("named_struct('n', id) as data")
    jobs.write.format("penstock").option("job", "copied").mode("append").save()
    Path(folder, f"written {job.attempt}").write_text(str(os.getpid()))
    if job.attempt == 1:
        time.sleep(3600)
    return job.attempt


script = app.spark_job("script", script=Path(__file__).parent / "spark_job_script.py", master="local[2]", config=FAST)

if __name__ == "__main__":
    app.run_worker_sync("interrupted")
