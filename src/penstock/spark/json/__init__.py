"""JSON payloads as Spark's from_json reads them, without a JVM."""
