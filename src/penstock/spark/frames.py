"""The transforms of history: pure functions from DataFrame to DataFrame, for the pipeline and for applications.

The input is the archive as `format("penstock")` reads it. No function runs Python for each row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.window import Window

from penstock.core.signatures import VARYING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SKETCH_K = 200
"""Size of the sketches: a quantile is off by at most 1.33 % of the ranks, with 99 % confidence."""
HOT_KEYS = 5

_ERRORS = "array<struct<type:string,message:string,attempt:int,worker:string,started_at:string,failed_at:string>>"
_LONGEST_MESSAGE = 500


def jobs(archive: DataFrame) -> DataFrame:
    """One row for each job, with its day, its minute, and its times in seconds.

    `delay_s` is the time between the moment at which the last attempt could start and its start, `run_s` the time that it ran.
    Both are null for a job that never started.
    """
    return archive.withColumns(
        {
            "day": F.to_date("finished_at"),
            "type": F.col("name"),
            "minute": F.date_trunc("minute", "finished_at"),
            "delay_s": F.greatest(_seconds("started_at") - _seconds("run_after"), F.lit(0.0)),
            "run_s": F.greatest(_seconds("finished_at") - _seconds("started_at"), F.lit(0.0)),
        }
    )


def attempts(jobs: DataFrame) -> DataFrame:
    """One row for each attempt: each failed attempt, and the last attempt of each job that succeeded.

    An error without a time is no attempt: a job that was cancelled, since one after which it was to run did not succeed, has one.
    """
    errors = jobs.select(
        "id", "name", "key", "day", "type", F.posexplode(F.from_json("errors", _ERRORS)).alias("number", "error")
    )
    failed = errors.where("error.failed_at is not null").select(
        "id", "name", "key", "day", "type",
        (F.col("number") + 1).alias("number"),
        F.lit("failed").alias("outcome"),
        F.col("error.worker").alias("worker"),
        F.try_to_timestamp("error.started_at").alias("started_at"),
        F.try_to_timestamp("error.failed_at").alias("ended_at"),
        F.coalesce("error.type", F.lit("unknown")).alias("error_type"),
        F.substring(F.coalesce("error.message", F.lit("")), 1, _LONGEST_MESSAGE).alias("error_message"),
    )  # fmt: skip
    succeeded = jobs.where("status = 'succeeded'").select(
        "id", "name", "key", "day", "type",
        F.col("attempt").cast("int").alias("number"),
        F.lit("succeeded").alias("outcome"),
        "worker", "started_at",
        F.col("finished_at").alias("ended_at"),
        F.lit(None).cast("string").alias("error_type"),
        F.lit(None).cast("string").alias("error_message"),
    )  # fmt: skip
    return failed.unionByName(succeeded)


def rollups(jobs: DataFrame) -> DataFrame:
    """Jobs by type and minute: counts, sums, and sketches of delay and run time that can be merged with others."""
    counts = {status: F.count_if(F.col("status") == status) for status in ("succeeded", "failed", "expired", "cancelled")}
    return jobs.groupBy("day", "type", F.col("name"), "minute").agg(
        *(count.alias(status) for status, count in counts.items()),
        F.sum(F.greatest(F.col("attempt") - 1, F.lit(0))).cast("long").alias("retries"),
        F.coalesce(F.sum("delay_s"), F.lit(0.0)).alias("delay_s"),
        F.coalesce(F.sum("run_s"), F.lit(0.0)).alias("run_s"),
        F.kll_sketch_agg_double("delay_s", SKETCH_K).alias("delay_sketch"),
        F.kll_sketch_agg_double("run_s", SKETCH_K).alias("run_sketch"),
    )


def hot_keys(jobs: DataFrame) -> DataFrame:
    """The keys with the most jobs of each type and minute, and the numbers of these jobs."""
    counted = jobs.where("key is not null").groupBy("name", "minute", "key").count()
    ranked = counted.withColumn(
        "place", F.row_number().over(Window.partitionBy("name", "minute").orderBy(F.desc("count"), "key"))
    )
    return ranked.where(F.col("place") <= HOT_KEYS).select("name", "minute", "key", "count")


def worker_use(jobs: DataFrame) -> DataFrame:
    """The number of jobs that each worker finished in a minute, and the seconds that its handlers ran for them."""
    return (
        jobs.where("worker is not null")
        .groupBy("worker", "minute")
        .agg(F.count("*").alias("jobs"), F.coalesce(F.sum("run_s"), F.lit(0.0)).alias("busy_s"))
    )


def failures(attempts: DataFrame) -> DataFrame:
    """Failed attempts by type, day and signature."""
    failed = attempts.where("outcome = 'failed'").withColumn("message", normalised(F.col("error_message")))
    return (
        failed.withColumn("signature", F.substring(F.md5(F.concat_ws("\n", "error_type", "message")), 1, 16))
        .groupBy("name", "day", "signature")
        .agg(
            F.first("error_type").alias("kind"),
            F.first("message").alias("message"),
            F.min_by("error_message", "id").alias("sample"),
            F.min("id").alias("sample_id"),
            F.count("*").alias("failures"),
            F.min("ended_at").alias("first_at"),
            F.max("ended_at").alias("last_at"),
        )
    )


def normalised(message: Column) -> Column:
    """The first line of a message, with signs for numbers, ids, times, addresses, hosts, paths, quoted text and JSON."""
    found = F.split(F.regexp_replace(message, r"^\s+", ""), "\n").getItem(0)
    for pattern, sign in VARYING:
        found = F.regexp_replace(found, pattern, sign)
    return found


def _seconds(column: str) -> Column:
    return F.unix_micros(F.col(column)) / F.lit(1e6)
