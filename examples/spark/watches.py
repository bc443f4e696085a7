"""A change of a price tells everybody who watches the product: a stream joined with a large table enqueues many jobs.

The table is whatever Spark reads, of any size; a change of a popular product becomes a million jobs in one transaction, once. A
customer who was told of a product and has not been reached yet is not told twice (`unique_key`). Run it with

    python -m examples.spark.watches postgresql://... s3a://shop/watches /var/lib/watches
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

CHANGES = "product string, price double"


def notices(changes: DataFrame, watches: DataFrame) -> DataFrame:
    """A job for each customer who watches a product that changed below what they wait for.

    Args:
        changes: Changes of prices (`CHANGES`).
        watches: Columns product, customer, and below, the price that the customer waits for.
    """
    matched = changes.join(watches, "product").where("price < below")
    return matched.select(
        F.struct("customer", "product", "price").alias("data"),
        F.col("customer").alias("key"),
        F.concat_ws("/", "customer", "product").alias("unique_key"),
    )


def start(spark: SparkSession, url: str, watches: DataFrame, checkpoint: str, **trigger: Any) -> StreamingQuery:
    """From the stream `prices` to jobs of the type `notice`."""
    source = spark.readStream.format("penstock").options(url=url, subscribe="prices", startingOffsets="earliest")
    jobs = notices(source.schema(CHANGES).load(), watches)
    sink = jobs.writeStream.format("penstock").options(url=url, job="notice", checkpointLocation=checkpoint)
    return sink.trigger(**(trigger or {"processingTime": "5 seconds"})).start()


if __name__ == "__main__":
    from penstock.spark import session

    spark = session(app_name="watches")
    start(spark, sys.argv[1], spark.read.parquet(sys.argv[2]), sys.argv[3]).awaitTermination()
