"""A nightly pipeline: a graph with Spark steps over the flights of a day."""
