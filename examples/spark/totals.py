"""Exactly once from stream to stream: orders become totals in euros, under the same keys.

The offsets that were read and the batch that was written are one: the checkpoint names the batch, and the sink notes it in the
transaction that appends its events. Kill it anywhere and start it again. Run it with

    python -m examples.spark.totals postgresql://... /var/lib/totals
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

ORDERS = "key string, order_id long, items array<struct<price:double,count:int>>"


def totals(orders: DataFrame) -> DataFrame:
    """The total of each order (`ORDERS`), as an event under the key of the order."""
    total = F.aggregate("items", F.lit(0.0), lambda sum, item: sum + item["price"] * item["count"])
    return orders.select("key", F.struct("order_id", F.round(total, 2).alias("total")).alias("value"))


def start(spark: SparkSession, url: str, checkpoint: str, **trigger: Any) -> StreamingQuery:
    """From the stream `orders` to the stream `totals`."""
    source = spark.readStream.format("penstock").options(url=url, subscribe="orders", startingOffsets="earliest")
    sink = totals(source.schema(ORDERS).load()).writeStream.format("penstock")
    return sink.options(url=url, stream="totals", checkpointLocation=checkpoint).trigger(
        **(trigger or {"processingTime": "1 second"})
    ).start()  # fmt: skip


if __name__ == "__main__":
    from penstock.spark import session

    start(session(app_name="totals"), sys.argv[1], sys.argv[2]).awaitTermination()
