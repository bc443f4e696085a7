"""Streams as a Spark data source, with Kafka's options and offsets."""
