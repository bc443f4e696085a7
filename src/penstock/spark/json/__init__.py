"""JSON payloads as Spark's `from_json` and `to_json` read and write them, without a JVM."""
