"""What Spark looks for at the start of a session: modules named `pyspark_*` with a `DefaultSource`. Small, for that reason."""

from penstock.spark.source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
