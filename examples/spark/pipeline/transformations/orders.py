"""Orders from a stream become a table, large ones events of another stream, and their sums a view."""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

LARGE = 100


def active() -> SparkSession:
    """The session of the pipeline."""
    found = SparkSession.getActiveSession()
    assert found is not None
    return found


dp.create_sink("large_orders", "penstock", {"stream": "large-orders"})


@dp.table
def orders() -> DataFrame:
    """All orders, as they come."""
    source = active().readStream.format("penstock").option("subscribe", "orders").option("startingOffsets", "earliest")
    return source.schema("key string, order_id long, total double").load()


@dp.append_flow(target="large_orders")
def large() -> DataFrame:
    """The large orders, each once, for the consumers of the stream."""
    source = active().readStream.table("orders").where(F.col("total") >= LARGE)
    return source.select("key", F.to_json(F.struct("order_id", "total")).alias("value"))


@dp.materialized_view
def sums() -> DataFrame:
    """What each customer has ordered."""
    return active().read.table("orders").groupBy("key").agg(F.sum("total").alias("total"))
