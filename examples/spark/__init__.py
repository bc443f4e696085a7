"""Stream processing with Spark over Penstock's streams and queues; `python -m examples.spark.sessions` and so on."""
