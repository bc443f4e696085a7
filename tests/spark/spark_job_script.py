"""A script of Spark that knows nothing of Penstock but its job: run by test_spark_jobs.py."""

from pathlib import Path

from pyspark.sql import SparkSession

from penstock import current_job

spark = SparkSession.builder.getOrCreate()
data = current_job().data
Path(data["file"]).write_text(str(spark.range(data["rows"]).count()))
